"""A row of the matrix (tests/e2e/test_matrix.py): a family's tiny checkpoint, what transformers says to the prompts, and the
same checkpoint rewritten: in 4 bits, and with an adapter beside it and within it."""

import functools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

import quantized_checkpoints
from adapters import halves, write_adapter
from family import Family
from oracle import TINY, Checkpoint, make_checkpoint
from quire import LLM
from quire.config.facts import read_facts
from quire.features.lora.packing import adapt
from quire.features.lora.peft_vocab_experts import ONE
from quire.files.resolve import resolve_model
from quire.load.assign import rename
from quire.models.fallback import Fallback
from quire.models.registry import build_model, complete_facts

NEW_TOKENS, BUDGET, PAGE = 16, 16, 4
PENALTY = 1.5  # keeps tiny random models from saying one token for ever
LENGTHS = (33, 5, 18, 30)
# transformers changes the rope factors of a text that grows long; an engine that caches rotated keys cannot
LONG = {"phi3-longrope": (33, 40, 37, 38), "minicpm3": (33, 40, 37, 38)}
# of a checkpoint in 4 bits: inputs of matrices are whole groups of 32
WIDER = {48: 96, 80: 96, 56: 64, 24: 32, 20: 32, 12: 16, 10: 16, 72: 96, 96: 192}
WIDE = ("size", "dim", "d_model", "rank", "inner", "d_ssm")
HEADS = ("mamba_n_heads", "mamba_num_heads", "num_heads")  # of recurrent layers: those twice as wide have twice as many
# heads that are as wide as the model together; convolutions that transformers cuts into three equal parts when it writes them
OTHERWISE = {"helium": {"head_dim": 16}, "olmo-hybrid-still": {"linear_value_head_dim": 12}}
ROUTER = re.compile(r"\.(gate|router|layer)\.weight$")  # which nobody quantizes
LORA_ALPHA, LORA_RANK = 8, 2


@dataclass(frozen=True)
class Processes:
    """How to start an engine of its own, and ranks (tests/forked.py)."""

    engine: tuple[str, ...]
    rank: tuple[str, ...]


class Case:
    def __init__(self, name: str, family: Family, found: Checkpoint, room: Path, processes: Callable[[], Processes]) -> None:
        self.name, self.family, self.room, self._processes = name, family, room, processes
        self.facts, self.directory, self.reference = found.facts, found.directory, found.reference
        self.prompts = [random_ids(n) for n in LONG.get(name, LENGTHS)]

    @property
    def kinds(self) -> set[str]:
        """As `config/conflicts.py` calls them."""
        facts = self.facts
        said = {
            "shared blocks": facts.hf["model_type"] == "zamba2",
            "by transformers": facts.by_transformers,
        }
        return {kind for kind, applies in said.items() if applies}

    @property
    def processes(self) -> Processes:
        return self._processes()

    @functools.cached_property
    def expected(self) -> list[list[int]]:
        return [self._greedy(prompt) for prompt in self.prompts]

    def _greedy(self, prompt: list[int]) -> list[int]:
        # `generate` hands RoBERTa other positions than it has by itself, and leaves out `time_step_min` of Zamba 2 after the
        # prompt; what the whole text gives at once has both
        if self.facts.recomputed or self.facts.hf["model_type"] == "zamba2":
            return self._greedy_without_cache(prompt)
        with torch.inference_mode():
            ids = self.reference.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
                min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS, eos_token_id=None, pad_token_id=0,
                repetition_penalty=PENALTY,
            )  # fmt: skip
        found: list[int] = ids[0, len(prompt) :].tolist()
        return found

    def _greedy_without_cache(self, prompt: list[int]) -> list[int]:
        ids = list(prompt)
        for _ in range(NEW_TOKENS):
            with torch.inference_mode():
                logits = self.reference(torch.tensor([ids]), use_cache=False).logits[0, -1].float()
                known = logits[ids]
                logits[ids] = torch.where(known > 0, known / PENALTY, known * PENALTY)
            ids.append(int(logits.argmax()))
        return ids[len(prompt) :]

    def final_states(self, prompt: list[int]) -> Tensor:
        """Return what transformers' LM head reads, up to a factor. [tokens, hidden_size]"""
        found: list[Tensor] = []
        hook = self.reference.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: found.append(inputs[0][0]))
        with hook, torch.inference_mode():
            self.reference(torch.tensor([prompt]), use_cache=False)
        return found[-1]

    def greedy_among(self, prompt: list[int], allowed: Sequence[int], count: int) -> list[int]:
        """transformers' likeliest tokens where only these are allowed."""
        ids = list(prompt)
        for _ in range(count):
            with torch.inference_mode():
                logits = self.reference(torch.tensor([ids]), use_cache=False).logits[0, -1]
            ids.append(max(allowed, key=lambda token: logits[token].item()))
        return ids[len(prompt) :]

    def settings(self, **options: Any) -> dict[str, Any]:
        defaults = {
            "skip_tokenizer_init": True, "dtype": "float32", "device": "cpu", "block_size": PAGE, "max_num_seqs": 8,
            "max_num_batched_tokens": BUDGET, "kv_cache_memory_bytes": 16 << 20,
        }  # fmt: skip
        if "num_gpu_blocks_override" in options:
            del defaults["kv_cache_memory_bytes"]
        return defaults | options

    def engine(self, directory: Path | None = None, **options: Any) -> LLM:
        return LLM(str(directory or self.directory), **self.settings(**options))

    def with_tokenizer(self) -> dict[str, Any]:
        """Settings: a tokenizer of the tiny vocabulary's size, every token of which is one byte."""
        room = self.room / "tokenizer"
        if not room.exists():
            room.mkdir(parents=True)
            write_tokenizer(room)
        return {"skip_tokenizer_init": False, "tokenizer": str(room)}

    def in_four_bits(self) -> tuple[Path, Path]:
        """-> the family's checkpoint in 4 bits, and the same numbers as floats."""
        wide, quantized, floats = (self.room / self.name / kind for kind in ("wide", "int4", "floats"))
        if not quantized.exists():
            settings = {name: widened(name, value) for name, value in (TINY | self.family.settings).items()}
            settings |= OTHERWISE.get(self.name, {})
            if self.name == "phi3-longrope":  # whose heads are wider, too
                rope = settings["rope_parameters"]
                rope |= {key: rope[key] * 2 for key in ("short_factor", "long_factor")}
            make_checkpoint(replace(self.family, settings=settings), wide)
            write = quantized_checkpoints.packed(4, 32)
            stored, values = dict[str, Tensor](), dict[str, Tensor]()
            matrices = find_matrices(wide)
            for name, weight in load_file(wide / "model.safetensors").items():
                stored[name] = values[name] = weight
                if name in matrices and matrices[name][1] % 32 == 0 and not ROUTER.search(name):
                    across = weight.shape != matrices[name] or is_transposed(self.family)
                    found, value = write(name, weight.t() if across else weight)
                    del stored[name]
                    stored |= {f"{name.removesuffix('.weight')}.{end}": tensor for end, tensor in found.items()}
                    values[name] = value.t() if across else value
            scheme = quantized_checkpoints.SCHEMES["ct-int4"][0] | {"ignore": []}
            scheme = json.loads(json.dumps(scheme).replace('"group_size": 64', '"group_size": 32'))
            write_checkpoint(quantized, wide, stored, quantization_config=scheme)
            write_checkpoint(floats, wide, values)
        return quantized, floats

    def with_adapter(self) -> tuple[str, Path]:
        """-> an adapter of all linear layers, and a checkpoint with it in its matrices."""
        adapter, merged = self.room / self.name / "adapter", self.room / self.name / "merged"
        if not merged.exists():
            tensors, added = load_file(self.directory / "model.safetensors"), dict[str, Tensor]()
            for index, (name, shape) in enumerate(find_matrices(self.directory, ungated=False).items()):
                module = name.removesuffix(".weight")
                named = halves(f"base_model.model.{module}", *shape, LORA_RANK, seed=index)
                down, up = named.values()
                addition = up @ down * (LORA_ALPHA / LORA_RANK) * 0.3
                across = tensors[name].shape != shape or is_transposed(self.family)
                tensors[name] = tensors[name] + (addition.t() if across else addition)
                added |= {key: value * (0.3 if "lora_B" in key else 1.0) for key, value in named.items()}
            write_adapter(adapter, added, r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules="all-linear")
            write_checkpoint(merged, self.directory, tensors)
        return str(adapter), merged


