"""How much host memory the cache may take, from the files Linux describes it in."""

import pytest

from quire.config.host import available_host_bytes
from quire.device.cpu import device
from quire.types.errors import ConfigError

GIB = 2**30


def machine(root, available_kib: int, cgroup: str, files: dict[str, str]):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99999999 kB\nMemFree: 5 kB\nMemAvailable: {available_kib} kB\nHugePages:\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_limits_the_machine_decides(tmp_path):
    root = machine(tmp_path, 2048, "0::/a\n", {"a/memory.max": "max\n", "a/memory.current": "77\n"})
    assert available_host_bytes(root) == 2048 * 1024


def test_the_tightest_group_decides(tmp_path):
    files = {
        "a/b/memory.max": "9000\n", "a/b/memory.current": "1000\n",
        "a/memory.max": "5000\n", "a/memory.current": "3000\n", "a/memory.stat": "anon 1\ninactive_file 500\nfile 9\n",
    }  # fmt: skip
    assert available_host_bytes(machine(tmp_path, 2048, "0::/a/b\n", files)) == 2500


def test_a_container_sees_its_own_group_at_the_top(tmp_path):
    files = {"memory.max": "8000\n", "memory.current": "8500\n"}
    assert available_host_bytes(machine(tmp_path, 2048, "0::/\n", files)) == 0


def test_the_older_kind_of_groups(tmp_path):
    files = {
        "memory/memory.limit_in_bytes": "7000\n", "memory/memory.usage_in_bytes": "6000\n",
        "memory/memory.stat": "total_inactive_file 200\n",
    }  # fmt: skip
    root = machine(tmp_path, 2048, "5:cpu,cpuacct:/x\n4:memory:/docker/x\n", files)
    assert available_host_bytes(root) == 1200


@pytest.mark.parametrize(("available", "budget"), [(2 * GIB, int(0.8 * GIB)), (64 * GIB, 4 * GIB)])
def test_the_cache_takes_a_share(monkeypatch, available, budget):
    monkeypatch.setattr(device, "available_host_bytes", lambda: available)
    assert device.CPUDevice().budget(0.9, lambda: None, 0) == pytest.approx(budget, abs=1)


def test_nothing_left_is_said_with_numbers(monkeypatch):
    monkeypatch.setattr(device, "available_host_bytes", lambda: 0)
    with pytest.raises(ConfigError, match=r"0\.00 GiB"):
        device.CPUDevice().budget(0.9, lambda: None, 0)
