"""demo_model: made once, whole or not at all, and again for a new package version."""

import json
import threading
from pathlib import Path

import pytest

from serve_app import demo_model
from serve_app.demo_model import DemoModelError, Package

V1 = Package(Path("x.gguf"), "1")
V2 = Package(Path("x.gguf"), "2")


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELYARD_HOME", str(tmp_path))


class Converter:
    """Writes the package's version as the weights; can fail half-way, or hold until it is let go."""

    def __init__(self, fail: bool = False) -> None:
        self.calls = 0
        self.fail = fail
        self.entered = threading.Event()
        self.go = threading.Event()
        self.go.set()

    def __call__(self, package: Package, folder: Path, lock: int) -> None:
        self.calls += 1
        assert list(folder.iterdir()) == []
        (folder / "model.safetensors").write_text(package.version)
        self.entered.set()
        assert self.go.wait(10)
        if self.fail:
            raise DemoModelError("half-way")


def quiet(line: str) -> None:
    pass


def weights() -> str:
    return (demo_model.path() / "model.safetensors").read_text()


def test_missing_model_names_the_command() -> None:
    """Without the model the error says what to run."""
    with pytest.raises(DemoModelError, match="modelyard prepare"):
        demo_model.path()


def test_made_once_under_the_home_folder(tmp_path: Path) -> None:
    """The second call converts nothing; the folder is where the documentation says."""
    convert = Converter()
    folder = demo_model.prepare(quiet, package=V1, convert=convert)
    assert folder == tmp_path / "models" / "smollm2-135m-instruct" == demo_model.path()
    assert demo_model.prepare(quiet, package=V1, convert=convert) == folder
    assert convert.calls == 1
    assert json.loads((folder / "modelyard.json").read_text())["version"] == "1"


def test_new_package_version_converts_again() -> None:
    """A package upgrade replaces the folder."""
    convert = Converter()
    demo_model.prepare(quiet, package=V1, convert=convert)
    demo_model.prepare(quiet, package=V2, convert=convert)
    assert weights() == "2"


def test_half_written_model_is_never_used() -> None:
    """A conversion that fails leaves the old state, and the next one starts from an empty folder."""
    with pytest.raises(DemoModelError, match="half-way"):
        demo_model.prepare(quiet, package=V1, convert=Converter(fail=True))
    with pytest.raises(DemoModelError, match="modelyard prepare"):
        demo_model.path()
    demo_model.prepare(quiet, package=V1, convert=Converter())
    with pytest.raises(DemoModelError, match="half-way"):
        demo_model.prepare(quiet, package=V2, convert=Converter(fail=True))
    assert weights() == "1"


def test_folder_without_a_record_is_not_the_model() -> None:
    """Only a folder that was finished counts: the record is written last."""
    folder = demo_model.prepare(quiet, package=V1, convert=Converter())
    (folder / "modelyard.json").write_text("{")
    with pytest.raises(DemoModelError):
        demo_model.path()


def test_two_at_once_convert_once() -> None:
    """The second caller waits for the first, says so, and uses its result."""
    convert, lines = Converter(), []
    convert.go.clear()
    waiting = threading.Event()

    def hear(line: str) -> None:
        lines.append(line)
        waiting.set()

    first = threading.Thread(target=demo_model.prepare, args=(quiet,), kwargs={"package": V1, "convert": convert})
    second = threading.Thread(target=demo_model.prepare, args=(hear,), kwargs={"package": V1, "convert": convert})
    first.start()
    assert convert.entered.wait(10)
    second.start()
    assert waiting.wait(10)
    convert.go.set()
    first.join(10)
    second.join(10)
    assert convert.calls == 1
    assert lines == ["another process is converting the demo model: waiting for it"]
    assert weights() == "1"


def test_failing_conversion_shows_the_end_of_its_output(tmp_path: Path) -> None:
    """The child's last lines are in the error: a broken weights file is named by the library's own message."""
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"not a model")
    with pytest.raises(DemoModelError, match=r"(?s)broken\.gguf failed \(exit status 1\)"):
        demo_model.prepare(quiet, package=Package(broken, "1"), convert=demo_model._convert_in_child)
