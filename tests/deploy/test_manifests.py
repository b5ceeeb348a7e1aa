"""Manifests in the documents are what Kubernetes takes, and what they say to the server is what it takes.

`kubernetes_schema.json` has the definitions of the kinds that are used, of Kubernetes 1.37 (Apache-2.0), with no fields beside
those defined, and without their descriptions.
"""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from quire.cli.main import make_parser
from quire.config.server_args import ServerArgs

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((Path(__file__).parent / "kubernetes_schema.json").read_text())
KINDS = {
    ("apps/v1", "Deployment"): "io.k8s.api.apps.v1.Deployment",
    ("policy/v1", "PodDisruptionBudget"): "io.k8s.api.policy.v1.PodDisruptionBudget",
    ("v1", "PersistentVolumeClaim"): "io.k8s.api.core.v1.PersistentVolumeClaim",
    ("v1", "Secret"): "io.k8s.api.core.v1.Secret",
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
BLOCK = re.compile(r"^```yaml\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def manifests() -> dict[str, dict[str, Any]]:
    text = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    found = [document for block in BLOCK.findall(text) for document in yaml.safe_load_all(block)]
    return {document["kind"]: document for document in found}


def check(manifest: dict[str, Any]) -> None:
    name = KINDS[manifest["apiVersion"], manifest["kind"]]
    jsonschema.Draft202012Validator({**SCHEMA, "$ref": f"#/$defs/{name}"}).validate(manifest)


@pytest.mark.parametrize("kind", [kind for _, kind in KINDS])
def test_kubernetes_takes_it(kind: str) -> None:
    check(manifests()[kind])


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


def test_the_parts_belong_together() -> None:
    found = manifests()
    deployment, service = found["Deployment"]["spec"], found["Service"]["spec"]
    pod, labels = deployment["template"]["spec"], deployment["template"]["metadata"]["labels"]
    (container,) = pod["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for selector in (
        deployment["selector"]["matchLabels"],
        service["selector"],
        found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
    assert service["ports"][0]["targetPort"] in ports
    claims = [volume["persistentVolumeClaim"]["claimName"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume]
    assert claims == [found["PersistentVolumeClaim"]["metadata"]["name"]]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    key = next(one["valueFrom"]["secretKeyRef"] for one in container["env"] if one["name"] == "QUIRE_API_KEY")
    assert key["name"] == found["Secret"]["metadata"]["name"] and key["key"] in found["Secret"]["stringData"]
    probes = {name: container[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert [probe["path"] for probe in probes.values()] == ["/livez", "/livez", "/readyz"]
    assert {probe["port"] for probe in probes.values()} <= set(ports)


def test_the_server_takes_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    pod = manifests()["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    monkeypatch.setenv("QUIRE_API_KEY", "a key")
    namespace = make_parser().parse_args(container["args"])
    server = ServerArgs.take_from(namespace)
    assert (server.host, server.port) == ("0.0.0.0", container["ports"][0]["containerPort"])
    assert pod["terminationGracePeriodSeconds"] > server.shutdown_timeout


def test_what_ray_starts_is_what_the_server_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "a key")
    spec = manifests()["RayJob"]["spec"]
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
