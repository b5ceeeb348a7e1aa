"""The memory and processor cores available to this process, from /proc and /sys."""

import os
import sys
from collections.abc import Iterator, MutableMapping
from pathlib import Path


def available_host_bytes(root: Path = Path("/")) -> int:
    """Return the memory that this process may still use: free memory of the machine, or the rest of control group limits."""
    return min([_machine_bytes(root), *_group_bytes(root)])


def _machine_bytes(root: Path) -> int:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux: half of the memory is a fair guess
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    fields = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines) if rest.split()}
    return fields.get("MemAvailable", fields["MemFree"])


def _group_bytes(root: Path) -> Iterator[int]:
    """Yield limit - usage of every control group around this process. File pages can be dropped, so they do not count."""
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
    except (OSError, ValueError):  # no such group, or "max"
        return None


def _read_field(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(value) for key, _, value in (line.partition(" ") for line in lines) if key == name), 0)


SPIN_COUNT = "1000"
SWITCH_INTERVAL_S = 0.0005  # maximum for which a thread holds the GIL while another waits
# environment variables by which users control how threads wait
WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME")


def limit_thread_spinning(environ: MutableMapping[str, str] = os.environ) -> None:
    """Limit how long OpenMP threads spin. It has no effect once torch is imported."""
    if not any(name in environ for name in WAITING):
        environ["GOMP_SPINCOUNT"] = SPIN_COUNT


def shorten_switch_interval() -> None:
    """Shorten the switch interval of a process whose loop must not wait for its other threads."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def count_threads(environ: MutableMapping[str, str] = os.environ, ranks: int = 1) -> int:
    """Return the threads of a CPU engine: OMP_NUM_THREADS, or one per usable core, divided by the ranks."""
    given = environ.get("OMP_NUM_THREADS", "").split(",")[0]
    return int(given) if given.isdigit() and int(given) > 0 else max(1, usable_cores() // ranks)


def take_cores(engine: int, engines: int, environ: MutableMapping[str, str] = os.environ) -> None:
    """Set the threads of one of several engines on this machine: its share of the cores, at least one.

    OMP_NUM_THREADS, if set, applies to each of them.
    """
    if not environ.get("OMP_NUM_THREADS"):
        cores, more = divmod(usable_cores(), engines)
        environ["OMP_NUM_THREADS"] = str(max(1, cores + (engine < more)))


def usable_cores(root: Path = Path("/")) -> int:
    """Return the physical cores that this process may use, within the CPU time limits of its control groups."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = {_siblings(root, cpu) for cpu in allowed}
    return max(1, min([len(cores), *_quotas(root)]))


def _siblings(root: Path, cpu: int) -> str:
    """Return the hardware threads of a CPU's core as the system lists them: equal for CPUs of one core."""
    try:
        return (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _quotas(root: Path) -> list[int]:
    """Return the CPU time limits of the control groups around this process as numbers of cores, rounded up."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    quotas = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        base = root / "sys/fs/cgroup" / ("" if controllers == "" else "cpu")
        if controllers and "cpu" not in controllers.split(","):
            continue
        group = base / path.lstrip("/")
        for place in (group, *group.parents):
            quotas += [-(-quota // period) for quota, period in [_limit(place)] if quota > 0]
            if place == base:
                break
    return quotas


def _limit(group: Path) -> tuple[int, int]:
    """Return (microseconds of CPU time, period in microseconds); (0, 1): no limit."""
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = (group / "cpu.cfs_quota_us").read_text(), (group / "cpu.cfs_period_us").read_text()
        return int(quota), int(period)
    except (OSError, ValueError):  # no such group, or "max"
        return 0, 1
