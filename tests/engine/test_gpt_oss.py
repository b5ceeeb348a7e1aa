"""gpt-oss with experts in mxfp4: the numbers of the floats that these stand for. With floats it is a family among others."""

import json
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapters import put, write_with_peft
from oracle import Family, in_pieces, make_checkpoint, open_checkpoint, open_reference
from quantized_checkpoints import mxfp4
from quire import LLM, SamplingParams
from quire.config.facts import read_facts
from quire.config.quantization import Quantization
from quire.config.server_args import ServerArgs
from quire.dist.mesh import Position
from quire.features.lora.cache import LoRACache
from quire.features.lora.packing import adapt
from quire.files.resolve import resolve_model
from quire.layers.moe import Experts
from quire.load.load import load_weights
from quire.lora.request import LoRARequest
from quire.models.registry import build_model
from quire.prepare.shard import shard
from quire.serve.adapters import load_modules
from quire.types.errors import AdapterError, ModelError
from serving import NAME, Running
from tiny_model import VOCABULARY, make_tokenizer

# 96 is three blocks: the halves of two ranks are none
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16,
    "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
IDS = torch.randint(3, VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(3)).tolist()
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PREFIX = "model.layers.1.mlp.experts."


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The quantized one; beside it lie the same values as floats, without a word about rope: what is published says yarn."""
    base = tmp_path_factory.mktemp("gpt-oss")
    exact, packed = base / "floats", base / "mxfp4"
    make_checkpoint(Family("GptOssConfig", "GptOssForCausalLM", SHAPE), exact)
    found = load_file(exact / "model.safetensors")
    stored = dict(found)
    for name in [name for name in found if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        parts = [mxfp4(name, expert.contiguous()) for expert in stored.pop(name).mT]
        found[name] = torch.stack([value for _, value in parts]).mT.contiguous()
        numbers = torch.stack([part["weight_packed"] for part, _ in parts])
        stored[f"{name}_blocks"] = numbers.view(*numbers.shape[:2], -1, 16)
        stored[f"{name}_scales"] = torch.stack([part["weight_scale"] for part, _ in parts])
    save_file(found, exact / "model.safetensors")
    packed.mkdir()
    save_file(stored, packed / "model.safetensors")
    settings = json.loads((exact / "config.json").read_text())
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (packed / "config.json").write_text(json.dumps(settings | {"quantization_config": quantization}))
    make_tokenizer(packed)
    return packed


def load(directory, impl="auto", change=None, **options):
    facts = read_facts(resolve_model(directory))
    model = build_model(facts, impl)
    if change is not None:
        change(model)
    options = {"quantization": facts.quantization} | options
    load_weights(model, facts, device="cpu", dtype="float32", **options)
    return model


@pytest.fixture(scope="module")
def exact(checkpoint):
    return open_checkpoint(checkpoint.parent / "floats")


@pytest.mark.parametrize("impl", ["quire", "transformers"])
def test_logits(checkpoint, exact, impl):
    for logits, ids in zip(in_pieces(load(checkpoint, impl), *IDS), IDS, strict=True):
        torch.testing.assert_close(logits, exact.expected(ids), atol=2e-5, rtol=1e-4)


def test_the_engine_and_the_server_say_the_same(checkpoint, exact):
    with torch.inference_mode():
        expected = [exact.reference.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                                             max_new_tokens=12, min_new_tokens=12, do_sample=False)[0, len(ids) :].tolist()
                    for ids in IDS]  # fmt: skip
    llm = LLM(str(checkpoint), device="cpu", block_size=4, max_num_batched_tokens=16, kv_cache_memory_bytes=4 << 20,
              quantization="gpt_oss_mxfp4")  # fmt: skip
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in IDS], PARAMS, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    server = Running(checkpoint, dtype="float32")
    try:
        body = {"model": NAME, "prompt": IDS, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        answer = server.http.post("/v1/completions", json=body).json()
    finally:
        server.close()
    assert [choice["token_ids"] for choice in answer["choices"]] == expected


@pytest.mark.filterwarnings("ignore")
def test_adapters_of_attention_and_of_experts(checkpoint, exact, tmp_path):
    """On a CPU, where the experts become floats: offline, beside a request without one, and served."""
    config = {
        "attention": {"target_modules": ["q_proj", "v_proj", "o_proj"]},
        "experts": {
            "target_modules": ["k_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
    }
    references = {None: exact.reference} | {
        name: write_with_peft(
            open_reference(checkpoint.parent / "floats"), tmp_path / name, seed, r=2, lora_alpha=4, **config[name]
        )
        for seed, name in enumerate(config)
    }
    length, given = len(IDS[0]), torch.tensor([IDS[0]])
    with torch.inference_mode():
        expected = [
            reference.generate(
                input_ids=given, attention_mask=torch.ones_like(given), max_new_tokens=12, min_new_tokens=12, do_sample=False
            )[0, length:].tolist()
            for reference in references.values()
        ]
    assert len({tuple(tokens) for tokens in expected}) == 3, "every adapter has tokens of its own"
    llm = LLM(str(checkpoint), device="cpu", block_size=4, kv_cache_memory_bytes=4 << 20, enable_lora=True, max_loras=2)
    loras = [None if name is None else LoRARequest(name, at, str(tmp_path / name)) for at, name in enumerate(references)]
    outputs = llm.generate([{"prompt_token_ids": IDS[0]}] * 3, PARAMS, use_tqdm=False, lora_request=loras)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    server = Running(checkpoint, dtype="float32", enable_lora=True)
    try:
        server.call(load_modules(server.llm, ServerArgs(lora_modules=[f"mine={tmp_path / 'experts'}"])))
        body = {
            "model": "mine",
            "prompt": IDS[0],
            "max_tokens": 12,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = server.http.post("/v1/completions", json=body).json()
    finally:
        server.close()
    assert answer["choices"][0]["token_ids"] == expected[2]
    made = {}
    change = partial(adapt, device=torch.device("cpu"), dtype=torch.float32)
    model = load(checkpoint, change=lambda model: made.update(adapters=change(model)), keeps=frozenset({"fp4", "experts"}))
    shelf = LoRACache(made["adapters"], model, 2, 16)
    put(shelf, tmp_path / "attention", 1)
    with pytest.raises(AdapterError, match=r"mlp\.experts.* adds to experts, which are quantized on this device"):
        put(shelf, tmp_path / "experts", 2)


class Alone:
    """Of ranks that are never run."""


@pytest.mark.parametrize(("size", "expert_parallel"), [(2, False), (3, False), (2, True)])
def test_a_rank_has_its_share(checkpoint, size, expert_parallel):
    whole = [layer for layer in load(checkpoint).modules() if isinstance(layer, Experts)]
    for rank in range(size):
        position = Position(rank, size, expert_parallel)
        model = load(checkpoint, change=lambda model, position=position: shard(model, position, Alone()))
        for ours, full in zip((layer for layer in model.modules() if isinstance(layer, Experts)), whole, strict=True):
            experts, inner = slice(ours.local.start, ours.local.stop), slice(ours.local_inner.start, ours.local_inner.stop)
            gates, ups = (half[experts, inner] for half in full.up.chunk(2, dim=1))
            assert torch.equal(ours.up, torch.cat((gates, ups), dim=1))
            assert torch.equal(ours.down, full.down[experts, :, inner])
            before = torch.cat([half[experts, inner] for half in full.up_bias.chunk(2, dim=1)], dim=1)
            assert torch.equal(ours.up_bias, before)
            if expert_parallel or rank == 0:
                assert torch.equal(ours.down_bias, full.down_bias[experts])
            else:
                assert ours.down_bias is None


def test_random_weights(checkpoint):
    logits = in_pieces(load(checkpoint, load_format="dummy"), *IDS)[0]
    assert logits.isfinite().all()


def test_floats_become_fp8(checkpoint, exact):
    online, directory = Quantization("fp8", {}, online=True), checkpoint.parent / "floats"
    rounded, kept = (load(directory, quantization=online, keeps=frozenset(keeps)) for keeps in ((), ("fp8", "experts")))
    for ours, theirs in zip(in_pieces(rounded, *IDS), in_pieces(kept, *IDS), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
    experts = rounded.layers[1].mlp.experts
    torch.testing.assert_close(experts.up, exact.model.layers[1].mlp.experts.up, atol=0.01, rtol=0.07)
    assert not torch.equal(experts.up, exact.model.layers[1].mlp.experts.up)


def without(name):
    return lambda tensors: tensors.pop(PREFIX + name)


def instead(name, change):
    return lambda tensors: tensors.update({PREFIX + name: change(tensors[PREFIX + name])})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without("down_proj_scales"), r"missing \(1\): layers.1.mlp.experts.down_proj_scales"),
        (without("down_proj_bias"), r"missing \(1\): layers.1.mlp.experts.down_proj_bias"),
        (instead("gate_up_proj_scales", lambda t: torch.full_like(t, 255)), r"gate_up_proj_scales has a scale of NaN"),
        (instead("down_proj_blocks", lambda t: t[:, :, :2].clone()), r"down_proj_blocks is \[4, 64, 2, 16\], the model"),
        (instead("down_proj_blocks", lambda t: t.float()), r"down_proj_blocks' is stored as torch.float32"),
    ],
)  # fmt: skip
def test_damaged_files(checkpoint, tmp_path, damage, message):
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


def test_what_a_file_leaves_out(checkpoint, tmp_path):
    """Is as transformers' configuration has it."""
    import transformers

    settings = json.loads((checkpoint.parent / "floats" / "config.json").read_text())
    for name in ("layer_types", "rope_parameters", "attention_bias", "swiglu_limit", "swiglu_alpha", "rms_norm_eps"):
        settings.pop(name, None)
    del settings["head_dim"]
    (tmp_path / "config.json").write_text(json.dumps(settings | {"sliding_window": 5}))
    facts = read_facts(resolve_model(str(tmp_path), weights=False))
    theirs = transformers.GptOssConfig(**{name: value for name, value in settings.items() if name != "architectures"})
    assert [layer.window for layer in facts.layers] == [5 if kind.startswith("s") else None for kind in theirs.layer_types]
    assert facts.layers[0].head_dim == theirs.head_dim
    # before 5.19 transformers had these two in its model, not in its configuration
    constants = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}
    for name in ("attention_bias", *constants, "rms_norm_eps", "num_experts_per_tok"):
        assert facts.hf[name] == getattr(theirs, name, constants.get(name))
    ours = facts.hf["rope_parameters"]
    assert ours == {name: value for name, value in theirs.rope_parameters.items() if name in ours} | {"rope_theta": 150000.0}
