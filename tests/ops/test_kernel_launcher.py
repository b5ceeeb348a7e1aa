"""Launches that go past Triton's own call: when they may, and that they do what it would."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton._C import libtriton
from triton.backends.compiler import BaseBackend

from quire.ops.kernels import launcher
from quire.ops.kernels.launcher import LAUNCHER_FORMAT, VARIANTS, Launched, kind_of, launched


@triton.jit
def _shift(x, out, size, by, factor, BLOCK: tl.constexpr):  # noqa: N803
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < size, other=0) * factor + by, mask=at < size)


def test_kinds_are_at_least_as_fine_as_tritons():
    specialize = getattr(libtriton, "native_specialize_impl", None)
    if specialize is None:
        pytest.skip("this Triton specializes elsewhere")
    numbers = [0, 1, 2, 15, 16, 17, 32, -1, -16, 2**31 - 1, 2**31, 2**31 - 16, -(2**31), -(2**31) - 16, 2**40, 2**40 + 1, 2**63]
    numbers += [0.0, 1.0, 1.5, True, False, None]
    told = {}
    for number in numbers:
        told.setdefault(kind_of(number), set()).add(specialize(BaseBackend, number, False, True, True))
    assert all(len(each) == 1 for each in told.values()), told
    assert len(told) <= 12


class Compiler:
    """Stands in for a kernel that Triton compiled: notes what it was launched with, one way or the other."""

    __name__ = "pretended"

    def __init__(self):
        self.params = [SimpleNamespace(is_constexpr=constant) for constant in (False, False, False, True, True)]
        self.usual, self.direct = [], []
        self.run = SimpleNamespace(
            launch=lambda *given: self.direct.append(given), num_ctas=1, global_scratch_size=0, profile_scratch_size=0,
            launch_cooperative_grid=False, launch_pdl=True,
        )  # fmt: skip
        self.packed_metadata, self.function = (4, 1, 0), 77

    def __getitem__(self, grid):
        return lambda *given, **options: self.usual.append((grid, given, options)) or self


@pytest.fixture
def pretended(monkeypatch):
    driver = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 5)
    monkeypatch.setattr(launcher, "driver", SimpleNamespace(active=driver))
    monkeypatch.setattr("triton.backends.nvidia.driver._BASE_ARGS_FORMAT", LAUNCHER_FORMAT, raising=False)
    return Compiler()


def aligned(*shape, dtype=torch.float32):
    return torch.zeros(*shape, dtype=dtype)


def test_the_second_launch_of_a_kind_is_direct(pretended):
    kernel, x, y = Launched(pretended), aligned(8), aligned(8)
    for size in (16, 32, 48):
        kernel[(3, 2)](x, y, size, BLOCK=16, num_warps=4, EARLY=True)
    assert len(pretended.usual) == 1
    metadata = (False, True, None, None, (4, 1, 0), None, None, None)
    assert pretended.direct == [(3, 2, 1, 5, 77, *metadata, x.data_ptr(), y.data_ptr(), size, None, None) for size in (32, 48)]


@pytest.mark.parametrize(
    "change",
    [
        {"size": 17}, {"size": 1}, {"size": 2**40}, {"size": 2.0}, {"x": aligned(8, dtype=torch.float16)},
        {"y": aligned(9)[1:]}, {"BLOCK": 32}, {"num_warps": 8},
    ],
    ids=str,
)  # fmt: skip
def test_what_a_compiled_form_depends_on_is_told_apart(pretended, change):
    kernel = Launched(pretended)
    usual = {"x": aligned(8), "y": aligned(8), "size": 16, "BLOCK": 16, "num_warps": 4}
    for given in (usual, usual | change, usual, usual | change):
        values = dict(given)
        kernel[(1,)](values.pop("x"), values.pop("y"), values.pop("size"), **values)
    assert len(pretended.usual) == 2 and len(pretended.direct) == 2


def test_options_in_another_order_are_not_mistaken(pretended):
    kernel, x = Launched(pretended), aligned(8)
    kernel[(1,)](x, x, 16, FIRST=1, SECOND=2)
    kernel[(1,)](x, x, 16, SECOND=1, FIRST=2)
    assert len(pretended.usual) == 2


@pytest.mark.parametrize("why", ["launcher", "scratch", "listener"])
def test_every_launch_is_tritons_own(pretended, why, monkeypatch):
    if why == "launcher":
        monkeypatch.setattr("triton.backends.nvidia.driver._BASE_ARGS_FORMAT", "iiiKKp")
    if why == "scratch":
        pretended.run.global_scratch_size = 128
    if why == "listener":
        monkeypatch.setattr(launcher, "LISTENERS", ([print], []))
    kernel, x = Launched(pretended), aligned(8)
    for _ in range(3):
        kernel[(1,)](x, x, 16, BLOCK=16)
    assert len(pretended.usual) == 3 and not pretended.direct


@pytest.mark.gpu
def test_direct_launches_compute_the_same():
    kernel = launched(_shift)
    assert isinstance(kernel, Launched)
    memory = torch.arange(1000, dtype=torch.int32, device="cuda")
    for _ in range(3):
        for first in (0, 4, 1, 3):
            for size, by in ((64, 1), (64, 5), (33, 2**33), (1, 16)):
                x, out = memory[first : first + size], torch.zeros(size, dtype=torch.int64, device="cuda")
                kernel[(triton.cdiv(size, 16),)](x, out, size, by, 3, BLOCK=16)
                assert out.tolist() == [3 * value + by for value in range(first, first + size)]


@pytest.mark.gpu
def test_direct_launches_are_what_is_used_here():
    """This Triton's launcher is as known: a kernel of ours compiles once, and later launches never reach Triton's call."""
    from quire.ops.kernels import norm

    x, weight = torch.randn(3, 64, device="cuda"), torch.ones(64, device="cuda")
    first = norm.rms_norm(x, weight, 1e-6, 0.0)
    known = len(norm._rms_norm._variants)
    before = VARIANTS.compilations, VARIANTS.loads
    assert known >= 1
    torch.testing.assert_close(norm.rms_norm(x, weight, 1e-6, 0.0), first)
    assert (VARIANTS.compilations, VARIANTS.loads) == before and len(norm._rms_norm._variants) == known
