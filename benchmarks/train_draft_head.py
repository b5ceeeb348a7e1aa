"""Trains a head that drafts for a model, EAGLE-3 or Medusa, and writes it in its published layout.

    python benchmarks/train_draft_head.py MODEL OUT texts.txt --method eagle3 --steps 2000

The head learns what the model itself says: every text is continued by the model, greedily, and the head is taught to guess
the next tokens of the result from the model's states. What is written is read by

    quire serve MODEL --speculative-config '{"model": "OUT", "num_speculative_tokens": 3}'

It is a small trainer for small models: plain torch, on one device, all states in memory.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

PASSES = 3  # how far ahead an EAGLE-3 head is trained on what it gave itself


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class Attention(nn.Module):
    def __init__(self, inputs: int, size: int, heads: int, theta: float) -> None:
        super().__init__()
        self.heads, self.head_dim, self.theta = heads, size // heads, theta
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(self, name, nn.Linear(inputs, size, bias=False))
        self.o_proj = nn.Linear(size, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length = x.shape[:2]
        q, k, v = (p(x).view(batch, length, self.heads, -1).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        turn = torch.arange(length)[:, None] / self.theta ** (torch.arange(0, self.head_dim, 2) / self.head_dim)
        cos, sin = torch.cat((turn, turn), -1).cos(), torch.cat((turn, turn), -1).sin()

        def rotate(h: Tensor) -> Tensor:
            left, right = h.chunk(2, -1)
            return h * cos + torch.cat((-right, left), -1) * sin

        out = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class Layer(nn.Module):
    """Attends over the next token's embedding beside the state; the residual stream is the state."""

    def __init__(self, size: int, inner: int, heads: int, theta: float, eps: float) -> None:
        super().__init__()
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (Norm(size, eps) for _ in range(3))
        self.self_attn = Attention(2 * size, size, heads, theta)
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(size, inner, bias=False),
                "up_proj": nn.Linear(size, inner, bias=False),
                "down_proj": nn.Linear(inner, size, bias=False),
            }
        )

    def forward(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        x = torch.cat((self.input_layernorm(embedded), self.hidden_norm(hidden)), -1)
        hidden = hidden + self.self_attn(x)
        x = self.post_attention_layernorm(hidden)
        return hidden + self.mlp["down_proj"](F.silu(self.mlp["gate_proj"](x)) * self.mlp["up_proj"](x))


class Eagle3(nn.Module):
    def __init__(self, size: int, inner: int, heads: int, vocabulary: int, taps: int, theta: float, eps: float) -> None:
        super().__init__()
        self.fc = nn.Linear(taps * size, size, bias=False)
        self.midlayer = Layer(size, inner, heads, theta, eps)
        self.norm, self.lm_head = Norm(size, eps), nn.Linear(size, vocabulary, bias=False)


class Said:
    """What the model says to some texts: tokens [B, T], its embeddings of them, and its states behind each layer."""

    def __init__(self, model: nn.Module, prompts: list[list[int]], tokens: int) -> None:
        rows = [list(prompt) for prompt in prompts]
        length = max(map(len, rows)) + tokens
        with torch.no_grad():
            for row in rows:
                cache, news = None, row
                while len(row) < length:  # greedily, whatever comes
                    out = model(torch.tensor([news]), past_key_values=cache, use_cache=True)
                    cache, news = out.past_key_values, [int(out.logits[0, -1].argmax())]
                    row += news
            self.ids = torch.tensor(rows)
            self.embedded = model.get_input_embeddings()(self.ids)
            states = model(self.ids, output_hidden_states=True).hidden_states
        self.states = [state.float() for state in states]  # [0]: the embeddings; the last has had its norm


def train_eagle3(model: nn.Module, prompts: list[list[int]], out: Path, *, tokens: int, steps: int, taps: list[int]) -> float:
    """-> how often the first guess is right, of what it was trained on."""
    config, said = model.config, Said(model, prompts, tokens)
    size, eps = config.hidden_size, config.rms_norm_eps
    theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta") or getattr(config, "rope_theta", 10000.0)
    words = said.ids.unique()  # its vocabulary: d2t says by how much each of them is further on in the model's
    heads = config.num_attention_heads
    head = Eagle3(size, config.intermediate_size, heads, len(words), len(taps), theta, eps)
    place = torch.full((config.vocab_size,), -1).index_copy(0, words, torch.arange(len(words)))
    optimizer = torch.optim.AdamW(head.parameters(), 5e-3, weight_decay=0.0)
    states = torch.cat([said.states[tap] for tap in taps], -1)[:, :-2]
    embedded, wanted = said.embedded[:, 1:-1], place[said.ids[:, 2:]]
    right = 0.0
    for _ in range(steps):
        hidden, loss = head.fc(states), torch.zeros(())
        for ahead in range(PASSES):
            hidden = head.midlayer(embedded, hidden)
            logits = head.lm_head(head.norm(hidden))
            loss = loss + F.cross_entropy(logits[:, ahead:].flatten(0, 1), wanted[:, ahead:].flatten())
            right = right if ahead else (logits.argmax(-1) == wanted).float().mean().item()
            hidden = torch.cat((hidden[:, :1], hidden[:, :-1]), 1)  # what it gave at the position before
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    words_of_model = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, words, True)
    tensors = {**head.state_dict(), "d2t": words - torch.arange(len(words)), "t2d": words_of_model}
    options = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "hidden_size": size,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "silu",
        "rms_norm_eps": eps,
        "rope_theta": theta,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": len(words),
        "max_position_embeddings": config.max_position_embeddings,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": taps, "use_aux_hidden_state": True},
    }
    write(out, tensors, options)
    return right


