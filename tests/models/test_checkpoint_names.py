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
from quire.types.errors import ModelError

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


def test_gemma3n_without_eyes_and_ears(checkpoint, tmp_path):
    """Layers that attend to the keys of others have matrices of their own in published files, and nobody reads them."""
    parts = ("vision_tower.timm_model.conv_stem.conv.weight", "embed_audio.embedding.weight", "audio_tower.conformer.0.weight")
    unread = tuple(f"language_model.layers.4.self_attn.{name}.weight" for name in ("k_proj", "v_proj", "k_norm"))
    plain = checkpoint("gemma3n")
    rewrite(
        plain.directory,
        tmp_path,
        lambda name: name.replace("model.", "model.language_model."),
        tuple(f"model.{name}" for name in (*parts, *unread)),
        lambda config: {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n", "text_config": config},
    )
    torch.testing.assert_close(logits(tmp_path), plain.expected(IDS), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe", "qwen3-moe-some-layers"])
def test_experts_in_one_tensor(checkpoint, tmp_path, family, transposed):
    """As newer versions of transformers hold them, and as they are stored the other way round."""
    plain = checkpoint(family)
    tensors = load_file(plain.directory / "model.safetensors")
    fused = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    assert len(fused) < len(tensors)
    parts = {name: tensor for name, tensor in plain.reference.state_dict().items() if ".experts." in name}
    assert {name.rpartition(".")[2] for name in parts} == {"gate_up_proj", "down_proj"}
    fused |= {name: part.transpose(1, 2).contiguous() if transposed else part.clone() for name, part in parts.items()}
    save_file(fused, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((plain.directory / "config.json").read_text())
    torch.testing.assert_close(logits(tmp_path), plain.expected(IDS), atol=1e-4, rtol=1e-4)


def test_experts_in_one_tensor_of_another_shape(checkpoint, tmp_path):
    plain = checkpoint("mixtral")
    tensors = load_file(plain.directory / "model.safetensors")
    fused = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    parts = {name: tensor for name, tensor in plain.reference.state_dict().items() if ".experts." in name}
    save_file(fused | {name: part[:-1].clone() for name, part in parts.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((plain.directory / "config.json").read_text())
    with pytest.raises(ModelError, match=r"misshaped \(6\): model.layers.0.mlp.experts.down_proj is \[4, 48, 80\]"):
        logits(tmp_path)


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
