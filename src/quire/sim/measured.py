"""How long a step takes, from steps that were measured: a file of `quire bench steps`.

    seconds = prompt(tokens) + beside(n) + key · keys + pair · pairs          n rows of one token

`single` is measured with rows of one token, `prompt` with one row of all tokens, or of all but one where the device is never
without a step; between measured sizes a line is drawn. `beside` is measured with many rows of one token and a prompt; of files
without such steps it is what these rows take more than a prompt of as many tokens. What a key costs is learnt from equal steps
with other contexts. A device that records steps runs those with prompts as the next larger one that it has.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.bench.steps import FIELDS, KIND, StepPoint
from quire.files.reading import shown
from quire.sim.analytic import HostTime, StepShape
from quire.sim.fleet import FrontTime
from quire.types.errors import ConfigError
from quire.types.json_text import read_json
from quire.types.plan import recorded_width

FEWEST = 2  # sizes that make a curve
MOST = 1e15  # of anything: its square still leaves room to count with
SOONEST = 1e-9  # seconds: so does the square of this


class Curve:
    """Lines between points, going on beyond the last as they came to it. It never falls: that is noise."""

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        self._xs, self._ys = [], list[float]()
        for x, y in sorted(points):
            self._xs.append(x)
            self._ys.append(max(y, self._ys[-1] if self._ys else 0.0))

    def __call__(self, x: float) -> float:
        xs, ys = self._xs, self._ys
        if x <= xs[0]:
            return ys[0]
        i = min(bisect_right(xs, x), len(xs) - 1)
        return ys[i - 1] + (ys[i] - ys[i - 1]) * (x - xs[i - 1]) / (xs[i] - xs[i - 1])


@dataclass(frozen=True)
class Sized:
    size: int
    looked_at: float  # keys, or pairs
    seconds: float


@dataclass(frozen=True)
class Mixed:
    """A step with a prompt: without what its rows of one token look at."""

    singles: int
    tokens: int
    pairs: float
    seconds: float


class MeasuredTiming:
    """width: tokens of a step with prompts -> tokens that are run for it."""

    def __init__(self, points: Sequence[StepPoint], host: HostTime, width: Callable[[int], int] = int) -> None:
        singles = [Sized(point.rows, point.keys, point.seconds) for point in points if point.tokens == point.rows]
        self.host, self._width, self._key = host, width, _slope(singles, in_any_case=True)
        mixed = [
            Mixed(point.rows - 1, width(point.tokens), point.pairs, max(0.0, point.seconds - self._key * point.keys))
            for point in points
            if point.rows < point.tokens
        ]
        prompts = [Sized(point.tokens, point.pairs, point.seconds) for point in mixed if point.singles <= 1]
        for what, found in (("rows of one token", singles), ("one row of several tokens", prompts)):
            if len({point.size for point in found}) < FEWEST:
                raise ConfigError(f"it has steps with {what} in fewer than {FEWEST} sizes; measure with `quire bench steps`")
        self._pair = _slope(prompts)
        self._single, self._prompt = _curve(singles, self._key), _curve(prompts, self._pair)
        more = [
            Sized(point.singles, 0.0, point.seconds - self._pair * point.pairs - self._prompt(point.tokens))
            for point in mixed
            if point.singles > 1
        ]
        self._measured_beside = _curve([Sized(1, 0.0, 0.0), *more], 0.0) if more else None

    def seconds(self, shape: StepShape) -> float:
        looking = self._key * shape.single_keys + self._pair * shape.pairs
        if shape.tokens == shape.rows:
            return self._single(shape.rows) + looking
        return self._prompt(self._width(shape.tokens)) + self._beside(shape.singles) + looking

    def _beside(self, rows: int) -> float:
        if self._measured_beside is not None:
            return self._measured_beside(rows)
        return max(0.0, self._single(rows) - self._prompt(rows)) if rows else 0.0


@dataclass(frozen=True)
class MeasuredFile:
    """Step times, and what they were measured with."""

    timing: MeasuredTiming
    model: str
    device: str
    machine: str
    page_size: int
    pages: int
    memory: int  # bytes of the device, 0 = not known
    front: FrontTime | None  # None = it was not measured
    sizes: dict[str, int]  # of its model (`sizes_of`); empty: an older file


def read_measured(path: Path) -> MeasuredFile:
    where = f"--timing {path}"
    try:
        result = read_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {where}: {error}") from None
    kind = result.get("kind") if isinstance(result, dict) else None
    if kind != KIND:
        raise ConfigError(f"{where}: kind is {kind!r}, not {KIND!r}; `quire bench steps` writes such a file")
    points, parts = result.get("points"), {}
    if not isinstance(points, list):
        raise ConfigError(f"{where}: points must be a list, got {str(points)[:60]}")
    for name in ("host", "engine", "machine"):
        parts[name] = result.get(name)
        if not isinstance(parts[name], dict):
            raise ConfigError(f"{where}: {name} must be an object, got {str(parts[name])[:60]}")
    since = {"admission": 0.0, "newcomer": 0.0} | parts["host"]  # older files have neither
    host = HostTime(*(_number(f"{where}: host", since, name) for name in ("step", "row", "admission", "newcomer")))
    found = [_point(f"{where}: point {i}", point) for i, point in enumerate(points, 1)]
    engine, sizes = parts["engine"], dict[str, int]()
    recorded = engine.get("device") == "cuda" and not engine.get("enforce_eager")
    try:
        timing = MeasuredTiming(found, host, recorded_width if recorded else int)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    for name, least in (("block_size", 1), ("num_pages", 1), ("device_memory", 0)):
        sizes[name] = int(_number(f"{where}: engine", engine, name))
        if sizes[name] < least:
            raise ConfigError(f"{where}: engine: {name} must be at least {least}, got {sizes[name]}")
    if not isinstance(engine.get("device"), str):
        raise ConfigError(f"{where}: engine: device must be a name, got {engine.get('device')!r}")
    told = result.get("sizes", {})
    if not isinstance(told, dict):
        raise ConfigError(f"{where}: sizes must be an object, got {str(told)[:60]}")
    shapes = {name: int(_number(f"{where}: sizes", told, name)) for name in told}
    machine = parts["machine"].get("gpu") or parts["machine"].get("cpu") or "an unknown machine"
    return MeasuredFile(
        timing, str(result.get("model_id")), engine["device"], str(machine),
        sizes["block_size"], sizes["num_pages"], sizes["device_memory"], _front(f"{where}: front", result.get("front"), host),
        shapes,
    )  # fmt: skip


def _front(where: str, told: Any, host: HostTime) -> FrontTime | None:
    """A single request is measured as a whole; the engine's part of it is simulated."""
    if told is None:
        return None
    if not isinstance(told, dict):
        raise ConfigError(f"{where} must be an object, got {str(told)[:60]}")
    told = {"finish": 0.0} | told  # older files have it in `request`
    alone, request, token, finish = (_number(where, told, name) for name in ("alone", "request", "token", "finish"))
    return FrontTime(max(0.0, alone - token - host.seconds(1, 1)), request, token, finish)


