"""The Dockerfile, the compose file and the systemd unit say to the server what it takes, and give it time to drain."""

import configparser
import re
from pathlib import Path

import pytest
import yaml
from deploy_check import LINTERS

from quire.cli.main import make_parser
from quire.config.server_args import ServerArgs

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def server_of(*arguments: str) -> ServerArgs:
    return ServerArgs.take_from(make_parser(["serve"]).parse_args(list(arguments)))


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


def stages() -> dict[str, str]:
    text = (DEPLOY / "docker" / "Dockerfile").read_text().replace("\\\n", " ")
    return {match[2]: match[0] for match in re.finditer(r"^FROM (\S+) AS (\S+)\n(?:(?!^FROM ).*\n)*", text, re.MULTILINE)}


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_images_are_small_and_unprivileged(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = stages()[target]
    assert re.search(r"^USER 1000", stage, re.MULTILINE) and "HEALTHCHECK" in stage and "/livez" in stage
    assert f"COPY --from={target}-build /opt/quire /opt/quire" in stage and "COPY src" not in stage
    assert ("gcc" in stage) is (target == "cuda")
    monkeypatch.setenv("QUIRE_API_KEY", "a key")
    entry, command = (re.search(rf"^{name} \[(.*)\]", stage, re.MULTILINE) for name in ("ENTRYPOINT", "CMD"))
    assert entry is not None and command is not None and entry[1] == '"quire"'
    assert server_of(*re.findall(r'"([^"]+)"', command[1])).host == "0.0.0.0"


def test_base_images_are_arguments_and_name_no_registry() -> None:
    text = (DEPLOY / "docker" / "Dockerfile").read_text()
    bases = dict(re.findall(r"^ARG (CPU_BASE|GPU_BASE)=(\S+)", text, re.MULTILINE))
    assert {*bases} == {"CPU_BASE", "GPU_BASE"}
    images = [*bases.values(), *re.findall(r"^\s*(?:image|repository): (\S+)", _compose_text() + _values_text(), re.MULTILINE)]
    assert len(images) >= 6
    for image in images:  # a registry's name has a dot or a port before the first slash
        assert not re.match(r"[^/]*[.:][^/]*/", image), image


def _compose_text() -> str:
    return "".join(file.read_text() for file in sorted((DEPLOY / "compose").glob("compose*.yaml")))


def _values_text() -> str:
    return (DEPLOY / "helm" / "quire" / "values.yaml").read_text()


def test_what_the_dockerfile_copies_exists_and_is_in_its_context() -> None:
    ignored = (DEPLOY / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    for stage in ("cpu-build", "cuda-build"):
        for line in re.findall(r"^COPY (.*)$", stages()[stage], re.MULTILINE):
            for name in line.split()[:-1]:
                assert name == "setup.p[y]" or ((ROOT / name).exists() and f"!{name}" in ignored)


def test_compose_gives_the_server_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    service = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())["services"]["quire"]
    monkeypatch.setenv("QUIRE_API_KEY", "a key")
    server = server_of(*(word.replace("${QUIRE_MODEL:-smollm2}", "smollm2") for word in service["command"]))
    assert server.host == "0.0.0.0" and server.metrics_without_key
    assert seconds(service["stop_grace_period"]) > server.shutdown_timeout
    assert service["ports"] == [f"127.0.0.1:{server.port}:{server.port}"]
    build = service["build"]
    assert (DEPLOY / "compose" / build["context"] / build["dockerfile"]).resolve() == DEPLOY / "docker" / "Dockerfile"
    assert build["target"] in stages()
    targets = yaml.safe_load((DEPLOY / "compose" / "prometheus.yml").read_text())["scrape_configs"][0]["static_configs"]
    assert targets == [{"targets": [f"quire:{server.port}"]}]


def test_files_that_compose_mounts_exist() -> None:
    services = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())["services"]
    mounted = [volume.split(":")[0] for service in services.values() for volume in service.get("volumes", ())]
    assert all((DEPLOY / "compose" / name).exists() for name in mounted if name.startswith("."))
    provider = yaml.safe_load((DEPLOY / "compose/grafana/provisioning/dashboards/quire.yaml").read_text())["providers"][0]
    assert f":{provider['options']['path']}:ro" in _compose_text()


def test_the_unit_starts_the_server_and_waits_for_its_drain() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "systemd" / "quire.service")
    service = unit["Service"]
    program, *arguments = service["ExecStart"].split()
    assert program == "/opt/quire/bin/quire" and arguments[:2] == ["serve", "--config"]
    assert arguments[2] == "/etc/quire/serve.yaml"
    server = server_of("serve", "--config", str(DEPLOY / "systemd" / "serve.yaml"))
    assert float(service["TimeoutStopSec"]) > server.shutdown_timeout
    assert service["DynamicUser"] == "yes" and service["NoNewPrivileges"] == "yes"


def test_linters_that_are_absent_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import deploy_check

    monkeypatch.setattr(deploy_check, "tool", lambda name: None)
    monkeypatch.setattr("sys.argv", ["deploy_check.py"])
    assert deploy_check.main() == 0
    out = capsys.readouterr().out
    assert all(f"ABSENT  {name}: nothing was checked by it" in out for name in LINTERS)
    monkeypatch.setattr("sys.argv", ["deploy_check.py", "--strict"])
    assert deploy_check.main() == 1
