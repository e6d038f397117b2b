"""plan_command and its options: exit statuses, what is printed where, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from serve_app import plan_command
from serve_app.cli import app
from serve_app.plan_inputs import dashboard_address, gather
from tests.planning.fleets import config, model, scaled

CHAT = {"shape": "shapes/Llama-3.1-8B-Instruct.json"}
NOBODY = "http://127.0.0.1:9"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """One GPU, and two of one node."""
    return written(tmp_path, model("chat", source=CHAT), model("pair", source=CHAT, tensor_parallel_size=2))


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_DASHBOARD_ADDRESS", NOBODY)
    monkeypatch.setenv("MODELYARD_HOME", str(tmp_path / "home"))


def written(folder: Path, *entries: dict[str, Any]) -> Path:
    path = folder / "fleet.yaml"
    path.write_text(yaml.safe_dump(config(*entries)))
    return path


def plan(file: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["plan", str(file), *options], env={"COLUMNS": "100"})


def test_a_fleet_that_fits_exits_0(file: Path) -> None:
    """Tables, a bar per GPU, and the verdict last."""
    result = plan(file, "--nodes", "1x4xH200-141G")
    assert result.exit_code == 0, result.output
    assert "H200-1" in result.stdout
    assert result.stdout.rstrip().endswith("Fits.")


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ("1x1xH200-141G", "needs 2 GPUs of one node; the cluster has 1 GPU"),
        ("2x1xH200-141G", "needs 2 GPUs of one node; the cluster has 2 GPUs, but at most 1 on one node"),
        ("1x16cpu", "needs 2 GPUs of one node; the cluster has no GPU"),
    ],
)
def test_tensor_parallel_two_without_such_a_node_exits_1(file: Path, nodes: str, words: str) -> None:
    """With what is needed and what there is."""
    result = plan(file, "--nodes", nodes)
    assert result.exit_code == 1
    assert words in " ".join(result.stdout.split())


def test_an_accelerator_type_that_nobody_has_exits_1(tmp_path: Path) -> None:
    """The same."""
    file = written(tmp_path, model("chat", source=CHAT, resources={"accelerator_type": "B200"}))
    result = plan(file, "--nodes", "1x1xH200-141G")
    assert result.exit_code == 1
    assert "needs accelerator type B200; the cluster has H200" in result.stdout


def test_what_does_not_fit_at_max_exits_1(tmp_path: Path) -> None:
    """The file promises it; the verdict tells the two apart."""
    policy = {"policy": {"policy_function": "serve_app.policy:queue_depth"}}
    deployment = {"autoscaling_config": scaled(1, 3)["autoscaling_config"] | policy}
    file = written(tmp_path, model("chat", source=CHAT, deployment=deployment))
    result = plan(file, "--nodes", "1x2xH200-141G")
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (1, "Fits at min replicas, not at max.")


def test_faults_of_the_file_come_first(tmp_path: Path) -> None:
    """As `check` prints them; nothing is planned."""
    result = plan(written(tmp_path, model("chat", source=CHAT, tensor_paralel_size=2)), "--nodes", "1x1xL4-24G")
    assert result.exit_code == 1
    assert "did you mean tensor_parallel_size?" in result.stderr
    assert result.stdout == ""


def test_a_hub_that_cannot_be_reached_exits_2_with_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One per model; the rest of the fleet is planned, and the unknown model is not called a fit."""
    monkeypatch.setenv("HF_ENDPOINT", NOBODY)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    file = written(tmp_path, model("chat", source=CHAT), model("far", source={"hub": "org/name"}))
    result = plan(file, "--nodes", "1x4xH200-141G")
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"far: {NOBODY} cannot be reached for org/name")
    assert result.stdout.rstrip().endswith("Cannot tell about the memory of far.")
    # What certainly does not fit is known all the same.
    assert plan(file, "--nodes", "1x1xH200-141G").exit_code == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--nodes", "H200x4"), "describes no node: write COUNTxGPUSxTYPE-MEMORYG"),
        (("--nodes", "1x1xL4-24G", "--cluster", "live"), "give either --nodes or --cluster live, not both"),
        (("--nodes", "1x1xL4", "--gpu-memory", "24"), "'24' is no amount of memory"),
        (("--cluster", "mine"), "--cluster mine: write --cluster live, and its address as --address"),
        (("--cluster", "live"), f"Ray's dashboard at {NOBODY} did not answer"),
        (("--address", "http://127.0.0.1:9"), "did not answer"),
        (("--nodes", "1x1xL4-24G", "--model", "none"), "the file has no such application; it has gateway, chat, pair"),
        (("--nodes", "1x1xL4-24G", "--explain"), "--explain shows one model: name it with --model; the file has chat"),
        (("--model", "chat", "--explain"), "say how large it is with --gpu-memory"),
    ],
)
def test_what_cannot_be_told_exits_2(file: Path, options: tuple[str, ...], words: str) -> None:
    """One line on standard error, which says what to write instead."""
    result = plan(file, *options)
    assert result.exit_code == 2
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