def _point(where: str, point: Any) -> StepPoint:
    if not isinstance(point, dict):
        raise ConfigError(f"{where} must be an object, got {str(point)[:60]}")
    values = {name: _number(where, point, name) for name in FIELDS}
    rows, tokens = int(values["rows"]), int(values["tokens"])
    if not 1 <= rows <= tokens:
        raise ConfigError(f"{where}: rows must be 1 or more and tokens no fewer, got {rows} and {tokens}")
    return StepPoint(rows, tokens, values["keys"], values["pairs"], values["seconds"])


def _number(where: str, values: dict[str, Any], name: str) -> float:
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST:
        raise ConfigError(f"{where}: {name} must be a number from 0 to {MOST:g}, got {shown(value)}")
    return float(value)


def _slope(points: Sequence[Sized], in_any_case: bool = False) -> float:
    """Seconds for each that is looked at: least squares over steps of equal size, as shares of what these take, so that a long
    step which something disturbed does not decide for all. `in_any_case`: a long context may cost something however few look
    at it, which is not counted to each. 0 where contexts do not differ."""
    more: list[tuple[float, float, float]] = []  # that are looked at, seconds, weight
    for size in {point.size for point in points}:
        alike = sorted((point.looked_at, point.seconds) for point in points if point.size == size)
        mean = sum(seconds for _, seconds in alike) / len(alike)
        weight = 1 / max(mean, SOONEST) ** 2 if mean else 1.0
        first, then = alike[0]
        more += [(looked_at - first, seconds - then, weight) for looked_at, seconds in alike if looked_at > first]
    whole = sum(weight for _, _, weight in more)
    if in_any_case and whole:
        x, y = (sum(weight * values[i] for *values, weight in more) / whole for i in (0, 1))
        each = _through(more, x, y)
        if 0.0 < each * x <= y:
            return each
    return max(0.0, _through(more, 0.0, 0.0))


def _through(points: Sequence[tuple[float, float, float]], x: float, y: float) -> float:
    below = sum(weight * (at - x) ** 2 for at, _, weight in points)
    return sum(weight * (at - x) * (value - y) for at, value, weight in points) / below if below else 0.0


def _curve(points: Sequence[Sized], each: float) -> Curve:
    sizes = sorted({point.size for point in points})
    rest = {size: [point.seconds - each * point.looked_at for point in points if point.size == size] for size in sizes}
    return Curve([(size, max(0.0, sum(values) / len(values))) for size, values in rest.items()])
