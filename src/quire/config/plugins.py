"""Plug-ins: objects that other packages offer as entry points of a group. The rules that hold for all kinds of them.

- QUIRE_PLUGINS (or VLLM_PLUGINS, if that is not set) holds the names of the plug-ins that may be used, separated by commas. If
  it is empty, none is used; if it is not set, all are.
- A name that two packages offer in one kind is used for neither.
- A plug-in is imported and called in a thread, for at most QUIRE_PLUGIN_TIMEOUT seconds.
- A plug-in that fails is skipped; one line in the log names the package and the reason. With `require_plugins` that is an
  error, as it always is for a plug-in that the user asked for by name.

A general plug-in is a function that is called once in every process that makes or receives `EngineArgs`.
"""

import logging
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO, TypeVar

from quire.types.errors import ConfigError, PlugInError, QuireError

VARIABLES = ("QUIRE_PLUGINS", "VLLM_PLUGINS")
TIMEOUT_VARIABLE = "QUIRE_PLUGIN_TIMEOUT"
DEFAULT_TIMEOUT_S = 60.0
MAX_REASON_CHARS = 1000  # of a plug-in's error
SLOW_AFTER_S = 5.0  # a line in the log names the plug-in that is being waited for

T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kind:
    """What plug-ins are for, and the entry point groups they are in: Quire's first, then vLLM's."""

    what: str
    groups: tuple[str, ...]


GENERAL = Kind("general plug-in", ("quire.general_plugins", "vllm.general_plugins"))
PARSERS = Kind("parser", ("quire.parsers",))
DRAFTERS = Kind("drafter", ("quire.drafters",))
DEVICES = Kind("device", ("quire.devices",))
LORA_RESOLVERS = Kind("LoRA resolver", ("quire.lora_resolvers",))
MODELS = Kind("model family", ("quire.models",))
QUANTIZATION = Kind("quantization method", ("quire.quantization",))
IO_PROCESSORS = Kind("IO processor", ("quire.io_processors", "vllm.io_processor_plugins"))
ENDPOINTS = Kind("endpoint", ("quire.endpoints",))
LOGITS_PROCESSORS = Kind("logits processor", ("quire.logits_processors", "vllm.logits_processors"))
STAT_LOGGERS = Kind("stat logger", ("quire.stat_loggers", "vllm.stat_logger_plugins"))
KINDS = (
    GENERAL, PARSERS, DRAFTERS, DEVICES, LORA_RESOLVERS, MODELS, QUANTIZATION, IO_PROCESSORS, ENDPOINTS, LOGITS_PROCESSORS,
    STAT_LOGGERS,
)  # fmt: skip


@dataclass(frozen=True)
class PlugIn:
    kind: Kind
    point: EntryPoint

    @property
    def name(self) -> str:
        return self.point.name

    @property
    def package(self) -> str:
        """The distribution and its version."""
        return f"{self.point.dist.name} {self.point.dist.version}" if self.point.dist is not None else "an unknown package"

    def __str__(self) -> str:
        return f"the {self.kind.what} {self.name!r} of {self.package} ({self.point.value})"

    def load(self) -> Any:
        """Return the object of the entry point. PlugInError: its package cannot be imported."""
        if self.point.group.startswith("vllm."):
            import_module("quire.compat").install()  # its package imports vllm
        return self.run(self.point.load)

    def run(self, work: Callable[[], T]) -> T:
        """Return what code of the plug-in returns. PlugInError: it raises an exception or exceeds the time limit."""
        with self.blamed(), _output_to_stderr():
            return _in_thread(work, str(self), time_limit())

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Turn an exception, also SystemExit, into a PlugInError that names the plug-in and its package."""
        try:
            yield
        except PlugInError:
            raise
        except (Exception, SystemExit) as error:
            raise PlugInError(f"{self} cannot be used: {_reason(error)}") from error


# ---- which there are


def find_plugins(kind: Kind, taken: Collection[str] = ()) -> dict[str, PlugIn]:
    """Return the plug-ins that may be used, by name, without importing any. taken: names of Quire's own."""
    allowed, found = allowed_names(), _offered(kind)
    for plugins in found.values():
        if len(plugins) > 1:
            _report_once(logging.ERROR, _ambiguous(plugins))
    return {
        name: plugins[0]
        for name, plugins in found.items()
        if name not in taken and len(plugins) == 1 and (allowed is None or name in allowed)
    }


