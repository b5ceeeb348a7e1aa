"""LoRA adapters in PEFT's files, written by hand or by PEFT, and a LoRACache that reads them."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from quire.features.lora.cache import LoRACache
from quire.features.lora.packing import adapt
from quire.load.load import load_weights
from quire.models.registry import build_model
from quire.types.adapter import AdapterRef

IDS = [5 + i * 7 % 300 for i in range(21)]
KINDS = {  # name -> rank, whether it is rsLoRA, and what it adds to
    "all": (2, False, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")),
    "some": (3, True, ("self_attn.v_proj", "mlp.up_proj")),
}
Q_PROJ = "base_model.model.model.layers.1.self_attn.q_proj"


def write_adapter(directory: Path, tensors: dict[str, torch.Tensor], **config) -> str:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4} | config))
    save_file({name: values.contiguous() for name, values in tensors.items()}, directory / "adapter_model.safetensors")
    return str(directory)


def halves(module: str, outputs: int, inputs: int, rank: int = 2, seed: int = 0) -> dict[str, torch.Tensor]:
    dice = torch.Generator().manual_seed(seed)
    down, up = torch.randn(rank, inputs, generator=dice), torch.randn(outputs, rank, generator=dice)
    return {f"{module}.lora_A.weight": down * 0.3, f"{module}.lora_B.weight": up * 0.3}


def write_with_peft(reference, directory: Path, seed: int, **config):
    """`reference` is transformers' model, which becomes PEFT's with random numbers in it; it is what is written."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(reference, LoraConfig(task_type="CAUSAL_LM", **config)).eval()
    dice = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, values in model.named_parameters():
            noise = torch.randn(values.shape, generator=dice)
            if "lora_magnitude" in name:
                values.mul_(1 + 0.2 * noise)
            elif "lora_" in name:
                values.copy_(0.2 * noise)
            elif "trainable_tokens_delta" in name:
                values.add_(0.5 * noise)
            elif "modules_to_save" in name or (values.requires_grad and name.endswith("bias")):
                values.add_(0.1 * noise)
    model.save_pretrained(directory)
    return model


def open_cache(case, max_rank: int = 16, room: int = 2):
    """A checkpoint's model in float32 with banks, and its LoRACache."""
    model = build_model(case.facts)
    adapters = adapt(model, device=torch.device("cpu"), dtype=torch.float32)
    load_weights(model, case.facts, device="cpu", dtype="float32")
    return model, LoRACache(adapters, model, room, max_rank)


def put(cache: LoRACache, path, slot: int) -> None:
    ref = AdapterRef(slot, f"{path}", str(path))
    cache.read(ref)
    cache.put(ref, slot)


def merge(model, directory, rank, rslora, modules):
    """Writes an adapter, and adds what it adds to the model."""
    tensors = {}
    for i, module in enumerate(f"model.layers.{layer}.{name}" for layer in (0, 1) for name in modules):
        matrix = model.get_submodule(module).weight.data
        named = halves(f"base_model.model.{module}", *matrix.shape, rank, seed=i)
        down, up = named.values()
        matrix += up @ down * (8 / (rank**0.5 if rslora else rank))
        tensors |= named
    targets = [name.rpartition(".")[2] for name in modules]
    return write_adapter(directory, tensors, r=rank, lora_alpha=8, use_rslora=rslora, target_modules=targets)
