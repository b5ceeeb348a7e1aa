"""Processes that we start: how they find our code, and how long they have worked."""

import os
import site
from pathlib import Path

ROOT = str(Path(__file__).absolute().parent.parent)


def environment() -> dict[str, str] | None:
    """Ours. A package that is not installed but was found by a path is to be found by our processes, too."""
    if ROOT in (*site.getsitepackages(), site.getusersitepackages()):
        return None
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))}


def processor_time(pid: int) -> float | None:
    """Seconds a process has run, where that can be known."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
