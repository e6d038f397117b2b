"""What is shipped for Prometheus and Grafana: the dashboard's structure, the names it asks for, the alerts."""

import importlib.util
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from loadtest import dashboard
from serve_app import signals
from tests.prometheus import FOLDER, copied, needs_promtool, shipped

ROOT = Path(__file__).resolve().parent.parent
GRAFANA = ROOT / "deployments" / "grafana"
DOCS = (ROOT / "docs" / "observability.md").read_text()
DASHBOARD: dict[str, Any] = json.loads(dashboard.FILE.read_text())
QUERIES = [query for panel in dashboard.panels(DASHBOARD) for query in panel.queries]
ALERTS: list[dict[str, Any]] = [rule for group in shipped("alerts.yml")["groups"] for rule in group["rules"]]
EXPRESSIONS = {**{query.expr: query.filled() for query in QUERIES}, **{rule["expr"]: rule["expr"] for rule in ALERTS}}

OURS = {f"ray_{metric.name}": metric.labels for metric in (*signals.OF_GATEWAYS, *signals.OF_CARDS, *signals.OF_MODELS)}
OTHERS = {
    "vllm": ("model_name",),
    "serve": ("application", "deployment"),
}
# What a histogram adds to its name.
PART = re.compile(r"_(bucket|count|sum)$")


def names(expression: str) -> set[str]:
    """The metrics in it, histograms under their own name."""
    return {PART.sub("", name) for name in re.findall(r"\bray_\w+", expression)}


def labels(expression: str) -> set[str]:
    """Those that it selects or groups by."""
    grouped = ",".join(re.findall(r"\bby \(([^)]*)\)", expression)).split(",")
    return {*re.findall(r"(\w+)(?:=~|!~|!=|=)\"", expression), *(label.strip() for label in grouped if label.strip())}


def test_ids_are_unique_and_panels_do_not_overlap() -> None:
    """Grafana takes a panel whose id is there already for the same one, and hides one that lies under another."""
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for place in (panel["gridPos"] for panel in panels):
        assert place["x"] + place["w"] <= 24
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken
        taken |= cells
    for panel in panels:
        refs = [target["refId"] for target in panel.get("targets", [])]
        assert len(set(refs)) == len(refs)


def test_every_panel_says_what_it_shows_and_asks_the_chosen_prometheus() -> None:
    """A title, a description and a unit; no data source of somebody's own Grafana; every query follows the model that
    is chosen."""
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables.keys() == {"datasource", "model"}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["model"]["datasource"] == chosen
    models = variables["model"]["query"]["query"]
    (listing,) = re.findall(r"^label_values\(\{__name__=~\"ray_modelyard_\((.*)\)\"\}, model\)$", models)
    assert all("model" in OURS[f"ray_modelyard_{name}"] for name in listing.split("|"))
    for panel in DASHBOARD["panels"]:
        if panel["type"] != "row":
            assert panel["description"].endswith(".")
            assert panel["fieldConfig"]["defaults"]["unit"]
            assert all(asking["datasource"] == chosen for asking in (panel, *panel["targets"]))
    assert all('=~"$model"' in query.expr for query in QUERIES)
    shown = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    assert len(set(shown)) == len(shown)


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_metric_exists_with_its_labels(expression: str) -> None:
    """Ours as ``signals`` has them; of vLLM's and Serve's those that the docs name (that they are theirs is tested with
    the installed releases)."""
    asked = names(expression)
    assert asked
    known = {"le"} if "histogram_quantile" in expression else set()
    for name in asked:
        if name in OURS:
            known |= set(OURS[name])
        else:
            known |= set(OTHERS[name.split("_")[1]])
            assert re.search(rf"`{name}\b", DOCS), f"docs/observability.md does not name {name}"
    assert labels(expression) <= known


def test_serves_metrics_are_serves() -> None:
    """Each of Serve's names is in the installed Ray's text."""
    spec = importlib.util.find_spec("ray")
    assert spec is not None
    (folder,) = spec.submodule_search_locations or []
    text = (Path(folder) / "serve" / "_private" / "deployment_state.py").read_text()
    asked = {name for expression in EXPRESSIONS for name in names(expression) if name.startswith("ray_serve_")}
    assert asked
    for name in asked:
        assert f'"{name.removeprefix("ray_")}"' in text


