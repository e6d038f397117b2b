"""local_serve: what is read from a deployment file and shown."""

import io
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from serve_app import local_cluster, local_serve
from serve_app.local_cluster import LocalClusterError, Session
from serve_app.ray_api import Application, ServeState


def model(name: str, **args: Any) -> dict[str, Any]:
    return {"name": name, "import_path": "serve_app.model:app", "route_prefix": None, "args": args}


GATEWAY = {"name": "gateway", "import_path": "serve_app.gateway:app", "route_prefix": "/"}
NOTHING = ServeState(False, (), None, None)


@pytest.mark.parametrize(
    ("source", "uses"),
    [
        ({"demo": "smollm2-135m-instruct"}, True),
        ({"shape": "llama.json"}, True),
        ({"shape": "llama.json", "tokenizer": "org/name"}, False),
        ({"hub": "org/name"}, False),
        ({"fake": {}}, False),
    ],
)
def test_uses_demo(source: dict[str, Any], uses: bool) -> None:
    """The demo model is made for files that run it or borrow its tokenizer, and for no others."""
    assert local_serve.uses_demo({"applications": [GATEWAY, model("m", source=source)]}) is uses


@pytest.mark.parametrize(
    ("http", "prefix", "running", "url"),
    [
        ({}, "/", NOTHING, "http://127.0.0.1:8000"),
        ({"host": "0.0.0.0", "port": 9000}, "/", NOTHING, "http://127.0.0.1:9000"),
        ({"host": "::"}, "/llm", NOTHING, "http://[::1]:8000/llm"),
        ({"port": 9000}, "/", ServeState(True, (), "10.0.0.1", 8000), "http://10.0.0.1:8000"),
    ],
)
def test_url(http: dict[str, Any], prefix: str, running: ServeState, url: str) -> None:
    """A URL that works from here; where Serve runs already, its own host and port win over the file's."""
    config = {"http_options": http, "applications": [GATEWAY | {"route_prefix": prefix}]}
    assert local_serve.url_of(running, config) == url


def test_curl_lines_survive_a_shell() -> None:
    """One line per model, none for the gateway; pasted, the shell gives curl valid JSON with the model's name."""
    applications = [GATEWAY, model("chat", source={"fake": {}}), model("e", engine={"runner": "pooling"})]
    lines = local_serve.curl_lines({"applications": applications}, "http://h:1")
    chat, embed = (shlex.split(line) for line in lines)
    assert (chat[1], embed[1]) == ("http://h:1/v1/chat/completions", "http://h:1/v1/embeddings")
    assert json.loads(chat[-1])["model"] == "chat"
    assert json.loads(embed[-1]) == {"model": "e", "input": "Hello."}
    guarded = GATEWAY | {"deployments": [{"name": "Gateway", "user_config": {"keys_file": "/k.yaml"}}]}
    line = local_serve.curl_lines({"applications": [guarded, model("chat")]}, "http://h:1")[0]
    assert '-H "Authorization: Bearer $MODELYARD_API_KEY"' in line


def test_somebody_elses_applications_are_not_deleted() -> None:
    """On a Ray that is not ours, a file that does not name what runs there is refused before it is deployed."""
    state = ServeState(
        True, (Application("gateway", "RUNNING", "", ""), Application("theirs", "RUNNING", "", "")), "", 1
    )
    with pytest.raises(LocalClusterError, match="that Ray serves theirs"):
        local_serve._refuse_to_delete(state, {"applications": [GATEWAY]})
    local_serve._refuse_to_delete(state, {"applications": [GATEWAY, model("theirs")]})
    local_serve._refuse_to_delete(NOTHING, {"applications": []})


def test_brief_shows_what_and_why() -> None:
    """Of a traceback the first and the last line; of one line that line; of nothing nothing."""
    assert local_serve._brief("failed:\n  File x\nValueError: no") == "failed: … ValueError: no"
    assert local_serve._brief("one") == "one"
    assert local_serve._brief("") == ""


class RecordingApi(local_serve.RayApi):
    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:9")
        self.shut_downs = 0

    def shut_down(self, timeout_s: float) -> None:
        self.shut_downs += 1


def test_stop_after_our_ray_died_touches_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a crash or a reboot another Ray may answer at the remembered address: its Serve is left alone."""
    monkeypatch.setenv("MODELYARD_HOME", str(tmp_path))
    session = Session(id="gone", folder=str(tmp_path / "private"), dashboard="http://127.0.0.1:9", ports=())
    local_cluster.save(session)
    api = RecordingApi()
    local_serve._stop(local_serve.Cluster(api, session, fresh=False), Console(quiet=True), ours=True)
    assert api.shut_downs == 0
    assert local_cluster.load() is None


def test_stop_on_somebody_elses_ray_ends_only_our_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There, Serve is shut down where this command had started it, and otherwise nothing is."""
    monkeypatch.setenv("MODELYARD_HOME", str(tmp_path))
    api = RecordingApi()
    local_serve._stop(local_serve.Cluster(api, None, fresh=False), Console(quiet=True), ours=False)
    assert api.shut_downs == 0
    local_serve._stop(local_serve.Cluster(api, None, fresh=False), Console(quiet=True), ours=True)
    assert api.shut_downs == 1


def problem(at: str, *changes: str) -> dict[str, Any]:
    why = "needs 2 GPUs of one node; the cluster has no GPU"
    return {"name": "tp2", "at": at, "wanted": 1, "found": 0, "why": why, "changes": list(changes)}


def refused(plan: dict[str, Any] | None) -> str:
    """What is printed where nothing is refused."""
    console = Console(file=io.StringIO(), width=200)
    local_serve.refuse_what_does_not_fit(plan, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_what_does_not_fit_at_min_is_refused() -> None:
    """With what is needed, what there is, and what would fit."""
    plan = {"problems": [problem("min", "tensor_parallel_size: 1")], "nodes_are_added": False}
    with pytest.raises(local_serve.ServeError) as error:
        refused(plan)
    assert str(error.value).splitlines() == [
        "nothing was deployed: there is no room for all of it.",
        "tp2: 0 of 1 replicas fit. It needs 2 GPUs of one node; the cluster has no GPU.",
        "  would fit: tensor_parallel_size: 1",
    ]


def test_what_does_not_fit_at_max_or_not_yet_is_a_warning() -> None:
    """The rest serves; and where nodes are added as they are needed, what waits is what brings them."""
    at_max = refused({"problems": [problem("max")], "nodes_are_added": False})
    assert at_max.startswith("Warning: tp2: 0 of 1 replicas fit at max.")
    assert "Nodes are added" in refused({"problems": [problem("min")], "nodes_are_added": True})
    assert refused({"problems": [], "nodes_are_added": False}) == ""
    assert refused(None) == "Whether the file fits was not checked.\n"


def test_room_is_looked_for_only_where_something_waits() -> None:
    """And a dashboard that does not answer takes nothing away."""
    room = local_serve.Room(local_serve.RayApi("http://127.0.0.1:9"), after_s=0)
    running, waits = Application("a", "RUNNING", "", ""), Application("b", "DEPLOYING", "", "serve's words")
    assert room.explain([running]) == [running]
    assert room.explain([running, waits]) == [running, waits]
