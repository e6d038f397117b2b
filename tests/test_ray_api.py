"""ray_api: Ray's answers, reduced; and where the token comes from."""

from pathlib import Path

import pytest

from serve_app import ray_api


def test_state_of_a_cluster_without_serve() -> None:
    """Ray answers with empty objects before Serve was started."""
    state = ray_api.parse_state({"controller_info": {}, "proxies": {}, "applications": {}, "target_capacity": None})
    assert not state.running
    assert state.applications == ()


def test_state_counts_replicas_and_joins_messages() -> None:
    """Running against wanted replicas per deployment; a deployment's reason is not lost behind its application's."""
    model = {
        "target_num_replicas": 2,
        "replicas": [{"state": "RUNNING"}, {"state": "STARTING"}],
        "message": "no memory",
    }
    card = {"target_num_replicas": 1, "replicas": [{"state": "RUNNING"}], "message": ""}
    state = ray_api.parse_state(
        {
            "controller_info": {"node_id": "n"},
            "http_options": {"host": "127.0.0.1", "port": 8000},
            "applications": {
                "chat": {"status": "DEPLOYING", "message": "waiting", "deployments": {"Model": model, "Card": card}}
            },
        }
    )
    assert state.running
    assert (state.http_host, state.http_port) == ("127.0.0.1", 8000)
    chat = state.application("chat")
    assert chat == ray_api.Application("chat", "DEPLOYING", "Model 1/2, Card 1/1", "waiting\nno memory")
    assert state.application("other") is None


def test_token_from_where_ray_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable, then the named file, then the file in the home folder; none of them is no error."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ray_api.token({}) is None
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("home\n")
    (tmp_path / "named").write_text("named\n")
    assert ray_api.token({}) == "home"
    assert ray_api.token({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "named")}) == "named"
    assert ray_api.token({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "named"), "RAY_AUTH_TOKEN": "direct"}) == "direct"
    assert ray_api.token({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "absent")}) is None


def test_no_dashboard_is_no_ray() -> None:
    """A port that nobody listens on: no version, and calls say that the dashboard did not answer."""
    api = ray_api.RayApi("http://127.0.0.1:9")
    assert api.version() is None
    with pytest.raises(ray_api.RayApiError, match="did not answer"):
        api.state()
