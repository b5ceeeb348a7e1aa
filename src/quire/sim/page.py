"""The report as one HTML file: tables and plots, without scripts and without external files."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from quire.sim.analytic import GIB
from quire.sim.figures import LATENCIES, PERCENTILES, Figures, Load, SimulatedTimeline, TierFigures, quantiles, timeline_of
from quire.sim.fleet import Objectives, Run, Search, Trial

WIDTH, HEIGHT = 460, 240
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 26, 36
TICKS = 5


@dataclass(frozen=True)
class Line:
    name: str
    xs: Sequence[float]
    ys: Sequence[float]


def plot(
    title: str, x_name: str, y_name: str, lines: Sequence[Line], y_top: float | None = None, mark: float | None = None
) -> str:
    """Return a plot as SVG. `mark`: a value of x that is marked by a vertical line."""
    x_ticks = ticks(max([*(max(line.xs, default=0.0) for line in lines), mark or 0.0]))
    y_ticks = ticks(y_top if y_top is not None else max(max(line.ys, default=0.0) for line in lines))
    x_most, y_most = x_ticks[-1], y_ticks[-1]

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * min(value, x_most) / x_most

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * min(value, y_most) / y_most

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    parts.append(f'<text class="title" x="{LEFT}" y="14">{escape(title)}</text>')
    for value in y_ticks:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        parts.append(f'<text class="y" x="{LEFT - 6}" y="{y(value) + 3:.1f}">{number(value)}</text>')
    for value in x_ticks:
        parts.append(f'<text class="x" x="{x(value):.1f}" y="{HEIGHT - BOTTOM + 14}">{number(value)}</text>')
    parts.append(f'<text class="x" x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 6}">{escape(x_name)}</text>')
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(f'<text class="x" transform="translate(12 {middle:.0f}) rotate(-90)">{escape(y_name)}</text>')
    if mark is not None:
        parts.append(f'<line class="mark" x1="{x(mark):.1f}" x2="{x(mark):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
    for place, line in enumerate(lines):
        points = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in zip(line.xs, line.ys, strict=True))
        parts.append(f'<polyline class="s{place}" points="{points}"/>')
        if len(lines) > 1:
            at = WIDTH - RIGHT - 90 * (len(lines) - place)
            parts.append(f'<text class="key s{place}" x="{at}" y="14">{escape(line.name)}</text>')
    return "".join(parts) + "</svg>"


def ticks(maximum: float) -> list[float]:
    """Return ticks from 0 to a round number of at least `maximum`."""
    if not maximum > 0:
        return [0.0, 1.0]
    raw = maximum / TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(round_one * power for round_one in (1, 2, 2.5, 5, 10) if round_one * power >= raw * (1 - 1e-9))
    return [step * i for i in range(math.ceil(maximum / step - 1e-9) + 1)]


def number(value: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= 10 * size or (value >= size and value % size == 0):
            return f"{value / size:g}{unit}"
    return f"{value:.6g}"


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
        ("Prefix cache", f"{figures.hit_rate:.1%} of {figures.input_tokens:,} prompt tokens found{_by_tier(figures)}"),
        ("KV cache", f"{usage}; {figures.preemptions:,} preemptions"),
        *([] if figures.tiers is None else _tier_rows(figures.tiers)),
        ("Steps", f"{fleet.steps:,}, of {fleet.rows:.1f} rows in the mean; devices busy {fleet.busy:.1%} of the time"),
    ]  # fmt: skip


def _by_tier(figures: Figures) -> str:
    tiers = figures.tiers
    if tiers is None or not figures.input_tokens:
        return ""
    device, host, disk = (hits / figures.input_tokens for hits in (tiers.device_hits, tiers.host_hits, tiers.disk_hits))
    return f": {device:.1%} on the device, {host:.1%} in host memory" + (f", {disk:.1%} on disk" if tiers.has_disk else "")


def _tier_rows(tiers: TierFigures) -> list[tuple[str, str]]:
    host = f"{tiers.stored / GIB:,.2f} GiB stored, {tiers.fetched / GIB:,.2f} fetched, {tiers.host_usage:.1%} in use at the end"
    disk = f"{tiers.written / GIB:,.2f} GiB written, {tiers.read / GIB:,.2f} read"
    return [("Host memory", host), *([("Disk", disk)] if tiers.has_disk else [])]


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
        (f"{trial.replicas}", "yes" if trial.kept else "no", "stopped early" if trial.share is None else f"{trial.share:.2%}")
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
    """Return the lines of a text table: the first column left-aligned, the others right-aligned."""
    table = [cells[0], *cells[1]]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))])
        for row in table
    ]


STYLE = """
:root { color-scheme: light dark; --text: #1d2430; --faint: #d9dee6; --soft: #5c6675; --back: #fff;
        --s0: #2563eb; --s1: #d97706; --s2: #059669; --mark: #dc2626 }
@media (prefers-color-scheme: dark) { :root { --text: #e6e9ef; --faint: #333b47; --soft: #9aa4b2; --back: #14181f;
        --s0: #6ea8ff; --s1: #f5b048; --s2: #4fd1a1; --mark: #ff7a7a } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 1000px;
       margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
td, th { padding: .2rem .8rem .2rem 0; text-align: right }
td:first-child, th:first-child { text-align: left } th { color: var(--soft); font-weight: 500 }
tr + tr { border-top: 1px solid var(--faint) }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(400px, 1fr)); gap: 1rem }
.wide { overflow-x: auto } svg text { font-size: 11px; fill: var(--soft) } svg text.title { font-size: 12px; fill: var(--text) }
svg text.x { text-anchor: middle } svg text.y { text-anchor: end }
svg .grid { stroke: var(--faint) } svg .mark { stroke: var(--mark); stroke-dasharray: 4 3 }
svg polyline { fill: none; stroke-width: 1.6 } svg polyline.s0 { stroke: var(--s0) } svg polyline.s1 { stroke: var(--s1) }
svg polyline.s2 { stroke: var(--s2) } svg text.key.s0 { fill: var(--s0) } svg text.key.s1 { fill: var(--s1) }
svg text.key.s2 { fill: var(--s2) }
"""
MAX_LISTED_REPLICAS = 64  # in the table


def page(title: str, facts: Sequence[tuple[str, str]], run: Run, figures: Figures, search: Search | None,
         objectives: Objectives | None) -> str:  # fmt: skip
    parts = [
        "<!doctype html>", '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>", f"<h1>{escape(title)}</h1>",
        _table((), [*facts, *rows_of(figures)]),
        "<h2>Latency</h2>", _table(*latency_cells(figures)),
    ]  # fmt: skip
    if search is not None and objectives is not None:
        parts += ["<h2>Replicas needed</h2>", f"<p>{escape(str(objectives))}</p>", _table(*trial_cells(search.trials))]
    parts += ["<h2>Plots</h2>", '<div class="plots">', *_plots(run, objectives), "</div>"]
    parts += ["<h2>Replicas</h2>", '<div class="wide">', _table(*load_cells(figures.replicas[:MAX_LISTED_REPLICAS])), "</div>"]
    return "\n".join([*parts, "</body></html>", ""])


def _plots(run: Run, objectives: Objectives | None) -> list[str]:
    done, over_time = [visit for visit in run.visits if visit.done], timeline_of(run)
    marks = {} if objectives is None else {"ttft": objectives.ttft, "tpot": objectives.tpot}
    values = {
        "ttft": [1000 * visit.ttft for visit in done],
        "tpot": [1000 * visit.tpot for visit in done if visit.output > 1],
        "e2el": [1000 * visit.e2e for visit in done],
    }
    plots = []
    for name in LATENCIES:
        xs, shares = quantiles(values[name])
        mark, title = marks.get(name), LATENCY_NAMES[name]
        plots.append(plot(title, "ms", "share of requests", [Line(title, xs.tolist(), shares.tolist())], 1.0, mark))
    return plots + _plots_over_time(over_time)


def _plots_over_time(timeline: SimulatedTimeline) -> list[str]:
    at = timeline.at.tolist()
    return [
        plot("Output tokens per second", "s", "tokens/s", [Line("output", at, timeline.output_tokens.tolist())]),
        plot(
            "Requests, all replicas", "s", "requests",
            [Line("running", at, timeline.running.tolist()), Line("waiting", at, timeline.waiting.tolist())],
        ),
        plot("KV cache in use, all replicas", "s", "share of pages", [Line("used", at, timeline.kv_usage.tolist())], 1.0),
    ]  # fmt: skip


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table>{f'<tr>{cells}</tr>' if head else ''}{body}</table>"