def test_a_file_that_is_not_there_exits_2(tmp_path: Path) -> None:
    """As with `check`."""
    result = plan(tmp_path / "none.yaml")
    assert result.exit_code == 2
    assert "none.yaml cannot be read" in result.stderr


def test_without_nodes_or_a_cluster_it_plans_what_is_needed(file: Path) -> None:
    """And says so."""
    result = plan(file)
    assert result.exit_code == 0
    assert "without nodes: no cluster runs here" in " ".join(result.stdout.split())
    assert "Needs 3 GPUs." in result.stdout


def test_json_is_all_that_is_on_standard_output(file: Path) -> None:
    """Notes of the check go to standard error."""
    result = plan(file, "--nodes", "1x4xH200-141G", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["fits"] is True


def test_gpu_memory_that_nothing_else_tells(file: Path) -> None:
    """It decides whether a model fits."""
    assert plan(file, "--nodes", "1x4xL4").exit_code == 0
    assert plan(file, "--nodes", "1x4xL4", "--gpu-memory", "24G").exit_code == 1


def test_one_model_alone_and_explained(file: Path) -> None:
    """Where its memory goes, on the GPU that it landed on."""
    alone = plan(file, "--nodes", "1x1xH200-141G", "--model", "chat")
    assert alone.exit_code == 0
    assert "pair" not in alone.stdout
    explained = plan(file, "--nodes", "1x1xH200-141G", "--model", "chat", "--explain")
    assert explained.exit_code == 0
    assert "On one GPU of 141.00 GiB" in explained.stdout


def test_the_cluster_that_nobody_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the environment says, else Ray's own port on this machine."""
    assert dashboard_address() == NOBODY
    monkeypatch.delenv("RAY_DASHBOARD_ADDRESS")
    assert dashboard_address() == "http://127.0.0.1:8265"


def test_the_scripted_engine_has_no_memory_to_plan() -> None:
    """It is neither counted nor called unknown."""
    gathered = gather(config(model("fake", source={"fake": {}})))
    assert (gathered.checkpoints, gathered.unknown) == ({}, {})


def test_an_architecture_that_cannot_be_counted_is_a_line(tmp_path: Path) -> None:
    """Not a guess and not a traceback."""
    shape = tmp_path / "config.json"
    shape.write_text(json.dumps({"architectures": ["X"], "model_type": "mamba", "hidden_size": 1}))
    gathered = gather(config(model("odd", source={"shape": str(shape)})))
    assert list(gathered.unknown) == ["odd"]
    assert "\n" not in gathered.unknown["odd"]


def test_statuses_are_three() -> None:
    """What scripts may rely on."""
    assert (plan_command.FITS, plan_command.DOES_NOT_FIT, plan_command.CANNOT_TELL) == (0, 1, 2)
