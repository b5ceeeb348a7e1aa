"""Every metric that the dashboard, the alerts and the autoscaler ask for is one of a running server."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from deploy_check import queries
from server_process import serving

DEPLOY = Path(__file__).parents[2] / "deploy"
OPERATORS = {
    "and", "or", "unless", "by", "without", "on", "ignoring", "group_left", "group_right", "bool", "offset", "inf", "nan",
}  # fmt: skip
PROMETHEUS_ACCEPTS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
PROMETHEUS_OWN = {"up"}  # series that Prometheus itself makes
# without GPUs they have no series; test_metrics.py has their labels
OF_GPUS = ("quire:gpu_utilization", "quire:gpu_memory_used_bytes", "quire:gpu_memory_total_bytes")
CLAUSE = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)")
NOT_METRICS = re.compile(r'"(?:[^"\\]|\\.)*"|\{[^}]*\}|\[[^\]]*\]')
NAME = re.compile(r"(?<![\w:.])([a-zA-Z_:][\w:]*)(?!\s*\(|[\w:])")


def metrics_of(expression: str) -> set[str]:
    """Return the names of the metrics in a PromQL expression."""
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', '""', expression)
    bare = CLAUSE.sub(" ", NOT_METRICS.sub(" ", bare))
    return {name for name in NAME.findall(bare) if name.lower() not in OPERATORS}


def expressions() -> Iterator[tuple[str, str]]:
    yield from queries()
    for rule in yaml.safe_load((DEPLOY / "compose" / "alerts.yml").read_text())["groups"][0]["rules"]:
        yield rule["alert"], rule["expr"]
    for rule in yaml.safe_load((DEPLOY / "helm" / "examples" / "prometheus-adapter.yaml").read_text())["rules"]["custom"]:
        query = rule["metricsQuery"].replace("<<.GroupBy>>", "pod").replace("<<.LabelMatchers>>", "")
        yield rule["name"]["as"], query
        yield f"{rule['name']['as']}, series", rule["seriesQuery"]


@pytest.fixture(scope="module")
def scraped(serve_model: Path) -> dict[str, set[str]]:
    """Return the labels of every series of a server that has answered a few requests, by name."""
    flags = ("--distributed-executor-backend", "uni", "--device", "cpu", "--kv-cache-memory-bytes", "4M")
    body = {"model": "tiny", "prompt": "the quick brown fox", "max_tokens": 4, "temperature": 0}
    with serving(serve_model, *flags) as server, server.client() as http:
        for _ in range(2):
            assert http.post("/v1/completions", json=body).status_code == 200
        text = http.get("/metrics", headers={"Accept": PROMETHEUS_ACCEPTS}).text
    found: dict[str, set[str]] = {}
    for line in text.splitlines():
        if match := re.match(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? ", line):
            found.setdefault(match[1], set()).update(re.findall(r'(\w+)="', match[2] or ""))
    assert all(f"# TYPE {name} gauge" in text for name in OF_GPUS)
    return found | {key: {"model_name", "gpu", "gpu_name"} for key in OF_GPUS}


@pytest.mark.parametrize(("title", "expression"), list(expressions()))
def test_its_metrics_are_those_of_a_server(title: str, expression: str, scraped: dict[str, set[str]]) -> None:
    names = metrics_of(expression)
    assert names, title
    missing = {name for name in names if name not in scraped} - PROMETHEUS_OWN
    assert not missing, f"{title}: no metric {', '.join(sorted(missing))}"


@pytest.mark.parametrize(("title", "expression"), list(queries()))
def test_its_labels_are_those_of_the_metrics(title: str, expression: str, scraped: dict[str, set[str]]) -> None:
    given = {"job", "instance"}  # by Prometheus
    for name, matchers in re.findall(r"([a-zA-Z_:][\w:]*)\{([^}]*)\}", expression):
        assert set(re.findall(r"(\w+)\s*(?:=~|=|!=|!~)", matchers)) <= scraped[name] | given, title
    known = set().union(*(scraped.get(name, set()) for name in metrics_of(expression))) | given
    for clause in re.findall(r"\bby\s*\(([^)]*)\)", expression):
        assert {label.strip() for label in clause.split(",")} <= known, title


def test_a_metric_that_does_not_exist_would_be_found() -> None:
    expression = 'histogram_quantile(0.9, sum by (le) (rate(quire:gone_bucket{a="quire:b"}[5m]))) / on (x) vector(1) > bool up'
    assert metrics_of(expression) == {"quire:gone_bucket", "up"}
