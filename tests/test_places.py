"""Kubernetes accepts the manifests, and they hold together; and every YAML that a person deploys has such a test."""

import functools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from ray.dashboard.http_server_agent import PUBLIC_EXACT_PATHS
from ray.scripts.scripts import start as ray_start

from serve_app import __version__, keys, ray_env
from serve_app.check import check_file
from serve_app.config import CARD_DEPLOYMENT, MODEL_DEPLOYMENT, CardSettings
from serve_app.gateway.app import WITHOUT_KEY
from tests.dockerfile import ROOT, programs_of, values

Document = dict[str, Any]

KUBERNETES = ROOT / "deployments" / "kubernetes"
RAY_SERVICES = ("modelyard.yaml", "tensor-parallel.yaml")
CRDS = "MODELYARD_CRDS"
# Whose schemas the core kinds are checked against.
KUBERNETES_VERSION = "1.34"


def documents(path: Path) -> list[Document]:
    return list(yaml.safe_load_all(path.read_text()))


MANIFESTS = [
    pytest.param(document, id=f"{path.name}: {document['kind']} {document['metadata']['name']}")
    for path in sorted(KUBERNETES.glob("*.yaml"))
    for document in documents(path)
]


def closed(schema: Document) -> Document:
    """A CRD's structural schema as JSON schema that refuses unknown keys. An API server only drops them, so that a
    misspelt setting would have no effect and no error."""
    schema = dict(schema)
    for keyword in ("items", "additionalProperties"):
        if isinstance(schema.get(keyword), dict):
            schema[keyword] = closed(schema[keyword])
    if "properties" in schema:
        schema["properties"] = {name: closed(inner) for name, inner in schema["properties"].items()}
    if schema.get("type") == "object" and not schema.get("x-kubernetes-preserve-unknown-fields"):
        schema.setdefault("additionalProperties", False)
    return schema


@functools.cache
def crd(kind: str) -> jsonschema.Draft202012Validator:
    """Checks an object against the closed schema of KubeRay's ``kind``. Skips where there are no CRDs."""
    folder = os.environ.get(CRDS)
    if not folder:
        pytest.skip(f"{CRDS} names no folder with KubeRay's CRDs")
    definition = yaml.load((Path(folder) / f"ray.io_{kind.lower()}s.yaml").read_text(), yaml.CSafeLoader)
    (version,) = (version for version in definition["spec"]["versions"] if version["name"] == "v1")
    schema = closed(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}  # Kubernetes' own, for every kind
    return jsonschema.Draft202012Validator(schema)


def validate(document: Document) -> None:
    """Raises ``ValidationError``; an unknown key is one too."""
    if document["apiVersion"] == "ray.io/v1":
        crd(document["kind"]).validate(document)
    else:
        kubernetes_validate.validate(document, KUBERNETES_VERSION, strict=True)


@pytest.mark.parametrize("document", MANIFESTS)
def test_a_manifest_is_what_kubernetes_accepts(document: Document) -> None:
    """Every object of every manifest has the keys and types of its kind, and no others."""
    validate(document)


Planted = Callable[[Document], None]


def _misspelt(spec: Document) -> None:
    spec["rayClusterConfig"]["enableInTreeAutoscalling"] = True


