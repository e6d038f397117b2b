"""The public client libraries, unmodified."""

import pytest

from tests.serve.cluster import Cluster

pytestmark = pytest.mark.engine
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def test_openai(engines: Cluster) -> None:
    """Chat, stream, completion, embeddings, models, a stateless response, and its error classes."""
    openai = pytest.importorskip("openai")  # here: the fast tier must not pay for it
    with openai.OpenAI(base_url=f"{engines.url}/v1", api_key="none", max_retries=0) as client:
        chat = {"model": "chat", "messages": QUESTION, "max_tokens": 12, "temperature": 0}
        said = client.chat.completions.create(**chat).choices[0].message.content
        assert "Paris" in said
        chunks = client.chat.completions.create(**chat, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == said
        assert client.completions.create(model="chat", prompt="The sea", max_tokens=4).choices[0].text
        assert len(client.embeddings.create(model="embed", input="the sea").data[0].embedding) == 576
        assert {"chat", "embed", "smollm2-135m-instruct"} <= {model.id for model in client.models.list()}
        assert client.models.retrieve("chat").id == "chat"
        response = client.responses.create(
            model="chat", input=QUESTION[0]["content"], max_output_tokens=12, temperature=0, store=False
        )
        assert "Paris" in response.output_text
        with client.responses.stream(model="chat", input="The sea", max_output_tokens=4) as stream:
            assert stream.get_final_response().output_text
        with pytest.raises(openai.NotFoundError) as unknown:
            client.chat.completions.create(**{**chat, "model": "Chat"})
        assert unknown.value.code == "model_not_found"
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="temperature"):
                client.chat.completions.create(**{**chat, "temperature": -1}, stream=stream)
        with pytest.raises(openai.BadRequestError, match="store"):
            client.responses.create(model="chat", input="x", store=True)


def test_anthropic(engines: Cluster) -> None:
    """A message, its stream, a count of tokens, and its error class."""
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=engines.url, api_key="none", max_retries=0) as client:
        ask = {"model": "chat", "messages": QUESTION, "max_tokens": 12}
        # Of temperature this library lets nothing through: it is in the body, or nowhere.
        cold = {"extra_body": {"temperature": 0}}
        message = client.messages.create(**ask, **cold)
        assert "Paris" in message.content[0].text
        assert (message.model, message.role) == ("chat", "assistant")
        with client.messages.stream(**ask, **cold) as stream:
            assert "".join(stream.text_stream) == message.content[0].text
        counted = client.messages.count_tokens(model="chat", messages=QUESTION)
        assert counted.input_tokens == message.usage.input_tokens
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(**{**ask, "model": "claude"})
