"""Figures as people read them: cells for the report, lines for the terminal."""

from collections.abc import Sequence

from quire.sim.figures import LATENCIES, PERCENTILES, Figures, Load
from quire.sim.objectives import Trial

LATENCY_NAMES = {"ttft": "Time to first token", "tpot": "Time per output token", "e2el": "End to end"}
Cells = tuple[Sequence[str], Sequence[Sequence[str]]]  # a head, and rows


def rows_of(figures: Figures) -> list[tuple[str, str]]:
    fleet = figures.fleet
    usage = f"{fleet.kv_usage:.1%} in use in the mean, {fleet.kv_peak:.1%} at most"
    return [
        ("Requests", f"{figures.completed:,} of {figures.requests:,} in {figures.duration:,.1f} s"),
        *((f"{count:,} refused", why) for why, count in figures.refused.most_common(3)),
        ("Throughput", f"{figures.per_second(figures.completed):,.2f} requests/s, "
         f"{figures.per_second(figures.output_tokens):,.0f} output tokens/s, "
         f"{figures.per_second(figures.input_tokens + figures.output_tokens):,.0f} tokens/s in and out"),
        ("Prefix cache", f"{figures.hit_rate:.1%} of {figures.input_tokens:,} prompt tokens found"),
        ("KV cache", f"{usage}; {figures.preemptions:,} preemptions"),
        ("Steps", f"{fleet.steps:,}, of {fleet.rows:.1f} rows in the mean; devices busy {fleet.busy:.1%} of the time"),
    ]  # fmt: skip


def latency_cells(figures: Figures) -> Cells:
    head = ("ms", "mean", *(f"p{percentile}" for percentile in PERCENTILES))
    rows = []
    for name in LATENCIES:
        spread = figures.spreads[name]
        values = ["-"] * (1 + len(PERCENTILES))
        if spread is not None:
            values = [f"{value:,.2f}" for value in (spread.mean, *(spread.percentiles[cut] for cut in PERCENTILES))]
        rows.append((LATENCY_NAMES[name], *values))
    return head, rows


def trial_cells(trials: Sequence[Trial]) -> Cells:
    rows = [
        (f"{trial.replicas}", "yes" if trial.kept else "no", "given up early" if trial.share is None else f"{trial.share:.2%}")
        for trial in sorted(trials, key=lambda trial: trial.replicas)
    ]
    return ("replicas", "enough", "requests within"), rows


def load_cells(loads: Sequence[Load]) -> Cells:
    head = ("replica", "requests", "output tokens", "steps", "rows", "busy", "KV mean", "KV peak", "hit rate", "preemptions")
    rows = [
        (f"{number}", f"{load.requests:,}", f"{load.output_tokens:,}", f"{load.steps:,}", f"{load.rows:.1f}",
         f"{load.busy:.1%}", f"{load.kv_usage:.1%}", f"{load.kv_peak:.1%}", f"{load.hit_rate:.1%}", f"{load.preemptions:,}")
        for number, load in enumerate(loads)
    ]  # fmt: skip
    return head, rows


def lines(cells: Cells) -> list[str]:
    """The first column to the left, the others to the right."""
    table = [cells[0], *cells[1]]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))])
        for row in table
    ]