def random_ids(count: int) -> list[int]:
    ids: list[int] = torch.randint(3, TINY["vocab_size"], (count,), generator=torch.Generator().manual_seed(count)).tolist()
    return ids


def widened(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {key: widened(key, inner) for key, inner in value.items()}
    if name in HEADS:
        return 2 * value
    wide = isinstance(value, int) and any(word in name for word in WIDE) and "head_dim" not in name
    return WIDER.get(value, value) if wide else value


def is_transposed(family: Family) -> bool:
    return family.model == "GPT2LMHeadModel"


def find_matrices(directory: Path, ungated: bool = True) -> dict[str, tuple[int, int]]:
    """Tensors of the checkpoint that are matrices of linear layers or of one expert, one without a gate too -> outputs, inputs.
    Adapters cannot add to those."""
    facts = complete_facts(read_facts(resolve_model(directory), lenient=True), "auto")
    model = build_model(facts)
    tensors = load_file(directory / "model.safetensors")
    if isinstance(model, Fallback):
        return {name: tuple(tensor.shape) for name, tensor in tensors.items() if name.endswith("_proj.weight")}
    sites = adapt(model, device=torch.device("cpu"), dtype=torch.float32).sites
    found = {}
    for name, tensor in tensors.items():
        path = (rename(name, model.renames) or "").removesuffix(".weight")
        if not name.endswith(".weight"):
            continue
        if path in sites and sites[path].kind == "linear":
            found[name] = sites[path].shapes[path]
        elif (expert := ONE.match(path)) is not None and expert["path"] in sites and tensor.ndim == 2:
            layer = model.get_submodule(expert["path"])
            found |= {name: tuple(tensor.shape)} if layer.gated or ungated else {}
    assert found
    return found


def write_checkpoint(directory: Path, like: Path, tensors: dict[str, Tensor], **config: Any) -> None:
    directory.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    settings = json.loads((like / "config.json").read_text()) | config
    (directory / "config.json").write_text(json.dumps(settings))


def write_tokenizer(directory: Path) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = [letter for letter in letters if letter.isascii()] + [letter for letter in letters if not letter.isascii()]
    words = ["<pad>", "<s>", "</s>", *letters][: TINY["vocab_size"]]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))


def ids_of(directory: str, letters: str) -> list[int]:
    tokenizer = Tokenizer.from_file(str(Path(directory) / "tokenizer.json"))
    return [tokenizer.token_to_id(letter) for letter in letters]
