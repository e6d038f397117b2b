"""Which streams may be continued, and by whom: pure."""

import pytest

from serve_app import resume
from serve_app.config import ModelArgs
from serve_app.model.journal import Step, decode, encode

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "hi"}], "stream": True, "temperature": 0.7, "seed": 1, "stop": ["x"]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "n": 1, "tools": None},
        {"messages": [], "response_format": {"type": "text"}, "logprobs": False, "presence_penalty": 0},
        {"prompt": [1, 2, 3], "echo": False, "n": 1},
    ],
)
def test_plain_requests_can_be_continued(body: dict[str, object]) -> None:
    """Sampling, stop strings, ids as a prompt, and options at the values that change nothing."""
    assert resume.why_not(CHAT, body) is None


@pytest.mark.parametrize("field", sorted(resume.NOT_RESUMABLE))
def test_what_depends_on_more_than_the_ids_is_not_continued(field: str) -> None:
    """Every field of the list stands in the way with a value that does something, and not with its harmless ones."""
    harmless, why = resume.NOT_RESUMABLE[field]
    assert resume.why_not(CHAT, {field: {"some": "value"}}) == f"{field}: {why}"
    assert all(resume.why_not(CHAT, {field: value}) is None for value in (*harmless, None))


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        (CHAT, {"n": 2}, "n:"),
        (CHAT, {"n": True}, "n:"),
        (CHAT, {"logprobs": True}, "logprobs:"),
        (CHAT, {"invented_tomorrow": 1}, "not known to be safe"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages:"),
        ("/v1/completions", {"prompt": ["one", "two"]}, "prompt:"),
        ("/v1/completions", {"prompt": [[1, 2], [3]]}, "prompt:"),
        ("/v1/responses", {}, "/v1/responses is not"),
        (CHAT, [], "not an object"),
    ],
)
def test_the_reason_is_named(path: str, body: object, word: str) -> None:
    """Several answers, unknown fields, pictures, other routes."""
    assert word in str(resume.why_not(path, body))


def _args(**more: object) -> ModelArgs:
    return ModelArgs.model_validate({"source": {"hub": "org/name"}} | more)


def test_the_generation_is_what_the_tokens_depend_on() -> None:
    """Memory, batch size, context and parallelism may change between two replicas of one stream; weights, tokenizer,
    template and unknown engine arguments may not."""
    base = resume.generation(_args())
    same = [_args(engine={"max_num_seqs": 4, "max_model_len": 100}), _args(tensor_parallel_size=2), _args(overcommit=1)]
    assert {resume.generation(args) for args in same} == {base}
    other = [
        _args(source={"hub": "org/other"}),
        _args(engine={"revision": "abc"}),
        _args(engine={"quantization": "fp8"}),
        _args(frontend={"chat_template": "x"}),
    ]
    assert len({base, *map(resume.generation, other)}) == 5


def test_a_journal_survives_its_way() -> None:
    """Records of several groups, joined as a gateway joins them, are read back; an empty journal too."""
    steps = (Step((5,), 1), Step((), 1), Step((7, 8), 9, finished=True))
    assert decode(b";".join((encode(steps[:1]), encode(steps[1:])))) == steps
    assert decode(b"") == ()
