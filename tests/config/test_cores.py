"""Which cores count, and who decides how threads wait."""

import os

import pytest

from quire.config.host import count_threads, limit_thread_spinning, take_cores, usable_cores

CPUS = sorted(os.sched_getaffinity(0))


def machine(root, group="0::/box"):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(group + "\n")
    return root


def test_without_limits_every_allowed_cpu_is_a_core(tmp_path):
    assert usable_cores(machine(tmp_path)) == len(CPUS)
    assert usable_cores(tmp_path / "nowhere") == len(CPUS)


def test_threads_of_one_core_count_once(tmp_path):
    machine(tmp_path)
    for cpu in CPUS:
        topology = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text("0-999\n")
    assert usable_cores(tmp_path) == 1


@pytest.mark.parametrize(
    ("limit", "cores"), [("100000 100000", 1), ("150000 100000", 2), ("max 100000", 10**6), ("5 100000", 1)]
)
def test_a_time_limit_of_the_group_or_one_around_it(tmp_path, limit, cores):
    inner, outer = (machine(tmp_path / name) for name in ("inner", "outer"))
    for place in (inner / "sys/fs/cgroup/box", outer / "sys/fs/cgroup"):
        place.mkdir(parents=True)
        (place / "cpu.max").write_text(limit)
    assert usable_cores(inner) == usable_cores(outer) == min(cores, len(CPUS))


def test_the_old_way_of_limits(tmp_path):
    machine(tmp_path, group="4:cpu,cpuacct:/box")
    place = tmp_path / "sys/fs/cgroup/cpu/box"
    place.mkdir(parents=True)
    (place / "cpu.cfs_quota_us").write_text("100000\n")
    (place / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_cores(tmp_path) == 1


def test_what_the_user_set_stands():
    nothing: dict[str, str] = {}
    limit_thread_spinning(nothing)
    assert nothing["GOMP_SPINCOUNT"]
    decided = {"OMP_WAIT_POLICY": "active"}
    limit_thread_spinning(decided)
    assert decided == {"OMP_WAIT_POLICY": "active"}
    assert count_threads({"OMP_NUM_THREADS": "7"}) == count_threads({"OMP_NUM_THREADS": "7,2"}) == 7
    assert count_threads({"OMP_NUM_THREADS": "many"}) == count_threads({}) == usable_cores()


def test_engines_share_the_cores(monkeypatch):
    monkeypatch.setattr("quire.config.host.usable_cores", lambda: 7)

    def threads(engine, engines, **environment):
        take_cores(engine, engines, environment)
        return count_threads(environment)

    assert [threads(engine, 3) for engine in range(3)] == [3, 2, 2]
    assert [threads(engine, 9) for engine in range(9)] == [1] * 9
    assert [threads(engine, 3, OMP_NUM_THREADS="5") for engine in range(3)] == [5] * 3
