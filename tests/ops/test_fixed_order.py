"""The fixed order of GEMMs: a token's bits are the same for every number of rows, in every weight format. GPU only."""

from functools import partial

import pytest
import torch

pytest.importorskip("triton")
from quire.ops import linear, order
from quire.ops.batch_invariance import FORMATS, Case, examine, make_experts, make_weight, multiply, multiply_gated, run_experts
from quire.ops.kernels.linear import FewRowsConfig

pytestmark = pytest.mark.gpu
ROWS = (1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 255, 256, 257, 600, 2048, 2049, 4500)
# inputs and outputs; libraries divide the inputs of the first two among programs, and the last ones fill no tile
SIZES = [(3072, 1024), (14336, 4096), (2048, 6144), (512, 384), (1024, 1152)]


@pytest.fixture(autouse=True)
def fixed_order():
    order.use_order(True)
    yield
    order.use_order(False)


def case(name, inputs, outputs, run=multiply):
    dtype = torch.float16 if name == "fp16" else torch.bfloat16
    return Case("", "", name, lambda: make_weight(name, outputs, inputs), run, inputs, dtype, inputs * outputs)


@pytest.mark.parametrize("run", [multiply, multiply_gated], ids=["plain", "gated"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_bits_do_not_depend_on_the_number_of_rows(inputs, outputs, name, run):
    assert examine(case(name, inputs, outputs, run), ROWS, timed=()).differing == ()


@pytest.mark.parametrize("inputs", [1000, 1024, 40])
@pytest.mark.parametrize("outputs", [1003, 7, 1024])
@pytest.mark.parametrize("run", [multiply, linear.linear_float])
def test_odd_sizes(inputs, outputs, run):
    assert examine(case("bf16", inputs, outputs, run), ROWS, timed=()).differing == ()


@pytest.mark.parametrize(("count", "active"), [(8, 2), (128, 8)])
def test_experts(count, active):
    made = Case("", "experts", "bf16", lambda: make_experts(count, 512, 256),
                     partial(run_experts, active=active), 512, torch.bfloat16, 1)  # fmt: skip
    assert examine(made, ROWS, timed=()).differing == ()


def test_columns_divided_among_programs_would_be_noticed(monkeypatch):
    monkeypatch.setattr(linear, "ordered_few_config", lambda height, device: FewRowsConfig(256, 3, 4))
    found = examine(case("bf16", 3072, 1024), ROWS, timed=())
    assert set(found.differing) >= {n for n in ROWS if 2 <= n <= 16}  # the 16 values of a single row may agree by chance


def test_without_the_fixed_order_bits_differ(monkeypatch):
    monkeypatch.setattr(order, "_fixed", False)
    assert examine(case("bf16", 3072, 1024), ROWS, timed=()).differing
