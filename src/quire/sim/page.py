"""The report as one HTML file: tables and plots, no script, and nothing is fetched from anywhere."""

from collections.abc import Sequence
from html import escape

from quire.sim.figures import LATENCIES, Figures, Timeline, quantiles, timeline_of
from quire.sim.fleet import Run
from quire.sim.objectives import Objectives, Search
from quire.sim.plots import Line, plot
from quire.sim.tables import LATENCY_NAMES, latency_cells, load_cells, rows_of, trial_cells

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
MOST_REPLICAS = 64  # that have a line in the table


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
    parts += ["<h2>Replicas</h2>", '<div class="wide">', _table(*load_cells(figures.replicas[:MOST_REPLICAS])), "</div>"]
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


def _plots_over_time(told: Timeline) -> list[str]:
    at = told.at.tolist()
    return [
        plot("Output tokens per second", "s", "tokens/s", [Line("output", at, told.output_tokens.tolist())]),
        plot(
            "Requests, all replicas", "s", "requests",
            [Line("running", at, told.running.tolist()), Line("waiting", at, told.waiting.tolist())],
        ),
        plot("KV cache in use, all replicas", "s", "share of pages", [Line("used", at, told.kv_usage.tolist())], 1.0),
    ]  # fmt: skip


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table>{f'<tr>{cells}</tr>' if head else ''}{body}</table>"
