"""Where a config comes from, and what a person reads when it cannot be had. The hub is a server on this machine."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serve_app import demo_model
from serve_app.config import FakeScript, Source
from serve_app.planning import checkpoint
from serve_app.planning.checkpoint import Checkpoint, CheckpointError, checkpoint_config
from tests.hub import REPO, Mirror, forget_hubs, running_mirror
from tests.planning.configs import LLAMA_8B

CONFIG = json.dumps(LLAMA_8B).encode()
INDEX = json.dumps({"metadata": {"total_size": 16_060_522_496}, "weight_map": {}}).encode()


@pytest.fixture
def mirror() -> Iterator[Mirror]:
    with running_mirror() as running:
        yield running


@pytest.fixture
def env(mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment that knows the mirror and nothing else."""
    forget_hubs(monkeypatch)
    return {"HF_ENDPOINT": mirror.endpoint, "HF_HOME": str(tmp_path / "hf")}


def ask(env: dict[str, str], **engine: Any) -> Checkpoint:
    return checkpoint_config(Source(hub=REPO), engine, env)


def refusal(env: dict[str, str], **engine: Any) -> str:
    with pytest.raises(CheckpointError) as error:
        ask(env, **engine)
    assert "\n" not in str(error.value)
    return str(error.value)


# --- the hub, or a mirror


def test_the_hub_gives_the_config_and_the_size(mirror: Mirror, env: dict[str, str]) -> None:
    """The index is metadata: the weights are never asked for."""
    mirror.has("config.json", CONFIG)
    mirror.has("model.safetensors.index.json", INDEX)
    got = ask(env)
    assert got.config["num_key_value_heads"] == 8
    assert got.stored_bytes == 16_060_522_496
    assert got.origin == f"{mirror.endpoint}, {REPO} at main"
    assert [path.rpartition("/")[2] for _, path, _ in mirror.asked] == ["config.json", "model.safetensors.index.json"]


def test_the_size_of_a_single_file_is_read_off_its_head(mirror: Mirror, env: dict[str, str]) -> None:
    """The hub names it while it redirects to where the file is; a plain mirror by the answer's length."""
    mirror.has("config.json", CONFIG)
    mirror.has("model.safetensors", status=302, x_linked_size="270000000", location="http://127.0.0.1:9/elsewhere")
    assert ask(env).stored_bytes == 270_000_000
    mirror.has("model.safetensors", content_length="280000000")
    assert ask(env).stored_bytes == 280_000_000
    assert ("GET", f"/{REPO}/resolve/main/model.safetensors", None) not in mirror.asked


@pytest.mark.parametrize("index", [b"not json", b"{}", b"[]", b'{"metadata": {"total_size": "much"}}'])
def test_a_broken_index_is_as_good_as_none(mirror: Mirror, env: dict[str, str], index: bytes) -> None:
    """The count from the config is enough."""
    mirror.has("config.json", CONFIG)
    mirror.has("model.safetensors.index.json", index)
    assert ask(env).stored_bytes is None


def test_the_revision_is_the_engines(mirror: Mirror, env: dict[str, str]) -> None:
    """``engine.revision`` is what vLLM would load."""
    mirror.has("config.json", CONFIG, revision="v2")
    assert ask(env, revision="v2").origin.endswith("at v2")


def test_the_token_is_sent_and_never_shown(mirror: Mirror, env: dict[str, str], tmp_path: Path) -> None:
    """From HF_TOKEN, else from the file that logging in writes."""
    mirror.has("config.json", CONFIG)
    assert "secret" not in repr(ask(env | {"HF_TOKEN": "secret"}))
    assert mirror.asked[0][2] == "Bearer secret"
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "token").write_text("from-file\n")
    ask(env)
    assert mirror.asked[-1][2] == "Bearer from-file"


def test_a_gated_model_says_where_to_accept_its_licence(mirror: Mirror, env: dict[str, str]) -> None:
    """Without a token, and with one of an account that has no access: two different things to do."""
    mirror.has("config.json", status=401, x_error_code="GatedRepo")
    assert refusal(env) == (
        f"{REPO} is gated: accept its licence at {mirror.endpoint}/{REPO}, then set HF_TOKEN to a token of that account"
    )
    mirror.has("config.json", status=403, x_error_code="GatedRepo")
    told = refusal(env | {"HF_TOKEN": "secret"})
    assert "your token has no access" in told
    assert "secret" not in told


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (401, "RepoNotFound", "correct source.hub; set HF_TOKEN if it is private"),
        (401, None, "correct source.hub; set HF_TOKEN if it is private"),
        (404, "RepoNotFound", "correct source.hub"),
        (404, "RevisionNotFound", "has no revision main"),
        (404, "EntryNotFound", "has no config.json"),
        (404, None, "correct source.hub"),
        (403, None, "is gated: accept its licence"),
        (429, None, "answered 429"),
        (500, None, "answered 500"),
        (503, None, "try again later"),
    ],
)
def test_each_refusal_of_the_hub_is_one_line(
    mirror: Mirror, env: dict[str, str], status: int, code: str | None, words: str
) -> None:
    """What is wrong and what to do, whether or not a mirror sends the hub's error codes."""
    mirror.has("config.json", status=status, **({"x_error_code": code} if code else {}))
    assert words in refusal(env)


