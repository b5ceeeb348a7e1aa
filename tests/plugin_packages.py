"""Packages with plug-ins, as pip would have installed them, for this process and those that it starts."""

import os
import sys
from pathlib import Path

import pytest

from quire.config import families, model_registry, plugins, quantization_methods
from quire.serve import endpoints


class Packages:
    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._directory = directory
        self._modules: list[str] = []
        monkeypatch.syspath_prepend(directory)
        path = os.pathsep.join(filter(None, [str(directory), os.environ.get("PYTHONPATH")]))
        monkeypatch.setenv("PYTHONPATH", path)
        monkeypatch.setattr(plugins, "_general", None)
        for name in plugins.VARIABLES:
            monkeypatch.delenv(name, raising=False)
        plugins._report_once.cache_clear()
        _forget_tables()

    def add(self, name: str, points: str, code: str = "", version: str = "1.0") -> None:
        """Install a package; `code` is its module, which has its name. points: the lines of entry_points.txt."""
        about = self._directory / f"{name}-{version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (about / "entry_points.txt").write_text(points)
        (self._directory / f"{name}.py").write_text(code)
        self._modules.append(name)
        os.utime(self._directory, (len(self._modules),) * 2)  # the file system's clock may not tell two installations apart

    def forget(self) -> None:
        for name in self._modules:
            sys.modules.pop(name, None)
        _forget_tables()


def _forget_tables() -> None:
    """Tables of what plug-ins bring are made anew at their next use, as in a process that starts."""
    for table in (families, quantization_methods):
        table._failures.clear()
        table._registered.clear()
        table.forget_tables()
    families._plugin_cards.cache_clear()
    quantization_methods._plugin_methods.cache_clear()
    model_registry._classes.clear()
    endpoints._load.cache_clear()
