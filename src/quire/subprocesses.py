"""How a process that we start finds our code."""

import os
import site
from pathlib import Path

ROOT = str(Path(__file__).absolute().parent.parent)


def environment() -> dict[str, str] | None:
    """Ours. A package that is not installed but was found by a path is to be found by our processes, too."""
    if ROOT in (*site.getsitepackages(), site.getusersitepackages()):
        return None
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))}
