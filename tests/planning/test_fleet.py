"""fleet: what a deployment file starts."""

from typing import Any

import pytest

from serve_app.planning.fleet import bounds, fleet
from serve_app.planning.nodes import Need
from tests.planning.fleets import GATEWAY, config, model, scaled


def test_the_gateway_and_the_models_count_and_the_cards_do_not() -> None:
    """A card takes nothing; the gateway takes a CPU, or what the file says of it."""
    units = fleet(config(model("chat")))
    assert [(unit.name, unit.deployment) for unit in units] == [("gateway", "Gateway"), ("chat", "Model")]
    assert units[0].needs == (Need({"CPU": 1, "GPU": 0}),)
    assert units[1].needs == (Need({"CPU": 1.0, "GPU": 1.0}),)
    told = {"name": "Gateway", "num_replicas": 2, "ray_actor_options": {"num_cpus": 3}}
    (gateway,) = fleet({"applications": [GATEWAY | {"deployments": [told]}]})
    assert (gateway.needs[0].resources["CPU"], gateway.least) == (3, 2)


def test_what_a_model_asks_for_is_what_its_placement_asks_for() -> None:
    """Tensor parallel on one node, pipeline parallel worker by worker, labels and types on each."""
    resources = {"accelerator_type": "H100", "labels": {"rack": "in(a, b)"}}
    tp, pp = fleet(
        {
            "applications": [
                model("tp", tensor_parallel_size=2, resources=resources),
                model("pp", pipeline_parallel_size=2, resources=resources),
            ]
        }
    )
    pin, labels = {"accelerator_type:H100": 0.001}, {"rack": "in(a,b)"}
    assert tp.needs == (Need({"CPU": 1.0, "GPU": 2.0} | pin, labels),)
    assert pp.needs == (Need({"CPU": 1.0} | pin, labels), *[Need({"GPU": 1.0} | pin, labels)] * 2)


@pytest.mark.parametrize(
    ("deployment", "least", "most"),
    [
        ({}, 1, 1),
        ({"num_replicas": 3}, 3, 3),
        ({"num_replicas": "auto"}, 1, 100),
        ({"num_replicas": "auto", "autoscaling_config": {"max_replicas": 4}}, 1, 4),
        ({"autoscaling_config": {}}, 1, 1),
        (scaled(0, 5), 0, 5),
    ],
)
def test_bounds_of_replicas_are_serves(deployment: dict[str, Any], least: int, most: int) -> None:
    """With Serve's defaults where the file leaves something out."""
    assert bounds(deployment) == (least, most)


def test_somebody_elses_application_takes_what_the_file_says() -> None:
    """Its code is not looked at."""
    bundles = {"placement_group_bundles": [{"CPU": 1, "GPU": 1}] * 2, "placement_group_strategy": "STRICT_PACK"}
    entry = {"name": "mine", "import_path": "mine:app", "deployments": [{"name": "A", **bundles}, {"name": "B"}]}
    a, b = fleet({"applications": [entry]})
    assert (a.name, a.needs) == ("mine.A", (Need({"CPU": 2, "GPU": 2}),))
    assert (b.name, b.needs) == ("mine.B", (Need({"CPU": 1, "GPU": 0}),))


def test_a_limit_of_replicas_per_node_is_kept() -> None:
    """Serve's max_replicas_per_node."""
    assert fleet(config(model("m", deployment={"max_replicas_per_node": 2})))[1].per_node == 2
