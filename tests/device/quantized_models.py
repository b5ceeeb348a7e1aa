"""Models of blocks, before a device has compiled them; and whether OpenVINO can run them on this CPU."""

from functools import cache

import pytest
import torch

from quire.device.cpu.autotune import find_problem
from quire.device.cpu.graph import Runtime
from quire.device.cpu.openvino import MAX_TOKENS, Network
from quire.device.cpu.prepare import multiply_by_layer, pack_blocks
from quire.load.load import load_weights
from quire.models.registry import build_model


def loaded(facts, keep_quantized=True):
    model = build_model(facts)
    load_weights(model, facts, device="cpu", dtype="float32", keep_quantized=keep_quantized)
    pack_blocks(model.lm_head)
    return model


@cache
def openvino_is_right():
    """With any number of tokens per run."""
    before = Network.max_tokens
    with torch.random.fork_rng():
        torch.manual_seed(0)
        try:
            return not find_problem(MAX_TOKENS)
        finally:
            Network.max_tokens = before


def skip_if_wrong(runtime):
    """Skip a test of OpenVINO on a CPU where its products of many tokens are wrong. Quire runs few tokens at a time there."""
    if runtime is Runtime.OPENVINO and not openvino_is_right():
        pytest.skip("OpenVINO's products of quantized weights are wrong on this CPU")


def layered(facts):
    model = loaded(facts, True)
    multiply_by_layer(model)
    return model
