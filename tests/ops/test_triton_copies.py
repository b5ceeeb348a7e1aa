"""Matrices of few bits with a copy of the model's type beside them: many rows are multiplied by that, few by the packed one."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton")
from test_triton_packed import FORMS, compare, float8, ints, there
from test_triton_packed_six import six

from quantized_checkpoints import write
from quire.config.devices import KEEPS
from quire.config.facts import read_facts
from quire.features.quantization.device import Needs, copy_matrices
from quire.files.resolve import resolve_model
from quire.layers.quant.stored import HeldHead, HeldLinear
from quire.load.load import load_weights
from quire.models.registry import build_model
from quire.ops import quantized
from quire.ops.activation import reference_gated
from quire.ops.packed import PackedMatrix, pack
from quire.ops.quantized import COPIED, can_be_copied, copied, rows_from
from quire.ops.quantized_layouts import Activation
from quire.types.errors import ConfigError

SHORT = [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def made():
    yield from ((name, form) for name, form in FORMS.items() if not name.startswith(("w8a8", "fp8")))
    yield "fp8 whose rows are not rounded", dataclasses.replace(float8(96, 192), activation=Activation.NONE)
    yield "six bits, odd sizes", six(70, 272, 16)
    yield "in another order", dataclasses.replace(ints(4, 48, 128, 32, True), order=torch.randperm(128, dtype=torch.int32))


NOT_ROUNDED = dict(made())


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("name", NOT_ROUNDED)
def test_products(name, dtype, device):
    form = there(NOT_ROUNDED[name], device)
    matrix, floats = pack(form), form.dequantize()
    assert can_be_copied(matrix)
    both = copied(matrix, dtype)
    assert both.copy.shape == (form.outputs, form.inputs) and both.copy.dtype == dtype
    assert both.copied_from == rows_from(matrix) <= 65
    bias = torch.randn(form.outputs, device=device).to(dtype)
    x = (torch.randn(2, both.copied_from, form.inputs, device=device) / floats.norm(dim=1).max()).to(dtype)
    expected = x.float() @ floats.T + bias.float()
    compare(both.multiply(x, bias), expected)
    if form.outputs % 2 == 0:
        compare(both.multiply(x, bias, "silu"), reference_gated(expected.to(dtype), "silu").float())
    wrong = dataclasses.replace(both, copy=torch.full_like(both.copy, torch.nan), copied_from=max(2, both.copied_from))
    few = x[0, :1]  # for which nobody looks at it
    assert torch.equal(wrong.multiply(few, bias), matrix.multiply(few, bias))
    assert wrong.multiply(x, bias).isnan().all()


def test_which_have_none():
    rounded = [name for name in FORMS if name not in NOT_ROUNDED]
    assert rounded and not any(can_be_copied(pack(FORMS[name])) for name in rounded)
    stack = dataclasses.replace(FORMS["int4 of 32"], **{
        name: getattr(FORMS["int4 of 32"], name)[None].repeat(2, 1, 1) for name in ("numbers", "scale")
    })  # fmt: skip
    assert not can_be_copied(pack(stack)) and not can_be_copied(FORMS["int4 of 32"]) and not can_be_copied(torch.ones(2, 2))


def test_from_how_many_rows_on(monkeypatch):
    names = {
        "int4 of 32": "int4 in small groups", "int4 of 128, short scales": "int4", "int8 of 32": "int8", "mxfp4": "float4",
        "nvfp4": "float4, scales of 8 bits", "six bits, odd sizes": "int6", "fp8 whose rows are not rounded": "float8",
    }  # fmt: skip
    assert set(names.values()) == set(COPIED)
    for name, kind in names.items():
        matrix = pack(NOT_ROUNDED[name])
        for place, near in enumerate((1.0, 0.5, 0.49)):
            monkeypatch.setattr(quantized, "CACHED_VALUES", near * matrix.outputs * matrix.inputs)
            assert rows_from(matrix) == COPIED[kind][place]
        monkeypatch.undo()


class Card:
    """A device with so much memory."""

    def __init__(self, usable, held):
        self._answer = usable, held

    def held(self, utilization):
        assert utilization == 0.9
        return self._answer


@pytest.fixture
def model(tmp_path, device):
    """As a GPU holds it, wherever it is."""
    facts = read_facts(resolve_model(write("gptq-head", tmp_path)))
    found = build_model(facts)
    load_weights(found, facts, device=device, dtype="float16", quantization=facts.quantization, keeps=KEEPS["cuda"])
    for method in methods(found):
        method.matrix = method.matrix if isinstance(method.matrix, PackedMatrix) else pack(method.matrix)
    return found


def methods(model):
    found = [getattr(module, "method", None) for module in model.modules()]
    return [method for method in found if isinstance(method, HeldLinear | HeldHead)]


NUMBERS = 245_760 + 320 * 128


@pytest.mark.parametrize(
    ("usable", "cache", "asked", "told"),
    [
        (1 << 30, 1 << 20, None, "copies of quantized matrices in float16, for many rows"),
        (1 << 30, 1 << 30, None, "no copies of quantized matrices: they would take 0.55 MiB, and weights"),
        (1 << 20, 1 << 10, None, "no copies of quantized matrices: they would take 0.55 MiB, more than 1/8"),
        (1 << 22, 1 << 10, True, "copies of quantized matrices in float16, for many rows"),
        (0, 0, True, ""),
    ],
)
def test_a_model_has_all_or_none(model, caplog, usable, cache, asked, told):
    caplog.set_level("INFO")
    packed = [method.matrix for method in methods(model)]
    copy_matrices(model, torch.float16, Card(usable, 5), Needs(0.9, cache, 7, asked))
    have = [method.matrix for method in methods(model) if method.matrix.copy is not None]
    if told.startswith("copies"):
        assert len(have) == len(packed) == 9 and sum(matrix.copy.numel() for matrix in have) == NUMBERS
    else:
        assert not have
    assert told in caplog.text if told else not caplog.messages
    copy_matrices(model, torch.float32, Card(1 << 30, 0), Needs(0.9, 0, 0, None))
    assert len(have) == sum(method.matrix.copy is not None for method in methods(model))


def test_copies_of_nothing_that_were_asked_for(caplog):
    copy_matrices(torch.nn.Linear(4, 4), torch.float16, Card(1 << 30, 5), Needs(0.9, 0, 7, True))
    assert "the model has no quantized matrix that can have one" in caplog.text


def test_copies_that_were_asked_for_and_do_not_fit(model):
    with pytest.raises(ConfigError, match="leave dequantized_copies out, or give the engine more memory"):
        copy_matrices(model, torch.float16, Card(1 << 30, 5), Needs(0.9, 1 << 30, 7, True))