def why_missing(kind: Kind, name: str) -> str:
    """Return a sentence, after a space, on a plug-in that is installed and may not be used; "" if it is not installed."""
    plugins = _offered(kind).get(name, [])
    if len(plugins) > 1:
        return f". {_ambiguous(plugins)}"
    return f". {plugins[0]} is installed, but {_variable()} does not name it" if plugins else ""


def allowed_names() -> frozenset[str] | None:
    """Return the names that QUIRE_PLUGINS or VLLM_PLUGINS has; None: all plug-ins may be used."""
    text = next((os.environ[name] for name in VARIABLES if name in os.environ), None)
    return None if text is None else frozenset(part.strip() for part in text.split(",") if part.strip())


def _variable() -> str:
    return next((name for name in VARIABLES if name in os.environ), VARIABLES[0])


def _offered(kind: Kind) -> dict[str, list[PlugIn]]:
    """Return one plug-in for each package that offers a name. A package may offer it in Quire's group and in vLLM's."""
    found: dict[str, dict[str, PlugIn]] = {}
    for group in kind.groups:
        points = _entry_points(group)
        if points and group.startswith("vllm.") and not _means_quire():
            continue
        for point in points:
            plugin = PlugIn(kind, point)
            found.setdefault(point.name, {}).setdefault(plugin.package, plugin)
    return {name: list(packages.values()) for name, packages in sorted(found.items())}


def _entry_points(group: str) -> Sequence[EntryPoint]:
    """Return the entry points of a group. Those of all packages are read once for each state of the module search path."""
    changed = tuple(_modified_at(directory) for directory in sys.path)
    return _read_entry_points(tuple(sys.path), changed)[group]


def _modified_at(directory: str) -> int | None:
    """Return when a package was last installed in a directory or removed from it; None: there is no such directory."""
    try:
        return Path(directory).stat().st_mtime_ns  # "" is the working directory
    except OSError:
        return None


@lru_cache(maxsize=1)
def _read_entry_points(path: tuple[str, ...], changed: tuple[int | None, ...]) -> dict[str, Sequence[EntryPoint]]:  # noqa: ARG001
    """Return the entry points by group. path, changed: the state of the module search path."""
    installed = entry_points()
    return {group: tuple(installed.select(group=group)) for kind in KINDS for group in kind.groups}


def _means_quire() -> bool:
    """Return whether `import vllm` can mean Quire in this process, as plug-ins of vLLM need it."""
    loaded = sys.modules.get("vllm")
    site = str(import_module("quire.compat").SITE)
    spec = loaded.__spec__ if loaded is not None else find_spec("vllm")
    ours = spec is None or site in str(spec.origin)
    if not ours:
        _report_once(logging.INFO, "vLLM is installed, so plug-ins of vLLM are not loaded; `python -m quire.compat` loads them")
    return ours


def _ambiguous(plugins: list[PlugIn]) -> str:
    first = plugins[0]
    packages = " and ".join(sorted(plugin.package for plugin in plugins))
    return f"the {first.kind.what} {first.name!r} is offered by {packages}, so it is not used. Uninstall all but one"


@cache
def _report_once(level: int, message: str) -> None:
    logger.log(level, message)


# ---- running them


def load_plugins(kind: Kind, use: Callable[[PlugIn, Any], None], require: bool) -> None:
    """Load every plug-in of a kind and pass it to `use`, which may raise an exception, too.

    require: raise PlugInError for a plug-in that fails or that two packages offer, instead of skipping it.
    """
    refuse(load_all(kind, use), require)


def load_all(kind: Kind, use: Callable[[PlugIn, Any], None]) -> list[str]:
    """Return the errors."""
    errors = [_ambiguous(plugins) for plugins in _offered(kind).values() if len(plugins) > 1]
    for plugin in find_plugins(kind).values():
        try:
            loaded = plugin.load()
            with plugin.blamed():
                use(plugin, loaded)
        except PlugInError as error:
            logger.warning("%s; it is skipped", error)
            errors.append(str(error))
    return errors


