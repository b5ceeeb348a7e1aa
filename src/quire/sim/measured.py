"""Step times interpolated from measured steps: a file of `quire bench steps`.

    seconds = prompt(tokens) + mixed(n) + key · keys + pair · pairs          n decode rows

`single` is measured with decode rows only, `prompt` with one row of all tokens (of all but one if the device is never idle);
between measured sizes the time is linear. `mixed` is measured with many decode rows and a prompt; for files without such
steps it is the excess of decode rows over a prompt of as many tokens. The cost of a key is fitted to equal steps
with different contexts. A device with CUDA graphs runs steps with prompts as the next larger graph.
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

MIN_SIZES = 2  # of a curve
MAX_VALUE = 1e15  # its square is far from overflow
MIN_SECONDS = 1e-9  # its square is far from underflow


class Curve:
    """A piecewise linear curve that extends beyond the last point. It never falls: a decrease is noise."""

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
    attended: float  # keys or pairs
    seconds: float


@dataclass(frozen=True)
class Mixed:
    """A step with a prompt, without the attention time of its decode rows."""

    singles: int
    tokens: int
    pairs: float
    seconds: float


class MeasuredTiming:
    """Measured step times. width: tokens of a step with prompts -> tokens that the device computes."""

    def __init__(self, points: Sequence[StepPoint], host: HostTime, width: Callable[[int], int] = int) -> None:
        singles = [Sized(point.rows, point.keys, point.seconds) for point in points if point.tokens == point.rows]
        self.host, self._width, self._key = host, width, _slope(singles, fixed_cost=True)
        mixed = [
            Mixed(point.rows - 1, width(point.tokens), point.pairs, max(0.0, point.seconds - self._key * point.keys))
            for point in points
            if point.rows < point.tokens
        ]
        prompts = [Sized(point.tokens, point.pairs, point.seconds) for point in mixed if point.singles <= 1]
        for what, found in (("decode rows", singles), ("one row of several tokens", prompts)):
            if len({point.size for point in found}) < MIN_SIZES:
                raise ConfigError(f"it has steps with {what} in fewer than {MIN_SIZES} sizes; measure with `quire bench steps`")
        self._pair = _slope(prompts)
        self._single, self._prompt = _curve(singles, self._key), _curve(prompts, self._pair)
        more = [
            Sized(point.singles, 0.0, point.seconds - self._pair * point.pairs - self._prompt(point.tokens))
            for point in mixed
            if point.singles > 1
        ]
        self._measured_mixed = _curve([Sized(1, 0.0, 0.0), *more], 0.0) if more else None

    def seconds(self, shape: StepShape) -> float:
        attention = self._key * shape.single_keys + self._pair * shape.pairs
        if shape.tokens == shape.rows:
            return self._single(shape.rows) + attention
        return self._prompt(self._width(shape.tokens)) + self._mixed(shape.singles) + attention

    def latency(self, shape: StepShape) -> float:
        return self.seconds(shape)

    def _mixed(self, rows: int) -> float:
        if self._measured_mixed is not None:
            return self._measured_mixed(rows)
        return max(0.0, self._single(rows) - self._prompt(rows)) if rows else 0.0


@dataclass(frozen=True)
class MeasuredFile:
    """Step times, and the model and machine of the measurement."""

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
    model_sizes = result.get("sizes", {})
    if not isinstance(model_sizes, dict):
        raise ConfigError(f"{where}: sizes must be an object, got {str(model_sizes)[:60]}")
    shapes = {name: int(_number(f"{where}: sizes", model_sizes, name)) for name in model_sizes}
    machine = parts["machine"].get("gpu") or parts["machine"].get("cpu") or "an unknown machine"
    return MeasuredFile(
        timing, str(result.get("model_id")), engine["device"], str(machine),
        sizes["block_size"], sizes["num_pages"], sizes["device_memory"], _front(f"{where}: front", result.get("front"), host),
        shapes,
    )  # fmt: skip


def _front(where: str, front: Any, host: HostTime) -> FrontTime | None:
    """Return the API process's times. A single request is measured as a whole; the engine's part of it is subtracted."""
    if front is None:
        return None
    if not isinstance(front, dict):
        raise ConfigError(f"{where} must be an object, got {str(front)[:60]}")
    front = {"finish": 0.0} | front  # older files include it in `request`
    alone, request, token, finish = (_number(where, front, name) for name in ("alone", "request", "token", "finish"))
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
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_VALUE:
        raise ConfigError(f"{where}: {name} must be a number from 0 to {MAX_VALUE:g}, got {shown(value)}")
    return float(value)


def _slope(points: Sequence[Sized], fixed_cost: bool = False) -> float:
    """Return seconds per attended key or pair: least squares over steps of equal size.

    Errors are relative to the step time, so that one disturbed long step does not dominate. 0 if contexts do not differ.

    fixed_cost: allow a cost of a long context that does not depend on the number of keys
    """
    more: list[tuple[float, float, float]] = []  # attended, seconds, weight
    for size in {point.size for point in points}:
        alike = sorted((point.attended, point.seconds) for point in points if point.size == size)
        mean = sum(seconds for _, seconds in alike) / len(alike)
        weight = 1 / max(mean, MIN_SECONDS) ** 2 if mean else 1.0
        first, then = alike[0]
        more += [(attended - first, seconds - then, weight) for attended, seconds in alike if attended > first]
    whole = sum(weight for _, _, weight in more)
    if fixed_cost and whole:
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
    rest = {size: [point.seconds - each * point.attended for point in points if point.size == size] for size in sizes}
    return Curve([(size, max(0.0, sum(values) / len(values))) for size, values in rest.items()])
