"""What a simulation prints and writes."""

import argparse
import dataclasses
import json
import sys
from typing import Any

from quire.cli.simulate_setting import Setting
from quire.sim.figures import Figures, figures_of
from quire.sim.fleet import Run
from quire.sim.objectives import Objectives, Search
from quire.sim.page import page
from quire.sim.tables import latency_cells, lines, load_cells, rows_of, trial_cells
from quire.sim.trace import Trace

MOST_LINES = 16  # replicas that are listed on a terminal
Facts = list[tuple[str, str]]


@dataclasses.dataclass(frozen=True)
class Outcome:
    setting: Setting
    trace: Trace
    router: str
    run: Run
    objectives: Objectives | None
    search: Search | None
    seconds: float  # that it took

    @property
    def within(self) -> float | None:
        """The share of requests that got what was promised."""
        if self.objectives is None:
            return None
        return sum(map(self.objectives.kept, self.run.visits)) / len(self.run.visits)

    @property
    def facts(self) -> Facts:
        plan, replicas = self.setting.plan, len(self.run.replicas)
        cache = f"{plan.pages:,} pages of {plan.page_size} tokens"
        facts = [
            ("Model", f"{plan.model} in {plan.weights_as}, {plan.max_model_len:,} tokens of context, {cache}"),
            ("Device", self.setting.told),
            ("Traffic", f"{self.trace.name}: {len(self.trace.arrivals):,} requests"),
            ("Replicas", f"{replicas}, requests placed by {self.router}" if replicas > 1 else "1"),
        ]
        if self.within is not None:
            facts.append(("Objective", f"{self.objectives}: {self.within:.2%} are within"))
        if self.search is not None:
            enough = f"{replicas} replicas" if self.search.kept else f"more than {replicas} replicas: so many do not keep it"
            facts.append(("Needed", enough))
        return facts

    def as_dict(self, figures: Figures) -> dict[str, Any]:
        told = {name.lower(): text for name, text in self.facts if name in ("Model", "Device", "Traffic")}
        result: dict[str, Any] = {
            "kind": "simulation", **told, "replicas": len(self.run.replicas), "router": self.router,
            "seconds_simulating": self.seconds, **figures.as_dict(), "refusals": dict(figures.refused),
            "per_replica": [dataclasses.asdict(load) for load in figures.replicas],
        }  # fmt: skip
        if self.objectives is not None:
            search = self.search
            result["slo"] = {
                **dataclasses.asdict(self.objectives),
                "within": self.within,
                "replicas_needed": search.replicas if search is not None and search.kept else None,
                "trials": [] if search is None else [dataclasses.asdict(trial) for trial in search.trials],
            }
        return result


def report(namespace: argparse.Namespace, outcome: Outcome) -> None:
    figures, replicas = figures_of(outcome.run), len(outcome.run.replicas)
    if namespace.html is not None:
        title = f"{outcome.setting.plan.model}: a simulation"
        text = page(title, outcome.facts, outcome.run, figures, outcome.search, outcome.objectives)
        namespace.html.write_text(text, encoding="utf-8")
    if namespace.json:
        print(json.dumps(outcome.as_dict(figures), indent=2))
        return
    print("\n".join(f"{name:<14} {text}" for name, text in [*outcome.facts, *rows_of(figures)]))
    print("\n" + "\n".join(lines(latency_cells(figures))))
    if outcome.search is not None:
        print("\n" + "\n".join(lines(trial_cells(outcome.search.trials))))
    if replicas > 1:
        print("\n" + "\n".join(lines(load_cells(figures.replicas[:MOST_LINES]))))
        if replicas > MOST_LINES:
            print(f"... and {replicas - MOST_LINES} more (--json has all)")
    print(f"\nsimulated in {outcome.seconds:.1f} s", file=sys.stderr)
    if namespace.html is not None:
        print(f"report: {namespace.html}", file=sys.stderr)
