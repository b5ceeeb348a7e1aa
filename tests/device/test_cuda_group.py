"""Collectives of ranks on GPUs, where no GPU is needed to see them."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from quire.device.cuda import nccl, one_shot
from quire.device.cuda.group import Choice, choose
from quire.dist.mesh import Position
from quire.proc.spawn import environment
from quire.types.errors import ConfigError, EngineDead, EngineError

RANKS = Path(__file__).with_name("played_ranks.py")


@pytest.mark.parametrize(("ranks", "what"), [
    (4, "shared"), (3, "peers"), (3, "no-peers"), (2, "silent"), (3, "nodes"), (3, "unheard"), (3, "dies")
])  # fmt: skip
def test_all_ranks_make_the_same_calls_and_get_the_sums_in_rank_order(ranks, what):
    """Every choice of collectives, with the kernel in Triton's interpreter and gloo in place of NCCL."""
    settings = {**(environment() or os.environ), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(RANKS), str(ranks), what]
    ran = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr


def test_the_kernel_compiles_for_gpus_and_orders_memory_of_all_gpus():
    """A flag is written with release and read with acquire at the scope of the system; data move in vectors."""
    settings = {**(environment() or os.environ)}
    settings.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(Path(__file__).with_name("compiled_one_shot.py"))]
    ran = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    for variant, operations in json.loads(ran.stdout.splitlines()[-1]).items():
        ranks = int(variant.split()[1])
        flags = [word for word in operations if ".sys." in word]
        assert sum("release" in word for word in flags) == sum("acquire" in word for word in flags) == ranks - 1, variant
        data = [word for word in operations if word.startswith(("ld.global", "st.global")) and ".b64" not in word]
        assert data and all(".v4.b32" in word for word in data), variant
        written, announced = operations.index("st.global.v4.b32"), operations.index(flags[0])
        assert "bar.sync" in operations[written:announced], variant


def test_ranks_that_share_a_gpu_go_through_the_host_unless_asked():
    assert choose("auto", shared=True, nodes=False) == choose("host", shared=False, nodes=False) == Choice(host=True)
    assert choose("symmetric", shared=True, nodes=False) == Choice(one_shot=True, records=True)


def test_ranks_with_a_gpu_each_use_device_collectives():
    both = Choice(one_shot=True, nccl=True, records=True)
    assert choose("auto", shared=False, nodes=False) == choose("symmetric", shared=False, nodes=False) == both
    assert (
        choose("nccl", shared=False, nodes=False) == choose("auto", shared=False, nodes=True) == Choice(nccl=True, records=True)
    )


def test_nccl_that_cannot_connect_is_named_with_its_rank(monkeypatch):
    def fail(store, position):
        raise RuntimeError("NCCL error in: NCCLUtils.cpp:77, remote process exited\nncclRemoteError: ...")

    monkeypatch.setattr(nccl, "make_nccl", fail)
    monkeypatch.setattr(nccl, "CAUSE_TIMEOUT_S", 0.0)
    with pytest.raises(EngineError, match=r"cannot connect rank 0 to the others: NCCL error in: .* exited\. Set NCCL_SOCKET"):
        nccl.NCCL(Position(0, 1), lambda message: [message], nccl.LOOPBACK, torch.device("cpu"), lambda seconds: None)


def test_an_error_of_nccl_that_a_lost_rank_caused_names_the_rank(monkeypatch):
    def fail(store, position):
        raise RuntimeError("NCCL error in: NCCLUtils.cpp:77, remote process exited")

    checked = []

    def check(seconds):
        checked.append(seconds)
        if len(checked) > 2:  # its end is seen a little later
            raise EngineDead("rank 1 (process 4711) ended with signal SIGKILL")

    monkeypatch.setattr(nccl, "make_nccl", fail)
    with pytest.raises(EngineDead, match="rank 1"):
        nccl.NCCL(Position(0, 1), lambda message: [message], nccl.LOOPBACK, torch.device("cpu"), check)


def test_a_lost_rank_is_not_taken_for_an_error_of_nccl():
    def lost(message):
        raise EngineDead("rank 1 (process 4711) ended with signal SIGKILL")

    with pytest.raises(EngineDead, match="rank 1"):
        nccl.NCCL(Position(0, 2), lost, nccl.LOOPBACK, torch.device("cpu"), lambda seconds: None)


def test_kernels_of_a_first_all_reduce_that_hangs_have_ended_when_memory_is_unmapped(monkeypatch):
    order, released = [], []

    class Links:
        device = torch.device("cpu")

        def share(self, size):
            return torch.zeros(size, dtype=torch.uint8), b"own"

        def open(self, handle, size):
            return torch.full((size,), 2, dtype=torch.uint8)

        def event(self, shared=False):
            return SimpleNamespace(record=lambda stream: None, query=lambda: bool(released))

        def stream(self):
            return None

        def current(self):
            return SimpleNamespace(synchronize=lambda: None)

        def on(self, stream):
            released.append("flags are set")
            return contextlib.nullcontext()

        def close(self, memory):
            order.append("unmap" if released else "unmap below a kernel")

        def free(self, memory):
            order.append("free")

    def everyone(message):
        order.append("everyone")
        return [message, b"other" if len(order) == 1 else b""]

    monkeypatch.setattr(one_shot, "PROBE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(one_shot, "one_shot", lambda *arguments: None)
    problem = one_shot.OneShot(Position(0, 2), Links()).open(everyone)
    assert problem == "rank 0: a first all-reduce did not end within 0 s"
    assert order == ["everyone", "everyone", "everyone", "unmap", "everyone", "free"]


def test_torch_does_not_end_the_process_for_an_error_of_nccl(monkeypatch):
    """The process group reads its variables when it is made; what the user set stays."""
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "1")
    before, seen = dict(os.environ), {}

    class Made:
        Options = SimpleNamespace

        def __init__(self, *args):
            seen.update(os.environ)

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Made, raising=False)
    nccl.make_nccl(None, Position(0, 2))
    assert seen == {**nccl.WATCHDOG, **before} and seen["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert dict(os.environ) == before


def test_nothing_waits_for_the_lock_of_an_aborted_group(monkeypatch):
    """torch's abort returns when no CUDA graph is left, and holds the lock that its collectives take."""
    lock, freed = threading.Lock(), threading.Event()

    class Ranks:
        def alltoall_base(self, output, part, *sizes):
            with lock:
                output.copy_(part)
            return self

        def _allgather_base(self, output, part):
            with lock:
                output.copy_(part)
            return self

        def wait(self):
            pass

        def abort(self):
            with lock:
                freed.wait()

    monkeypatch.setattr(nccl, "make_nccl", lambda store, position: Ranks())
    ranks = nccl.NCCL(Position(0, 1), lambda message: [message], nccl.LOOPBACK, torch.device("cpu"), lambda seconds: None)
    part = torch.arange(4.0)
    assert torch.equal(ranks.add(part), part)
    ranks.abort()
    try:
        for collective in (ranks.add, ranks.gather):
            with pytest.raises(EngineError, match="NCCL was aborted"):
                collective(part)
    finally:
        freed.set()
    ranks.close()


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (("ring", False, False), "must be one of auto, symmetric, nccl, host; got ring"),
        (("nccl", True, False), "NCCL requires a GPU for each rank"),
        (("auto", True, True), "NCCL requires a GPU for each rank"),
        (("symmetric", False, True), "is not supported with ranks on several nodes"),
        (("auto", False, False, False), "require NCCL, which this torch does not have"),
    ],
)
def test_choices_that_cannot_work(given, error):
    with pytest.raises(ConfigError, match=error):
        choose(*given)