def test_legends_use_labels_that_the_series_have() -> None:
    """A name in braces that no series has would stay in the legend."""
    for query in QUERIES:
        (grouped,) = set(re.findall(r"\bby \(([^)]*)\)", query.expr))
        assert set(re.findall(r"{{(\w+)}}", query.legend)) == set(grouped.split(", ")) - {"le"}


def test_grafana_is_provisioned_with_what_is_there() -> None:
    """What is mounted exists, the dashboard is where the provider looks, the data source knows how often is scraped."""
    (service,) = yaml.safe_load((GRAFANA / "compose.yaml").read_text())["services"].values()
    mounted = dict(volume.split(":")[:2] for volume in service["volumes"])
    for here in mounted:
        assert (GRAFANA / here).exists()
    (provider,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/modelyard.yaml").read_text())["providers"]
    assert mounted["./modelyard.json"] == f"{provider['options']['path']}/modelyard.json"
    (source,) = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    scraping = shipped("prometheus.yml")["global"]["scrape_interval"]
    assert (source["type"], source["jsonData"]["timeInterval"]) == ("prometheus", scraping)


def test_every_alert_is_tested_both_ways() -> None:
    """Each has a case in which it fires and one in which it does not."""
    cases = [
        (case["alertname"], bool(case.get("exp_alerts")))
        for test in shipped("alerts_test.yml")["tests"]
        for case in test["alert_rule_test"]
    ]
    assert set(cases) == {(rule["alert"], fires) for rule in ALERTS for fires in (True, False)}


def test_every_alert_is_in_the_docs() -> None:
    """In order, and no other one."""
    assert re.findall(r"^\| `(Modelyard\w+)` \|", DOCS, re.MULTILINE) == [rule["alert"] for rule in ALERTS]


@needs_promtool
def test_alerts_fire_when_they_should() -> None:
    """``alerts_test.yml``, by Prometheus' own tool."""
    run(FOLDER, "test", "rules", "alerts_test.yml")


@needs_promtool
@pytest.mark.parametrize("config", ["prometheus.yml", "gateway.yml"])
def test_prometheus_takes_the_configurations(tmp_path: Path, config: str) -> None:
    """With the secrets' files beside them, as they say."""
    run(copied(tmp_path, "secret"), "check", "config", config)


@needs_promtool
def test_every_query_is_promql(tmp_path: Path) -> None:
    """The dashboard's, with values for Grafana's variables."""
    rules = [{"record": f"query:{number}", "expr": query.filled()} for number, query in enumerate(QUERIES)]
    (tmp_path / "queries.yml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"{len(QUERIES)} rules found" in run(tmp_path, "check", "rules", "queries.yml")


def run(folder: Path, *words: str) -> str:
    """``promtool`` in a folder: what it prints, where it finds no fault."""
    done = subprocess.run(["promtool", *words], cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_picture_is_of_what_prometheus_said(tmp_path: Path) -> None:
    """Each query is asked with values for Grafana's variables; a series is named by its legend and has Prometheus'
    points; a panel without any is drawn too."""
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.params["query"])
        series = [{"metric": {"status": "2xx"}, "values": [[100, "1.5"], [160, "NaN"]]}] if len(asked) == 1 else []
        return httpx.Response(200, json={"status": "success", "data": {"resultType": "matrix", "result": series}})

    panels = dashboard.panels(DASHBOARD)
    with httpx.Client(base_url="http://prometheus", transport=httpx.MockTransport(answer)) as client:
        shown = [(panel, dashboard.history(client, panel, 100, 160, "1m")) for panel in panels]
    assert asked == [query.filled() for query in QUERIES]
    assert not any("$" in query for query in asked)
    (series,) = shown[0][1]
    assert (series.name, series.points[0], len(series.points)) == ("2xx", (100, 1.5), 2)
    dashboard.draw(shown, 100, 160, "none", tmp_path / "picture.svg")
    drawn = (tmp_path / "picture.svg").read_text()
    assert drawn.count("nothing in this time") == len(panels) - 1