def _misspelt_in_a_container(spec: Document) -> None:
    spec["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]["readinesProbe"] = {}


def _text_for_a_number(spec: Document) -> None:
    spec["rayClusterConfig"]["workerGroupSpecs"][0]["replicas"] = "2"


def _another_word(spec: Document) -> None:
    spec["rayClusterConfig"]["authOptions"]["mode"] = "tokens"


def _nothing_for_what_must_be(spec: Document) -> None:
    del spec["rayClusterConfig"]["headGroupSpec"]


@pytest.mark.parametrize(
    "plant",
    [_misspelt, _misspelt_in_a_container, _text_for_a_number, _another_word, _nothing_for_what_must_be],
    ids=lambda plant: plant.__name__.strip("_"),
)
def test_a_planted_fault_of_a_ray_service_is_found(plant: Planted) -> None:
    """The check above is one that can fail, at every depth."""
    document = documents(KUBERNETES / "modelyard.yaml")[0]
    validate(document)
    plant(document["spec"])
    with pytest.raises(jsonschema.ValidationError):
        validate(document)


def test_a_planted_fault_of_a_core_kind_is_found() -> None:
    """The same for the kinds that are Kubernetes' own."""
    document = documents(KUBERNETES / "tensor-parallel.yaml")[1]
    document["spec"]["selectors"] = document["spec"].pop("selector")
    with pytest.raises(jsonschema.ValidationError):
        validate(document)


def ray_service(name: str) -> Document:
    (found,) = (document["spec"] for document in documents(KUBERNETES / name) if document["kind"] == "RayService")
    return found


def serve_config(name: str) -> Document:
    config = yaml.safe_load(ray_service(name)["serveConfigV2"])
    assert isinstance(config, dict)
    return config


def workers(name: str) -> list[Document]:
    groups = ray_service(name)["rayClusterConfig"]["workerGroupSpecs"]
    assert groups
    return list(groups)


def pods(name: str) -> list[Document]:
    """The pod templates of the head and of every group."""
    return [ray_service(name)["rayClusterConfig"]["headGroupSpec"]["template"]] + [w["template"] for w in workers(name)]


def container(pod: Document) -> Document:
    (only,) = pod["spec"]["containers"]
    return dict(only)


each_ray_service = pytest.mark.parametrize("name", RAY_SERVICES)


@each_ray_service
def test_what_it_serves_passes_check(name: str, tmp_path: Path) -> None:
    """The embedded deployment file is as right as those beside it."""
    file = tmp_path / name
    file.write_text(ray_service(name)["serveConfigV2"])
    assert check_file(file, engine_fields=lambda: None, frontend_fields=lambda: None).faults == ()


@each_ray_service
def test_every_pod_has_the_environment(name: str) -> None:
    """Ray starts in each pod with exactly what `modelyard env` prints, the token mode included."""
    (environment,) = documents(KUBERNETES / "environment.yaml")
    in_the_image = {"RAY_SERVE_HAPROXY_BINARY_PATH": f"{programs_of('cuda')}/modelyard-haproxy"}
    assert environment["data"] == {setting.name: setting.value for setting in ray_env.SETTINGS} | in_the_image
    for pod in pods(name):
        assert container(pod)["envFrom"] == [{"configMapRef": {"name": environment["metadata"]["name"]}}]
    mode = ray_service(name)["rayClusterConfig"]["authOptions"]["mode"]
    assert {"RAY_AUTH_MODE": mode} == {setting.name: setting.value for setting in ray_env.COMMANDS}


@each_ray_service
def test_the_pods_run_this_version(name: str) -> None:
    """One image is everywhere, that of this version for GPUs, as its own user; KubeRay is told which Ray it has."""
    locked = (ROOT / "locks" / "gpu.txt").read_text().splitlines()
    assert f"ray=={ray_service(name)['rayClusterConfig']['rayVersion']}" in locked
    assert {container(pod)["image"] for pod in pods(name)} == {f"modelyard:{__version__}-cuda"}
    users = {pod["spec"]["securityContext"]["runAsUser"] for pod in pods(name)}
    assert [str(user) for user in users] == values("cuda", "USER")


@each_ray_service
def test_probes_ask_what_a_pod_can_answer_for(name: str) -> None:
    """A pod is restarted for what is wrong with its Ray alone, and takes requests while a gateway answers through it.
    No probe asks about a model, nor needs a key or a token."""
    head, *others = (container(pod) for pod in pods(name))
    (agent,) = (option for option in ray_start.params if option.name == "dashboard_agent_listen_port")
    ray_lives = {"path": "/api/healthz", "port": agent.default}
    assert ray_lives["path"] in PUBLIC_EXACT_PATHS
    assert head["readinessProbe"]["httpGet"] == ray_lives  # KubeRay deploys only once the head is ready
    for each in (head, *others):
        assert each["livenessProbe"]["httpGet"] == ray_lives
        assert {"name": "serve", "containerPort": serve_config(name)["http_options"]["port"]} in each["ports"]
    for each in others:
        assert each["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "serve"}
    assert "/ready" in WITHOUT_KEY


@each_ray_service
def test_a_pod_that_ends_has_time_for_its_requests(name: str) -> None:
    """What a request may take on a leaving replica or gateway ends before the drain, and the drain before the pod."""
    deployments = [d for a in serve_config(name)["applications"] for d in a.get("deployments", ())]
    cards = [CardSettings(**d.get("user_config", {})) for d in deployments if d["name"] == CARD_DEPLOYMENT]
    graces = [card.limits.grace_s for card in cards or [CardSettings()]]
    graces += [d["graceful_shutdown_timeout_s"] for d in deployments if "graceful_shutdown_timeout_s" in d]
    for group in workers(name):
        environment = {variable["name"]: variable.get("value") for variable in container(group["template"])["env"]}
        drain_s = int(environment["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
        assert max(graces) < drain_s < group["template"]["spec"]["terminationGracePeriodSeconds"]


@each_ray_service
def test_models_fit_into_the_pods(name: str) -> None:
    """As many replicas as the file allows have their GPUs, those of one replica in one pod; no gateway and no replica
    has room on the head."""
    assert ray_service(name)["rayClusterConfig"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    gpus_of_pods = [
        container(group["template"])["resources"]["limits"].get("nvidia.com/gpu", 0)
        for group in workers(name)
        for _ in range(group["maxReplicas"])
    ]
    for application in serve_config(name)["applications"][1:]:
        each = application["args"].get("tensor_parallel_size", 1)
        (model,) = (d for d in application["deployments"] if d["name"] == MODEL_DEPLOYMENT)
        most = model.get("num_replicas") or model["autoscaling_config"]["max_replicas"]
        assert sum(gpus // each for gpus in gpus_of_pods) >= most


def labels(name: str) -> list[dict[str, str]]:
    """Of the pods of each group, with those that KubeRay adds and selectors may rely on. (A head that is excluded from
    serving has ``ray.io/serve`` too, but false.)"""
    added = {"ray.io/is-ray-node": "yes", "ray.io/node-type": "worker", "ray.io/serve": "true"}
    return [
        group["template"]["metadata"]["labels"] | added | {"ray.io/group": group["groupName"]}
        for group in workers(name)
    ]


@each_ray_service
def test_selectors_find_pods(name: str) -> None:
    """Every Service and every disruption budget beside a RayService selects pods of it, by a port that they have."""
    assert ray_service(name)["excludeHeadPodFromServeSvc"] is True
    others = [document for document in documents(KUBERNETES / name) if document["kind"] != "RayService"]
    assert others
    for document in others:
        selector = document["spec"]["selector"]
        wanted = selector.get("matchLabels", selector).items()
        found = [group for group, has in zip(workers(name), labels(name), strict=True) if wanted <= has.items()]
        assert found, document["metadata"]["name"]
        for port in document["spec"].get("ports", ()):
            for group in found:
                assert port["targetPort"] in {p["name"] for p in container(group["template"])["ports"]}


def references(value: Any) -> Iterator[tuple[str, str, str | None]]:
    """Kind, name and key of each ConfigMap and Secret that something within ``value`` names."""
    kinds = {"configMapRef": "ConfigMap", "secretKeyRef": "Secret", "secret": "Secret"}
    if isinstance(value, dict):
        for name, inner in value.items():
            if name in kinds:
                yield kinds[name], inner.get("name") or inner["secretName"], inner.get("key")
            yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


@pytest.mark.parametrize("name", [*RAY_SERVICES, "redis.yaml"])
def test_what_a_manifest_refers_to_is_there(name: str) -> None:
    """Each Secret and ConfigMap that pods need is in the files beside, with its key."""
    there = {
        (document["kind"], document["metadata"]["name"]): document.get("data") or document.get("stringData")
        for file in ("environment.yaml", "secrets.yaml")
        for document in documents(KUBERNETES / file)
    }
    found = list(references(documents(KUBERNETES / name)))
    assert found
    for kind, wanted, key in found:
        assert key is None or key in there[kind, wanted]
        assert there[kind, wanted]


@each_ray_service
def test_gateways_read_the_keys_of_the_secret(name: str) -> None:
    """The file that the gateway's settings name is in every pod that a gateway may come to."""
    gateway = serve_config(name)["applications"][0]["deployments"][0]
    folder, file = gateway["user_config"]["keys_file"].rsplit("/", 1)
    secrets = {
        document["metadata"]["name"]: document["stringData"] for document in documents(KUBERNETES / "secrets.yaml")
    }
    for group in workers(name):
        (mount,) = (m for m in container(group["template"])["volumeMounts"] if m["mountPath"] == folder)
        assert "subPath" not in mount  # such a mount would never see a changed key
        (volume,) = (v for v in group["template"]["spec"]["volumes"] if v["name"] == mount["name"])
        assert file in secrets[volume["secret"]["secretName"]]


def test_secrets_as_shipped_let_nobody_in() -> None:
    """Who applies the example unread has a closed gateway, not an open one or one whose key the world knows."""
    secrets = {
        document["metadata"]["name"]: document["stringData"] for document in documents(KUBERNETES / "secrets.yaml")
    }
    text = secrets["modelyard-keys"]["keys.yaml"]
    with pytest.raises(ValueError, match="hash"):
        keys.parse(yaml.safe_load(text))
    # And that is the only fault in it.
    filled = text.replace("sha256:REPLACE_ME", keys.hash_of("a key"))
    keys.parse(yaml.safe_load(filled))


def test_the_docs_make_the_secrets_that_pods_need() -> None:
    """Who follows docs/deploying.md has every Secret of secrets.yaml, with its keys."""
    shipped = {
        (document["metadata"]["name"], key)
        for document in documents(KUBERNETES / "secrets.yaml")
        for key in document["stringData"]
    }
    text = (ROOT / "docs" / "deploying.md").read_text()
    assert set(re.findall(r"kubectl create secret generic (\S+) --from-(?:file|literal)=([\w.]+)", text)) == shipped


# Every YAML that a person deploys, and the test that would fail if it were wrong.
CHECKED = {
    "cluster.yaml": "test_launcher.py::test_a_cluster_file_is_what_the_launcher_accepts",
    "deployments/*.yaml": "test_deployments.py::test_every_shipped_file_passes_check",
    "deployments/cluster-*.yaml": "test_launcher.py::test_a_cluster_file_is_what_the_launcher_accepts",
    "deployments/grafana/compose.yaml": "test_dashboard.py::test_grafana_is_provisioned_with_what_is_there",
    "deployments/grafana/provisioning/*/*.yaml": "test_dashboard.py::test_grafana_is_provisioned_with_what_is_there",
    "deployments/kubernetes/*.yaml": "test_places.py::test_a_manifest_is_what_kubernetes_accepts",
    "deployments/prometheus/alerts.yml": "test_dashboard.py::test_alerts_fire_when_they_should",
    "deployments/prometheus/alerts_test.yml": "test_dashboard.py::test_every_alert_is_tested_both_ways",
    "deployments/prometheus/gateway.yml": "test_dashboard.py::test_prometheus_takes_the_configurations",
    "deployments/prometheus/prometheus.yml": "test_dashboard.py::test_prometheus_takes_the_configurations",
}


def test_every_yaml_is_checked() -> None:
    """A new file is not finished before a test checks it."""
    files = [ROOT / "cluster.yaml", *(ROOT / "deployments").rglob("*.yaml"), *(ROOT / "deployments").rglob("*.yml")]
    names = {file.relative_to(ROOT) for file in files}
    assert {name for name in names if not any(name.match(pattern) for pattern in CHECKED)} == set()
    assert {pattern for pattern in CHECKED if not any(name.match(pattern) for name in names)} == set()
    for checked in set(CHECKED.values()):
        file, test = checked.split("::")
        assert f"def {test}(" in (ROOT / "tests" / file).read_text()
