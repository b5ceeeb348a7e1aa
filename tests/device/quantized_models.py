"""Models of blocks, before a device has compiled them."""

from quire.device.cpu.prepare import multiply_by_layer, pack_blocks
from quire.load.load import load_weights
from quire.models.registry import build_model


def loaded(facts, keep_quantized=True):
    model = build_model(facts)
    load_weights(model, facts, device="cpu", dtype="float32", keep_quantized=keep_quantized)
    pack_blocks(model.lm_head)
    return model


def layered(facts):
    model = loaded(facts, True)
    multiply_by_layer(model)
    return model
