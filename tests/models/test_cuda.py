"""The same model on a GPU."""

import pytest
import torch
from test_registry import facts

from oracle import Sequences
from quire.load.load import load_weights
from quire.models.registry import build_model

pytestmark = pytest.mark.gpu


def logits(device, dtype, window):
    from quire.types.cache import LayerCache

    hf = {"num_attention_heads": 6, "intermediate_size": 64, "hidden_act": "silu"}
    shape = facts(hf=hf, hidden_size=96, vocab_size=99, max_position=64, layers=(LayerCache(2, 16), LayerCache(2, 16, window)))
    model = build_model(shape)
    load_weights(model, shape, device="cpu", dtype="float32", load_format="dummy", seed=3)
    for parameter in model.parameters():
        parameter.mul_(10.0)  # logits of a size worth comparing
    weights = {name: value.clone() for name, value in model.named_parameters()}
    if device != "cpu":
        model = build_model(shape)
        load_weights(model, shape, device=device, dtype=dtype, load_format="dummy")
        for name, value in model.named_parameters():
            value.copy_(weights[name])
    run = Sequences(model, 3, 48, device=device)
    tokens = torch.randint(0, 99, (3, 48), generator=torch.Generator().manual_seed(1)).tolist()
    out = run.step([(0, tokens[0][:40]), (1, tokens[1][:11])])
    out += run.step([(0, tokens[0][40:41]), (1, tokens[1][11:12]), (2, tokens[2][:9])])
    out += run.step([(row, tokens[row][41:42]) for row in (2, 0, 1)])
    return torch.cat(out).cpu()


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-3), ("bfloat16", 0.15)])
def test_logits_are_those_of_the_cpu(dtype, tolerance):
    expected = logits("cpu", "float32", 5)
    torch.testing.assert_close(logits("cuda", dtype, 5), expected, atol=tolerance * expected.abs().max().item(), rtol=0)