@pytest.mark.parametrize("body", [b"<html>login</html>", b"[1]", b"", b"\xff\xfe"])
def test_garbage_is_no_config(mirror: Mirror, env: dict[str, str], body: bytes) -> None:
    """A captive portal answers 200 too."""
    mirror.has("config.json", body)
    assert "something else than a config.json" in refusal(env)


def test_an_unreachable_hub_is_one_line(env: dict[str, str]) -> None:
    """Nothing listens there."""
    told = refusal(env | {"HF_ENDPOINT": "http://127.0.0.1:9"})
    assert told.startswith(f"http://127.0.0.1:9 cannot be reached for {REPO}")
    assert "HF_ENDPOINT" in told


@pytest.mark.parametrize("endpoint", ["huggingface.co", "ftp://x", "http://[", "http://"])
def test_an_endpoint_that_is_no_address(env: dict[str, str], endpoint: str) -> None:
    """Says which variable is wrong."""
    assert "HF_ENDPOINT" in refusal(env | {"HF_ENDPOINT": endpoint})


def test_a_silent_hub_is_given_up(mirror: Mirror, env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan waits seconds, not minutes."""
    monkeypatch.setattr(checkpoint, "TIMEOUT_S", 0.2)
    mirror.silent.set()
    assert "no answer within 0.2 s" in refusal(env)


# --- the cache


def _snapshot(root: Path, commit: str, ref: str | None = "main") -> Path:
    model = root / f"models--{REPO.replace('/', '--')}"
    folder = model / "snapshots" / commit
    folder.mkdir(parents=True)
    (folder / "config.json").write_bytes(CONFIG)
    if ref:
        (model / "refs").mkdir(exist_ok=True)
        (model / "refs" / ref).write_text(commit)
    return folder


@pytest.mark.parametrize(
    ("variable", "below"), [("HF_HOME", "hub"), ("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", "")]
)
def test_the_cache_comes_first(mirror: Mirror, env: dict[str, str], tmp_path: Path, variable: str, below: str) -> None:
    """It is what the engine would load, and it needs no network."""
    folder = _snapshot(tmp_path / "c" / below, "abcdef0123456789")
    (folder / "model.safetensors.index.json").write_bytes(INDEX)
    got = ask(env | {variable: str(tmp_path / "c"), "HF_HUB_OFFLINE": "1"})
    assert (got.origin, got.stored_bytes) == (f"the hub cache, {REPO} at abcdef012345", 16_060_522_496)
    assert mirror.asked == []


def test_the_cache_knows_revisions_by_name_and_by_commit(env: dict[str, str], tmp_path: Path) -> None:
    """Another revision than the cached one is not in the cache."""
    _snapshot(tmp_path / "hf" / "hub", "abcdef", ref="v2")
    offline = env | {"HF_HUB_OFFLINE": "1"}
    assert ask(offline, revision="v2").origin == ask(offline, revision="abcdef").origin
    assert "HF_HUB_OFFLINE is set" in refusal(offline)


def test_a_broken_file_in_the_cache_is_named(env: dict[str, str], tmp_path: Path) -> None:
    """A download that was cut off."""
    (_snapshot(tmp_path / "hf" / "hub", "abcdef") / "config.json").write_text("{")
    assert "remove it to have it fetched again" in refusal(env)


# --- what is on this machine


def test_a_folder(tmp_path: Path) -> None:
    """The size of its weights from the index, else from the single file."""
    (tmp_path / "config.json").write_bytes(CONFIG)
    source = Source(path=str(tmp_path))
    assert checkpoint_config(source, {}).stored_bytes is None
    (tmp_path / "model.safetensors").write_bytes(b"12345678")
    assert checkpoint_config(source, {}).stored_bytes == 8
    (tmp_path / "model.safetensors.index.json").write_bytes(INDEX)
    got = checkpoint_config(source, {})
    assert (got.stored_bytes, got.origin) == (16_060_522_496, f"the folder {tmp_path}")


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    """A plan may be made on a machine that has no weights: then it says so."""
    with pytest.raises(CheckpointError, match=r"has no config\.json on this machine"):
        checkpoint_config(Source(path=str(tmp_path / "gone")), {})
    with pytest.raises(CheckpointError, match="is relative"):
        checkpoint_config(Source(path="models/x"), {})


def test_a_shape() -> None:
    """Those of this repository by their short name."""
    got = checkpoint_config(Source(shape="shapes/Qwen3-30B-A3B.json"), {})
    assert (got.config["num_experts"], got.origin) == (128, "the shape shapes/Qwen3-30B-A3B.json")
    with pytest.raises(CheckpointError, match="cannot read"):
        checkpoint_config(Source(shape="shapes/gone.json"), {})


def test_the_demo_model_needs_no_preparation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before `modelyard prepare` its shape tells the same; afterwards its folder does."""
    monkeypatch.setenv("MODELYARD_HOME", str(tmp_path))
    source = Source(demo="smollm2-135m-instruct")
    assert checkpoint_config(source, {}).config["num_hidden_layers"] == 30

    def convert(_package: demo_model.Package, folder: Path, _lock: int) -> None:
        (folder / "config.json").write_bytes(CONFIG)

    demo_model.prepare(lambda _: None, package=demo_model.Package(tmp_path, "1"), convert=convert)
    assert checkpoint_config(source, {}).origin == "the demo model"


def test_the_fake_engine_has_none() -> None:
    """Nothing to plan, in words."""
    with pytest.raises(CheckpointError, match="fake engine"):
        checkpoint_config(Source(fake=FakeScript()), {})
