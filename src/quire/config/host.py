"""What the machine under us leaves to this process. Reads /proc and /sys, nothing else."""

import os
from collections.abc import Iterator
from pathlib import Path


def available_host_bytes(root: Path = Path("/")) -> int:
    """What this process may still take: free memory of the machine, or what its control groups leave of their limits."""
    return min([_machine_bytes(root), *_group_bytes(root)])


def _machine_bytes(root: Path) -> int:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux: half of the memory is a fair guess
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    fields = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines) if rest.split()}
    return fields.get("MemAvailable", fields["MemFree"])


def _group_bytes(root: Path) -> Iterator[int]:
    """limit - use of every control group around this process. File pages in `use` can be dropped, so they do not count."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, use, dropped = root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base, limit, use = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            dropped = "total_inactive_file"
        else:
            continue
        group = base / path.lstrip("/")
        for place in (group, *group.parents):
            if (most := _read_number(place / limit)) is not None and (used := _read_number(place / use)) is not None:
                yield max(0, most - used + _read_field(place / "memory.stat", dropped))
            if place == base:
                break


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such group here, or "max"
        return None


def _read_field(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(value) for key, _, value in (line.partition(" ") for line in lines) if key == name), 0)
