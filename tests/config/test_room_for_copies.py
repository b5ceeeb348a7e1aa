"""Whether quantized matrices have copies: the rule, and how many numbers they have, as an engine finds it and files tell it."""

import pytest
import torch

from quantized_checkpoints import SCHEMES, write
from quire.config.dequantized_copies import MEMORY_SHARE, RESERVE_SHARE, DequantizedCopies, copied_values, estimate_copied
from quire.config.devices import KEEPS
from quire.config.facts import read_facts
from quire.files.resolve import resolve_model
from quire.files.safetensors import read_header
from quire.load.load import load_weights
from quire.models.registry import build_model
from quire.prepare.quantize import count_copied

GIB = 1 << 30
MATRICES = 245_760  # numbers of the tiny Llama's, which most schemes quantize
COPIED = {  # scheme: numbers
    **dict.fromkeys(("awq", "awq-channel", "gptq", "gptq-asymmetric", "gptq-act-order", "gptq-v2", "gptq-8"), MATRICES),
    **dict.fromkeys(("ct-int4", "ct-int4-asymmetric", "ct-int4-act-order", "ct-int8"), MATRICES),
    **dict.fromkeys(("ct-nvfp4", "ct-mxfp4", "ct-mxfp8", "modelopt-nvfp4"), MATRICES),
    "gptq-head": MATRICES + 320 * 128,
    **dict.fromkeys(("awq-moe", "ct-int4-moe", "modelopt-nvfp4-moe"), 2 * 128 * (128 + 64)),
}


@pytest.mark.parametrize(
    ("wanted", "usable", "held", "needed", "fit", "asked"),
    [
        (13 * GIB, 128 * GIB, 8 * GIB, 3 * GIB, True, True),
        (16 * GIB, 128 * GIB, 8 * GIB, 3 * GIB, True, True),  # just the share
        (16 * GIB + 1, 128 * GIB, 8 * GIB, 3 * GIB, False, True),
        (13 * GIB, 73 * GIB, 6 * GIB, 3 * GIB, False, True),
        (4 * GIB, 64 * GIB, 50 * GIB, 6 * GIB, True, True),  # 8 are left: 4, and 4 of cache
        (4 * GIB, 64 * GIB, 50 * GIB, 6 * GIB + 1, False, False),
        (GIB, 64 * GIB, 50 * GIB, 9 * GIB, True, True),  # 5 are left: 1, and a sixteenth
        (GIB, 64 * GIB, 50 * GIB, 9 * GIB + 1, False, False),
        (GIB, 64 * GIB, 70 * GIB, 0, False, False),
        (1, 16, 0, 14, True, True),
        (1, 7, 0, 0, False, True),
        (3, 0, 0, 0, False, False),
    ],
)
def test_the_rule(wanted, usable, held, needed, fit, asked):
    found = DequantizedCopies(wanted, usable, held, needed)
    assert found.fit is fit and DequantizedCopies(wanted, usable, held, needed, requested=True).fit is asked
    if not fit:
        assert ("more than 1/8" in found.reason) is (wanted > usable // 8)


def test_whoever_starts_without_them_starts_with_them():
    for wanted in (1, 5, 100, 1000, 4096):
        for held in range(0, 70_000, 997):
            for needed in (0, 13, 9_000, 30_000):
                for asked in (False, True):
                    one = DequantizedCopies(wanted, 65_536, held, needed, asked)
                    rest = 65_536 - held - wanted
                    assert not one.fit or rest >= needed + max(wanted, 65_536 // RESERVE_SHARE)
                    assert asked or not one.fit or wanted * MEMORY_SHARE <= 65_536


@pytest.fixture(scope="module", params=SCHEMES)
def loaded(request, tmp_path_factory):
    """A model as a GPU holds it, on a CPU."""
    pytest.importorskip("triton")
    from quire.layers.quant.stored import HeldHead, HeldLinear
    from quire.ops.packed import pack

    facts = read_facts(resolve_model(write(request.param, tmp_path_factory.mktemp("checkpoint"))))
    model = build_model(facts)
    keeps = KEEPS["cuda"]
    load_weights(model, facts, device="cpu", dtype="float16", quantization=facts.quantization, keeps=keeps)
    for module in model.modules():
        method = getattr(module, "method", None)
        if isinstance(method, HeldLinear | HeldHead):
            method.matrix = pack(method.matrix)
    return request.param, facts, model


def test_files_tell_what_an_engine_finds(loaded):
    scheme, facts, model = loaded
    infos = {name: info for path in facts.files.weights for name, info in read_header(path).items()}
    found = count_copied(model, torch.float16)
    counted = copied_values(infos, facts.quantization, KEEPS["cuda"])
    if scheme == "ct-several":  # parts of a matrix in several forms
        assert counted > found > 0
    else:
        assert counted == found == COPIED.get(scheme, 0)
    assert count_copied(model, torch.float32) == 0
    if scheme not in ("ct-several", "gptq-head") and not scheme.endswith("-moe"):
        assert estimate_copied(MATRICES, facts.quantization, KEEPS["cuda"]) == found
