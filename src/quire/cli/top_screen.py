"""What `quire top` shows, as lines of text: all of it on a terminal, one line at a time elsewhere."""

from collections.abc import Sequence
from typing import Any

from quire.cli.top_feed import Known

BARS = " ▁▂▃▄▅▆▇█"
MAP_ROWS = 6
LEGEND = ". blank  - cached  o yours  O shared  x others'"


def screen(known: Known, trouble: str | None, url: str, width: int, height: int) -> list[str]:
    hello, stats = known.hello, known.stats
    if not hello:
        return [_cut(f"quire top  {url}  {trouble or 'connecting'}", width)]
    state = trouble if trouble is not None else "; ".join(_engine(known, engine) for _, engine in sorted(known.engines.items()))
    lines = [f"{hello['model']} on {hello['device']} ({hello['dtype']}), Quire {hello['server']} at {url}: {state}"]
    lines += [numbers(known), *_steps(known)]
    if stats:
        lines.append(f"first token {_histogram(stats['ttft'], hello['ttft_bounds'])}")
        lines.append(f"next token  {_histogram(stats['itl'], hello['itl_bounds'])}")
    lines += ["", *_map(known, width)]
    room = max(0, height - len(lines) - 2)
    lines += ["", *_requests(known, room)]
    return [_cut(line, width) for line in lines[: height - 1]] + [_cut("q quits", width)]


def numbers(known: Known) -> str:
    """The whole server in a line."""
    stats, pages = known.stats, known.pages
    step = next(iter(known.steps.values()), None)
    restarts = sum(engine["restarts"] for engine in known.engines.values())
    used = f"{pages['used']}/{pages['used'] + pages['cached'] + pages['blank']}" if pages else "?"
    rates = stats.get("rates", {})
    own = f" ({step['own_running']} yours)" if step and known.hello.get("keys") else ""
    return (
        f"running {stats.get('running', 0)}{own}  waiting {stats.get('waiting', 0)}  pages {used}  "
        f"prompt {rates.get('prompt', 0):.0f}/s  generated {rates.get('generated', 0):.0f}/s  "
        f"preemptions {stats.get('preemptions', 0)}  compiling {stats.get('compiling', 0)}  "
        f"restarts {restarts}"
    )


def finished(request: dict[str, Any]) -> str:
    """A request that is over, and where its time went."""
    parts = " + ".join(f"{name} {seconds:.3f}" for name, seconds in request["parts"].items())
    return (
        f"finished {_plain(request['id'])} {request['reason']} prompt {request['prompt']} ({request['cached']} cached) "
        f"drawn {request['drawn']} in {request['wall']:.3f} s = {parts}"
    )


def name(known: Known, event: dict[str, Any]) -> str:
    """Of the engine that an event is about; it has a number where there are several."""
    return f"engine {event['engine']}" if known.hello.get("engines", 1) > 1 else "engine"


def _engine(known: Known, engine: dict[str, Any]) -> str:
    told, restarts = str(engine["state"]), engine["restarts"]
    if len(known.engines) > 1:
        told = f"{name(known, engine)} {told}"
    if restarts:
        told += f", {restarts} restarts; the latest, because {engine['reason']}"
    return told


def _steps(known: Known) -> list[str]:
    """A line for every engine."""
    if len(known.engines) < 2:
        return [_step(known, known.steps.get(0))]
    engines = sorted(known.engines.items())
    return [f"{name(known, engine)}: {_step(known, known.steps.get(number))}" for number, engine in engines]


def _step(known: Known, event: dict[str, Any] | None) -> str:
    steps = event["steps"] if event else []
    if not steps:
        return "no step yet" if event is None else "idle"
    columns = known.hello["step_columns"]
    rows = [dict(zip(columns, step, strict=False)) for step in steps]
    last, mean = rows[-1], sum(row["ms"] for row in rows) / len(rows)
    told = [f"step {last['step']}", f"{mean:.1f} ms", f"{last['rows']} rows", f"{last['tokens']} tokens"]
    told += [f"{last[name]} {name}" for name in ("prompt", "drafted", "accepted", "masked", "given") if last[name]]
    return "  ".join(told)


def _histogram(counts: Sequence[int], bounds: Sequence[float]) -> str:
    total, most = sum(counts), max(counts)
    if not total:
        return "none yet"
    bars = "".join(BARS[-(-count * (len(BARS) - 1) // most)] for count in counts)
    return f"|{bars}| half within {_within(counts, bounds, 0.5)}, 99% within {_within(counts, bounds, 0.99)}, of {total}"


def _within(counts: Sequence[int], bounds: Sequence[float], share: float) -> str:
    left = share * sum(counts)
    for count, bound in zip(counts, bounds, strict=False):
        left -= count
        if left <= 0:
            return f"{bound * 1000:.0f} ms" if bound < 1 else f"{bound:g} s"
    return f"more than {bounds[-1]:g} s"


def _map(known: Known, width: int) -> list[str]:
    """The cells that fit; of more than that, every so many-th."""
    cells, room = known.cells, width * MAP_ROWS
    if not cells:
        return []
    each = -(-len(cells) // room)
    shown = cells[::each]
    pages = known.hello["pages_per_cell"] * each
    scale = "" if pages == 1 else f"  (one page of {pages} is shown)"
    return [f"pages: {LEGEND}{scale}", *(shown[i : i + width] for i in range(0, len(shown), width))]


def _requests(known: Known, room: int) -> list[str]:
    rows = dict[str, tuple[int, int, int]]()
    for step in known.steps.values():
        rows |= zip(step["keys"], zip(step["row"], step["computed"], step["drawn"], strict=False), strict=False)
    lines = [f"{'request':<34}{'state':<10}{'prompt':>8}{'cached':>8}{'computed':>9}{'drawn':>7}{'row':>5}{'seconds':>9}"]
    for key, request in list(known.open.items())[-room:]:
        row, computed, drawn = rows.get(key, (0, 0, request["drawn"]))
        lines.append(
            f"{_plain(request['id'])[:33]:<34}{request['state']:<10}{request['prompt']:>8}{request['cached']:>8}{computed:>9}"
            f"{drawn:>7}{row:>5}{max(0.0, known.last - request['arrived']):>9.1f}"
        )
    left = room - len(lines)
    lines += [finished(request) for request in list(reversed(known.finished))[: max(0, left)]]
    return lines[:room]


def _plain(text: str) -> str:
    """Nothing that a terminal would obey."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _cut(line: str, width: int) -> str:
    return _plain(line)[:width]
