"""Module objects for vLLM's paths, made from `table.py` when they are imported. Names are fetched on first use.

Every such module is a package without files. `from PATH import NAME` of a name that is not there therefore asks `find_spec` for
`PATH.NAME`, whose ImportError says why Quire does not have it.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

from quire.compat import VLLM_VERSION
from quire.compat.table import MAINS, MODULES, NOT_BUILT_MODULES, NOT_BUILT_NAMES, WHOLE_MODULES


class LazyModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        path = _below_root(self.__name__)
        if path in WHOLE_MODULES and not name.startswith("__"):
            return getattr(import_module(WHOLE_MODULES[path]), name)
        names = MODULES.get(path, {})
        if name == "__all__":
            return list(names)
        if name in names:
            home, _, attribute = names[name].partition(":")
            value = getattr(import_module(home), attribute)
        elif _join(path, name) in _PATHS:
            value = import_module(f"{self.__name__}.{name}")
        else:
            raise AttributeError(_why_missing(self.__name__, name), name=name, obj=self)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *MODULES.get(_below_root(self.__name__), {})})


class _Loader:
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return LazyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing runs: names are fetched on first use."""

    def get_code(self, name: str) -> CodeType | None:
        """For `python -m`."""
        home = MAINS.get(_below_root(name).removesuffix(".__main__"))
        if home is None:
            return None
        module, _, function = home.partition(":")
        return compile(f"import sys\nfrom {module} import {function}\nsys.exit({function}())", f"<{name}>", "exec")


def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:  # noqa: ARG001
    """Return how to make a module of vLLM's paths, or None for other modules. Raise ImportError for what is not built."""
    root, _, below = name.partition(".")
    parent = sys.modules.get(name.rpartition(".")[0])
    if root == "vllm" and not isinstance(sys.modules.get("vllm"), LazyModule):
        return None  # a module of vLLM itself
    if below in _PATHS:
        return ModuleSpec(name, _Loader(), is_package=True)  # type: ignore[arg-type]
    if below.endswith(".__main__") and below.removesuffix(".__main__") in MAINS:
        return ModuleSpec(name, _Loader())  # type: ignore[arg-type]
    if isinstance(parent, LazyModule) or _reason(below) is not None:
        package, _, last = name.rpartition(".")
        # without `name` the import system keeps this message instead of writing its own
        raise ModuleNotFoundError(_why_missing(package, last))
    return None


def _why_missing(package: str, name: str) -> str:
    reason = _reason(_join(_below_root(package), name))
    if reason is not None:
        return f"{package}.{name} is not built in Quire: {reason}"
    if package == "vllm" or _below_root(package) in _PATHS:
        return f"{package}.{name} is not built in Quire, which follows the public API of vLLM {VLLM_VERSION}"
    return f"module {package!r} has no attribute {name!r}"


def _reason(below: str) -> str | None:
    """Return which feature a path below the root belongs to, if it is one that is not built."""
    package, _, name = below.rpartition(".")
    if name in NOT_BUILT_NAMES and (package in _PATHS or not package):
        return NOT_BUILT_NAMES[name]
    while below:
        if below in NOT_BUILT_MODULES:
            return NOT_BUILT_MODULES[below]
        below = below.rpartition(".")[0]
    return None


def _below_root(name: str) -> str:
    return name.partition(".")[2]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _with_parents(paths: set[str]) -> frozenset[str]:
    return frozenset(".".join(parts[: n + 1]) for path in paths for parts in [path.split(".")] for n in range(len(parts)))


_PATHS = _with_parents({*MODULES, *WHOLE_MODULES, *MAINS} - {""})
