"""The command ``modelyard``. What a person types; the work is in the modules it calls."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import yaml
from rich.console import Console

from serve_app import ray_env
from serve_app.local_cluster import DASHBOARD_PORT, GCS_PORT

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
console = Console(highlight=False)

File = Annotated[Path, typer.Argument(help="A deployment file, for example deployments/local.yaml.")]

Url = Annotated[str, typer.Option(help="The endpoint's address.")]
OwnJson = Annotated[bool, typer.Option("--json", help="Print the endpoint's own JSON.")]


def main() -> None:
    """Entry point of the ``modelyard`` command."""
    app()


@app.command()
def env() -> None:
    """Print what must be in the environment before Ray starts: eval "$(modelyard env)"."""
    typer.echo(ray_env.export_lines())


@app.command()
def prepare() -> None:
    """Make the demo model, once: SmolLM2-135M-Instruct, from the package that carries its weights."""
    from serve_app import demo_model, local_serve

    try:
        local_serve.prepare_demo(console)
    except (demo_model.DemoModelError, OSError) as error:
        _fail(str(error))


@app.command()
def check(file: File) -> None:
    """Check a deployment file. Prints every fault and exits 1; exits 2 where the file cannot be read."""
    _check(file)
    typer.echo(f"{file}: no faults")


@app.command()
def plan(
    file: File,
    cluster: Annotated[
        str | None, typer.Option(help="live: onto the nodes of a running cluster, compared with what runs there.")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(help="That cluster's dashboard. Default: RAY_DASHBOARD_ADDRESS, or the Ray of this machine."),
    ] = None,
    nodes: Annotated[str | None, typer.Option(help='Onto nodes that you describe: "4x8xH200-141G,2x4xL4-24G".')] = None,
    gpu_memory: Annotated[
        str | None, typer.Option(help="Memory of each GPU that nothing else tells, for example 141G (GiB).")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Only this model.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show where that model's memory goes.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; docs/plan.md describes it.")] = False,
    checked: Annotated[bool, typer.Option("--checked", hidden=True)] = False,
) -> None:
    """Say what a file needs, where it fits, and what a deploy would change. Starts nothing, reads no weights.

    Exits 0 where everything fits, 1 where something does not or the file has faults, 2 where it cannot be told.
    """
    from serve_app import plan_command

    if not checked:
        _check(file, notes_to_stderr=as_json)
    asked = plan_command.Asked(
        live=cluster is not None, address=address, nodes=nodes, gpu_memory=gpu_memory, model=model, explain=explain
    )
    try:
        if cluster not in (None, "live"):
            raise plan_command.CannotTell(f"--cluster {cluster}: write --cluster live, and its address as --address")
        raise typer.Exit(plan_command.run(file, asked, console, as_json=as_json))
    except plan_command.CannotTell as error:
        _fail(str(error), status=2)


@app.command()
def serve(
    config: File,
    ray_port: Annotated[int, typer.Option(help="Port of the Ray head that is started.")] = GCS_PORT,
    dashboard_port: Annotated[int, typer.Option(help="Port of Ray's dashboard.")] = DASHBOARD_PORT,
) -> None:
    """Deploy a file on a Ray of this machine, follow it until it serves, and stay until Ctrl-C, which stops it all."""
    from serve_app import demo_model, local_cluster, local_serve, ray_api

    # In a process of its own: a check may import vLLM, whose half a gigabyte this command would keep for days.
    if status := subprocess.run([sys.executable, "-m", "serve_app.cli", "check", str(config)], check=False).returncode:
        raise typer.Exit(status)
    try:
        read = yaml.safe_load(config.read_text())
        local_serve.serve(config, read, console, gcs_port=ray_port, dashboard_port=dashboard_port)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except (
        demo_model.DemoModelError,
        local_cluster.LocalClusterError,
        local_serve.ServeError,
        ray_api.RayApiError,
        OSError,
    ) as error:
        _fail(str(error))


@app.command()
def stop() -> None:
    """Stop what `modelyard serve` started on this machine, and nothing else."""
    from serve_app import local_cluster, local_serve

    try:
        local_serve.stop(console)
    except (local_cluster.LocalClusterError, OSError) as error:
        _fail(str(error))


@app.command()
def key(name: Annotated[str, typer.Argument(help="What logs, metrics and quotas will call it.")]) -> None:
    """Make an API key. Its entry for the keys file goes to standard output, so that >> keys.yaml adds it; the key
    itself is shown once, on standard error, and stored nowhere.
    """
    from serve_app import keys

    try:
        made, entry = keys.make(name)
    except ValueError as error:
        _fail(str(error))
    typer.echo(f"The key, shown this once: {made}", err=True)
    typer.echo(yaml.safe_dump({"keys": [entry]}, sort_keys=False).partition("\n")[2].rstrip())


@app.command()
def status(
    url: Url = "http://127.0.0.1:8000",
    as_json: OwnJson = False,
    watch: Annotated[bool, typer.Option("--watch", help="Stay and follow it, until Ctrl-C.")] = False,
) -> None:
    """Print every model of a running endpoint: its state and why, replicas, requests, KV cache, usual start and ids;
    and what failed lately.

    Where the endpoint asks for a key, put yours into MODELYARD_API_KEY.
    """
    from serve_app import status

    if watch:
        status.watch(url, console, as_json=as_json)
        return
    _tell(lambda: status.read(url), status.show, as_json)


@app.command()
def usage(
    since: Annotated[str | None, typer.Option(help="First day (UTC): 2026-11-01. Default: the month's first.")] = None,
    until: Annotated[str | None, typer.Option(help="Last day, included. Default: today.")] = None,
    key: Annotated[str | None, typer.Option(help="Of this key alone, by its name.")] = None,
    url: Url = "http://127.0.0.1:8000",
    as_json: OwnJson = False,
) -> None:
    """Print what each key used of each model: your own key's, or everybody's where yours may read metrics.

    Where the endpoint asks for a key, put yours into MODELYARD_API_KEY.
    """
    from serve_app import usage_table

    _tell(lambda: usage_table.read(url, since, until, key), usage_table.show, as_json)


def _tell(
    read: Callable[[], Mapping[str, Any]], show: Callable[[Mapping[str, Any], Console], None], as_json: bool
) -> None:
    """What the endpoint answers, as people or programs read it."""
    from serve_app.endpoint import EndpointError

    try:
        answer = read()
    except EndpointError as error:
        _fail(str(error))
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
    else:
        show(answer, console)


def _check(file: Path, *, notes_to_stderr: bool = False) -> None:
    from serve_app.check import check_file

    try:
        report = check_file(file)
    except (OSError, UnicodeDecodeError) as error:
        typer.echo(f"{file} cannot be read: {error}", err=True)
        raise typer.Exit(2) from None
    for note in report.notes:
        typer.echo(f"note: {note}", err=notes_to_stderr)
    for fault in report.faults:
        typer.echo(str(fault), err=True)
    if report.faults:
        raise typer.Exit(1)


def _fail(message: str, status: int = 1) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(status)


if __name__ == "__main__":
    main()
