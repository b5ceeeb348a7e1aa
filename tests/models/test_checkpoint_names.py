"""One model, several ways in which its tensors are named in the wild."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from oracle import Sequences
from quire.config.facts import read_facts
from quire.files.resolve import resolve_model
from quire.load.load import load_weights
from quire.models.registry import build_model

IDS = torch.randint(3, 199, (30,), generator=torch.Generator().manual_seed(1)).tolist()


def rewrite(source, target, change_name, extra=(), change_config=dict):
    """A copy of a checkpoint under other names, with tensors that are not to be read."""
    tensors = {change_name(name): tensor for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(tensors | {name: torch.ones(2, 3) for name in extra}, target / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(change_config(config)))


def logits(directory):
    facts = read_facts(resolve_model(directory))
    model = build_model(facts)
    load_weights(model, facts, device="cpu", dtype="float32")
    return Sequences(model, 1, len(IDS)).step([(0, IDS)])[0]


def with_vision(config):
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": config,
        "vision_config": {"hidden_size": 3},
    }


@pytest.mark.parametrize(
    ("text", "vision"),
    [("language_model.model.", ""), ("model.language_model.", "model.")],
    ids=["as published", "as saved by newer transformers"],
)
def test_gemma3_without_its_eyes(checkpoint, tmp_path, text, vision):
    extra = (f"{vision}vision_tower.encoder.layers.0.mlp.fc1.weight", f"{vision}multi_modal_projector.mm_soft_emb_norm.weight")
    plain = checkpoint("gemma3")
    rewrite(plain.directory, tmp_path, lambda name: text + name.removeprefix("model."), extra, with_vision)
    torch.testing.assert_close(logits(tmp_path), plain.expected(IDS), atol=1e-4, rtol=1e-4)


def test_gpt2_without_prefix_and_with_mask_buffers(checkpoint, tmp_path):
    plain = checkpoint("gpt2")
    extra = ("h.0.attn.bias", "h.1.attn.masked_bias")
    rewrite(plain.directory, tmp_path, lambda name: name.removeprefix("transformer."), extra)
    torch.testing.assert_close(logits(tmp_path), plain.expected(IDS), atol=1e-4, rtol=1e-4)


def test_opt_without_prefix(checkpoint, tmp_path):
    plain = checkpoint("opt-norms-after-narrow")
    rewrite(plain.directory, tmp_path, lambda name: name.removeprefix("model."))
    torch.testing.assert_close(logits(tmp_path), plain.expected(IDS), atol=1e-4, rtol=1e-4)


def test_a_tied_head_may_be_stored_again(checkpoint, tmp_path):
    plain = checkpoint("gemma2")
    rewrite(plain.directory, tmp_path, str, ("lm_head.weight",))
    torch.testing.assert_close(logits(tmp_path), plain.expected(IDS), atol=1e-4, rtol=1e-4)
