"""What a start tells while it is under way, and what it knows before vLLM tries."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve_app.config import ModelArgs, Source
from serve_app.model import loading
from serve_app.model.engine import VllmEngine
from serve_app.model.loading import Download, download, told
from serve_app.planning.checkpoint import Unobtainable
from serve_app.sources import SourceError
from tests.hub import REPO, Mirror, forget_hubs, running_mirror

HUB = Source(hub=REPO)


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    """The hub of this process, which knows no other and has no cache yet."""
    forget_hubs(monkeypatch)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    with running_mirror() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.endpoint)
        yield running


@pytest.mark.parametrize(
    ("files", "total", "progress"),
    [
        ({}, 10**9, ""),
        ({"a": 3}, 10**9, ""),
        ({"a": 3, "b.incomplete": 1}, 16_100_000_000, "downloading: 0.4 of 16.1 GB"),
        ({"b.incomplete": 1}, None, "downloading: 0.1 GB"),
        ({"a": 3, "b.incomplete": 1}, 10**8, "downloading: 0.4 of 0.4 GB"),
    ],
)
def test_how_far_a_download_is(tmp_path: Path, files: dict[str, int], total: int | None, progress: str) -> None:
    """What lies in the cache's folder, of the weights' size where that is known; nothing where all is finished."""
    (tmp_path / "blobs").mkdir()
    for name, tenths in files.items():
        with (tmp_path / "blobs" / name).open("wb") as file:
            file.truncate(tenths * 10**8)  # takes no room
    assert Download(tmp_path, total).progress() == progress


def test_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    """Before the first byte there is none."""
    assert Download(tmp_path / "none", 1).progress() == ""


def test_a_line_is_told_now_and_then_and_not_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the block holds the thread that runs it, as the engine's start holds the event loop."""
    monkeypatch.setattr(loading, "TELL_S", 0.01)
    heard: list[str] = []
    with told(heard.append, None):
        while len(heard) < 3:
            time.sleep(0.01)
    assert {line.partition(" for ")[0] for line in heard} == {"loading"}
    many = len(heard)
    time.sleep(0.1)
    assert len(heard) == many


def test_what_is_downloaded_is_known_from_the_hub(mirror: Mirror, tmp_path: Path) -> None:
    """Its size, and where it will lie: also where the engine is told of another folder."""
    mirror.has("config.json", b"{}")
    mirror.has("model.safetensors", content_length="280000000")
    for engine, cache in (({}, tmp_path / "hf" / "hub"), ({"download_dir": str(tmp_path / "d")}, tmp_path / "d")):
        found = download(HUB, engine)
        blobs = cache / f"models--{REPO.replace('/', '--')}" / "blobs"
        blobs.mkdir(parents=True)
        (blobs / "x.incomplete").write_bytes(b"")
        assert found is not None
        assert found.progress() == "downloading: 0.0 of 0.3 GB"


def test_nothing_is_downloaded_for_other_sources() -> None:
    """Folders, shapes and the demo model are on the node."""
    assert download(Source(path="/models/mine"), {}) is None


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (401, "RepoNotFound", "correct source.hub; set HF_TOKEN if it is private"),
        (403, "GatedRepo", "is gated: accept its licence"),
        (404, "RevisionNotFound", "has no revision main"),
    ],
)
def test_what_the_hub_refuses_is_one_line_before_vllm_tries(mirror: Mirror, status: int, code: str, words: str) -> None:
    """The cause that a status page shows: no traceback, no advice of three libraries."""
    mirror.has("config.json", status=status, x_error_code=code)
    with pytest.raises(Unobtainable, match=words) as refused:
        asyncio.run(VllmEngine(ModelArgs(source=HUB), "m").start())
    assert "\n" not in str(refused.value)


def test_a_hub_without_a_config_or_in_trouble_is_left_to_the_engine(mirror: Mirror) -> None:
    """Some formats have no config.json, and vLLM asks more than once: this is no reason to give up."""
    assert download(HUB, {}) is not None
    mirror.has("config.json", status=503)
    assert download(HUB, {}) is not None


def test_a_folder_that_is_not_on_the_node_is_one_line(tmp_path: Path) -> None:
    """vLLM would take it for a hub's id, and ask there."""
    args = ModelArgs(source=Source(path=str(tmp_path / "gone")))
    with pytest.raises(SourceError, match=r"there is no folder .*/gone on this node"):
        asyncio.run(VllmEngine(args, "m").start())
