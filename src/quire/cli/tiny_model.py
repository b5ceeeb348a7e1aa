"""A tiny model with random weights, written to a directory: enough to start every rank and to compare tokens."""

import json
from pathlib import Path

import numpy as np

VOCABULARY, HEAD_SIZE, HEADS, LAYERS = 512, 32, 8, 2
LONGEST = 512
SPREAD = 0.2  # of weights: such that the tokens differ from position to position


def write_tiny_model(directory: Path, ranks: int, stages: int) -> str:
    """Write a model that this many ranks and stages can share. The same everywhere: machines compare its weights."""
    heads, layers = max(HEADS, ranks), max(LAYERS, stages)
    hidden = heads * HEAD_SIZE
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": hidden,
        "intermediate_size": 2 * hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": heads, "max_position_embeddings": LONGEST, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "tie_word_embeddings": False, "rope_theta": 10000.0, "torch_dtype": "float32",
        "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    square, up, down = (hidden, hidden), (2 * hidden, hidden), (hidden, 2 * hidden)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, hidden), "lm_head.weight": (VOCABULARY, hidden),
        "model.norm.weight": (hidden,),
    }  # fmt: skip
    for layer in range(layers):
        sizes = {
            "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,), "mlp.gate_proj": up, "mlp.up_proj": up,
            "mlp.down_proj": down, **{f"self_attn.{name}_proj": square for name in "qkvo"},
        }  # fmt: skip
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in sizes.items()}
    write_safetensors(directory / "model.safetensors", shapes)
    return str(directory)


def write_safetensors(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Write random float32 tensors of these shapes; vectors are ones."""
    rng = np.random.default_rng(0)
    header, at, values = dict[str, object](), 0, list[bytes]()
    for name, shape in shapes.items():
        array = np.ones(shape) if len(shape) == 1 else SPREAD * rng.standard_normal(shape)
        values.append(array.astype("<f4").tobytes())
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + len(values[-1])]}
        at += len(values[-1])
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + b"".join(values))