def refuse(errors: Sequence[str], require: bool) -> None:
    if require and errors:
        raise PlugInError(f"{errors[0]}. Repair or uninstall the package, or start without require_plugins")


_general: list[str] | None = None  # errors of general plug-ins; None: they have not been called
_general_lock = threading.RLock()
_plugin_thread = threading.local()


def load_general(require: bool = False) -> None:
    """Call the functions of general plug-ins, once in this process."""
    global _general
    if getattr(_plugin_thread, "runs", False):
        return  # called by a plug-in
    with _general_lock:
        if _general is None:
            _check_names()
            _general = load_all(GENERAL, lambda plugin, function: plugin.run(function))
        refuse(_general, require)


def _check_names() -> None:
    known = {point.name for kind in KINDS for group in kind.groups for point in _entry_points(group)}
    if unknown := sorted((allowed_names() or frozenset()) - known):
        logger.warning("%s names %s, which no installed package offers", _variable(), ", ".join(unknown))


def time_limit() -> float:
    """Return the seconds that a plug-in has to be imported or called."""
    text = os.environ.get(TIMEOUT_VARIABLE, "")
    try:
        seconds = float(text or DEFAULT_TIMEOUT_S)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= threading.TIMEOUT_MAX:
        raise ConfigError(f"{TIMEOUT_VARIABLE} must be a number of seconds above 0; got {text!r}")
    return seconds


def _in_thread(work: Callable[[], T], what: str, seconds: float) -> T:
    """Return what `work` returns. After the time limit its thread is left alone: Python cannot end it."""
    future: Future[T] = Future()

    def target() -> None:
        _plugin_thread.runs = True
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)
        except BaseException as error:  # also KeyboardInterrupt: Ctrl-C of the user is raised in the main thread
            future.set_exception(ConfigError(_reason(error)))

    threading.Thread(target=target, name="quire-plugin", daemon=True).start()
    slow = min(SLOW_AFTER_S, seconds)
    if not _finishes(future, slow):
        logger.warning("%s takes more than %g s; waiting up to %g s for it", what, slow, seconds)
        if not _finishes(future, seconds - slow):
            raise ConfigError(f"it has not returned after {seconds:g} s. If it only is slow, set {TIMEOUT_VARIABLE} higher")
    return future.result()


def _finishes(future: "Future[Any]", seconds: float) -> bool:
    """Return whether the work ends within that time, whether by a value or an exception."""
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    return done.wait(seconds)


def _reason(error: BaseException) -> str:
    """Return an error of a plug-in in one line."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = "its text cannot be read"
    text = "".join(character if character.isprintable() else "?" for character in text)
    text = text if len(text) <= MAX_REASON_CHARS else f"{text[:MAX_REASON_CHARS]}..."
    if isinstance(error, QuireError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


_output_lock = threading.Lock()
_outputs: list[TextIO] = []  # standard output, once for each plug-in that runs


@contextmanager
def _output_to_stderr() -> Iterator[None]:
    """Send what a plug-in prints to standard error: standard output is what commands answer."""
    with _output_lock:
        _outputs.append(_outputs[0] if _outputs else sys.stdout)
        sys.stdout = sys.stderr
    try:
        yield
    finally:
        with _output_lock:
            original = _outputs.pop()
            if not _outputs:
                sys.stdout = original


# ---- for reports


def describe_plugins() -> list[dict[str, str]]:
    """Return every plug-in that is installed, with its state. Plug-ins that may be used are imported."""
    rows = []
    for kind in KINDS:
        usable = find_plugins(kind)
        for name, plugins in _offered(kind).items():
            for plugin in plugins:
                state = _state(plugin) if name in usable else why_missing(kind, name).removeprefix(". ")
                rows.append(
                    {"kind": kind.what, "name": name, "package": plugin.package, "value": plugin.point.value, "state": state}
                )
    return rows


def _state(plugin: PlugIn) -> str:
    try:
        plugin.load()
    except PlugInError as error:
        return str(error)
    return "can be imported"