def train_medusa(model: nn.Module, prompts: list[list[int]], out: Path, *, tokens: int, steps: int, heads: int) -> float:
    """-> how often the first head is right, of what it was trained on."""
    said = Said(model, prompts, tokens)
    size, vocabulary = model.config.hidden_size, model.config.vocab_size
    blocks = nn.ModuleList(
        nn.ModuleList((nn.Linear(size, size), nn.Linear(size, vocabulary, bias=False))) for _ in range(heads)
    )
    for block in blocks:
        nn.init.zeros_(block[0].weight)
        block[1].weight.data.copy_(model.get_output_embeddings().weight)
    optimizer = torch.optim.AdamW(blocks.parameters(), 1e-2, weight_decay=0.0)
    last, right = said.states[-1], 0.0
    for _ in range(steps):
        loss = torch.zeros(())
        for ahead, (inner, lm_head) in enumerate(blocks):
            x = last[:, : -2 - ahead]
            logits, wanted = lm_head(x + F.silu(inner(x))), said.ids[:, 2 + ahead :]
            loss = loss + F.cross_entropy(logits.flatten(0, 1), wanted.flatten())
            right = right if ahead else (logits.argmax(-1) == wanted).float().mean().item()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    tensors = {}
    for i, (inner, lm_head) in enumerate(blocks):
        tensors |= {f"{i}.0.linear.weight": inner.weight, f"{i}.0.linear.bias": inner.bias, f"{i}.1.weight": lm_head.weight}
    write(out, tensors, {"model_type": "medusa", "medusa_num_heads": heads, "medusa_num_layers": 1, "hidden_size": size})
    return right


def write(out: Path, tensors: dict[str, Tensor], config: dict[str, object]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(config))


def main() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("texts", type=Path, help="a text per line, which the model continues")
    parser.add_argument("--method", choices=["eagle3", "medusa"], default="eagle3")
    parser.add_argument("--tokens", type=int, default=64, help="that it adds to each")
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(options.model, torch_dtype=torch.float32).eval()
    tokenizer, count = AutoTokenizer.from_pretrained(options.model), model.config.num_hidden_layers
    prompts = [tokenizer(line).input_ids for line in options.texts.read_text().splitlines() if line.strip()]
    if options.method == "medusa":
        right = train_medusa(model, prompts, options.out, tokens=options.tokens, steps=options.steps, heads=4)
    else:
        taps = [min(2, count - 1), count // 2, max(0, count - 3)]
        right = train_eagle3(model, prompts, options.out, tokens=options.tokens, steps=options.steps, taps=taps)
    print(f"{right:.0%} of the first guesses are right, of what it was trained on")


if __name__ == "__main__":
    main()
