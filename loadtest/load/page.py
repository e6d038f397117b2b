"""A test's report as one HTML file that needs nothing else."""

from functools import cache
from pathlib import Path

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from loadtest.load import outputs, plot, report
from loadtest.load.record import Run

TEMPLATE = Path(__file__).with_name("page.html")


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(TEMPLATE.read_text())


def render(run: Run) -> str:
    return _template().render(
        run=run,
        met=report.met(run),
        checks=[(check.met, outputs.told(check)) for check in report.checks(run)],
        columns=outputs.COLUMNS,
        rows=list(outputs.rows(run)),
        errors=report.errors(run.answers),
        remarks=list(outputs.remarks(run)),
        picture=Markup(plot.svg(run)),
    )
