"""numa_bind: every rank runs on the CPUs of one NUMA node."""

import os

import pytest

from quire import LLM
from quire.config.args import EngineArgs
from quire.engine.numa import bind_process, read_cpus
from quire.types.errors import ConfigError


@pytest.fixture
def bound(monkeypatch):
    """The CPUs that this process was bound to, without being bound."""
    calls = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: calls.append(cpus))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return calls


@pytest.fixture
def machine(tmp_path):
    """Two nodes of four CPUs, and a GPU at each; a node without CPUs."""
    (tmp_path / "sys/devices/system/node/node2").mkdir(parents=True)
    (tmp_path / "sys/devices/system/node/node2/cpulist").write_text("\n")
    for node, cpus in enumerate(("0-3", "4-7")):
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
        address = f"0000:{node}1:00.0"
        (tmp_path / "proc/driver/nvidia/gpus" / address).mkdir(parents=True)
        (tmp_path / "sys/bus/pci/devices" / address).mkdir(parents=True)
        (tmp_path / "sys/bus/pci/devices" / address / "numa_node").write_text(f"{1 - node}\n")
    return tmp_path


def test_an_engine_binds_itself(tiny_model, bound):
    llm = LLM(str(tiny_model), device="cpu", kv_cache_memory_bytes=1 << 20, numa_bind=True, numa_bind_cpus=["0"])
    llm.llm_engine.shutdown()
    assert bound == [{0}]


def test_ranks_take_nodes_by_turns_by_gpu_or_as_given(machine, bound):
    def cpus(rank, engine=0, **args):
        bind_process(EngineArgs(numa_bind=True, **args), engine, rank, machine)
        return bound[-1]

    assert [cpus(rank, device="cpu", tensor_parallel_size=2) for rank in (None, 1)] == [{0, 1, 2, 3}, {4, 5, 6, 7}]
    assert [cpus(rank, device="cuda", tensor_parallel_size=2) for rank in (None, 1)] == [{4, 5, 6, 7}, {0, 1, 2, 3}]
    assert cpus(1, tensor_parallel_size=2, numa_bind_nodes=["0", "0"]) == {0, 1, 2, 3}
    assert cpus(None, 1, device="cpu", data_parallel_size=2) == {4, 5, 6, 7}
    told = bind_process(
        EngineArgs(numa_bind=True, data_parallel_size=2, tensor_parallel_size=2, numa_bind_cpus=["0", "1", "2", "3-5"]), 1, None
    )
    assert bound[-1] == {2} and told.numa_bind_cpus == ["2", "3,4,5"], "the other ranks of the second engine"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"numa_bind_nodes": ["7"]}, "numa_bind_nodes must be NUMA nodes that have CPUs; got '7'"),
        ({"numa_bind_nodes": ["2"]}, "numa_bind_nodes must be NUMA nodes that have CPUs; got '2'"),
        ({"numa_bind_nodes": []}, "numa_bind_nodes must have a value for every rank"),
        ({"numa_bind_cpus": ["a-b"]}, "numa_bind_cpus must be lists of CPUs such as 0-3,8; got 'a-b'"),
    ],
)
def test_what_cannot_be_bound_is_refused(machine, bound, args, message):
    with pytest.raises(ConfigError, match=message):
        bind_process(EngineArgs(numa_bind=True, **args), 0, None, machine)
    assert not bound


def test_cpu_lists():
    assert read_cpus("0-2,8\n") == {0, 1, 2, 8} and read_cpus("5") == {5}
