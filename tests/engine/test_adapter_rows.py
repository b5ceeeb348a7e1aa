"""Rows with adapters in the runner: the same numbers in any company, over quantized matrices, and nothing for those without."""

import pytest
import torch
from tiny import make_model, open_model

from adapters import halves, write_adapter
from oracle import Sequences
from quantized_checkpoints import shapes, write
from quire import SamplingParams
from quire.config.devices import KEEPS
from quire.config.facts import read_facts
from quire.device.cpu.prepare import CompiledBody
from quire.features.lora.cache import LoRACache
from quire.features.lora.packing import adapt
from quire.files.adapter import digest
from quire.files.resolve import resolve_model
from quire.layers.linear import Linear
from quire.layers.quant.gguf import GGUFMethod
from quire.load.load import load_weights
from quire.models.registry import build_model
from quire.ops.native import adapts, run_decoders
from quire.types.adapter import AdapterRef
from quire.types.prompts import Extras, Prompt
from tiny_model import make_tokenizer

PARAMS = SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=9, ignore_eos=True, logprobs=3)
PROMPTS = [[5 + i * 7 % 300 for i in range(length)] for length in (1, 17, 40, 100)]
WORK = [(place, ids) for ids in PROMPTS for place in range(4)]  # of every prompt with every adapter, and without
apart = pytest.mark.skipif(not run_decoders(), reason="libraries multiply on this CPU, and company changes their last bits")


def every_matrix(layers: int, hidden: int, keys: int, inner: int, rank: int, seed: int) -> dict[str, torch.Tensor]:
    found = {}
    for layer in range(layers):
        for name, outputs, inputs in (
            ("self_attn.q_proj", hidden, hidden), ("self_attn.k_proj", keys, hidden), ("self_attn.v_proj", keys, hidden),
            ("self_attn.o_proj", hidden, hidden), ("mlp.gate_proj", inner, hidden), ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):  # fmt: skip
            found |= halves(f"base_model.model.model.layers.{layer}.{name}", outputs, inputs, rank, seed + len(found))
    return found


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A model, and three adapters: of all matrices, of these with lengths of their own (DoRA), and of both ends."""
    model, place = make_model(tmp_path_factory.mktemp("tiny"), hidden_size=64), tmp_path_factory.mktemp("adapters")
    whole = every_matrix(2, 64, 32, 48, 3, 0)
    dora = every_matrix(2, 64, 32, 48, 8, 100)
    for name, values in list(dora.items()):
        if name.endswith("lora_B.weight"):
            dora[name.replace("lora_B.weight", "lora_magnitude_vector")] = torch.rand(len(values)) + 1
    prefix = "base_model.model."
    ends = halves(f"{prefix}model.layers.1.self_attn.v_proj", 32, 64, 1) | halves(f"{prefix}lm_head", 320, 64, 1, seed=3)
    for half, values in zip("AB", halves("", 64, 320, 1, seed=4).values(), strict=True):
        ends[f"{prefix}model.embed_tokens.lora_embedding_{half}"] = values
    return model, [
        write_adapter(place / "whole", whole, r=3),
        write_adapter(place / "dora", dora, r=8, use_dora=True),
        write_adapter(place / "ends", ends, r=1),
    ]


@pytest.fixture
def open_adapted():
    """open_adapted(model, adapters, ...) -> an engine that has them in places 1, 2, ..."""

    def get(model, adapters, **args):
        lora = {"enable_lora": True, "max_loras": len(adapters), "max_lora_rank": 16} if adapters else {}
        llm = open_model(model, **({"dtype": "float32"} | lora | args))
        executor = llm.llm_engine.core.executor
        for place, path in enumerate(adapters, 1):
            ref = AdapterRef(place, digest(path), path)
            executor.read_adapter(ref)
            executor.put_adapter(ref, place)
            executor.forget_adapter(ref.version)
        return llm

    return get


def ask(llm, work):
    outputs = llm.generate(
        [Prompt(None, ids, extras=Extras(adapter_slot=place)) for place, ids in work], PARAMS, use_tqdm=False
    )
    return [
        (list(one.token_ids), [[(token, lp.logprob) for token, lp in step.items()] for step in one.logprobs])
        for one in (output.outputs[0] for output in outputs)
    ]


@apart
def test_numbers_are_the_same_in_any_company(tiny, open_adapted):
    model, adapters = tiny
    alone = open_adapted(model, adapters, enable_prefix_caching=False, max_num_batched_tokens=256)
    body = alone.llm_engine.core.executor._runner._model.body
    assert isinstance(body, CompiledBody)
    assert not adapts() or body.compiled._tables.supported([1, 2, 3]) == [1, 3]  # DoRA is run layer by layer
    expected = [ask(alone, [each])[0] for each in WORK]
    plain = open_model(model, dtype="float32")
    assert [ask(plain, [each])[0] for each in WORK if not each[0]] == [
        got for (place, _), got in zip(WORK, expected, strict=True) if not place
    ]
    assert len({tuple(tokens) for tokens, _ in expected[-4:]}) == 4  # each adapter has an answer of its own
    for settings in ({}, {"max_num_batched_tokens": 16}, {"num_gpu_blocks_override": 40}):  # whole, in chunks, preempted
        llm = open_adapted(model, adapters, **settings)
        for order in (1, -1):  # the second time beginnings are cached
            assert ask(llm, WORK[::order]) == expected[::order]
        llm.llm_engine.core.scheduler.roster.check()


@apart
def test_over_whole_numbers_as_well(tmp_path, open_adapted):
    directory = write("awq", tmp_path)
    make_tokenizer(directory)
    path = write_adapter(tmp_path / "adapter", every_matrix(2, 128, 64, 192, 4, 0), r=4)
    work = [(place, [token % 300 for token in ids]) for ids in PROMPTS for place in (1, 0)]
    alone = open_adapted(directory, [path], dtype="auto", enable_prefix_caching=False)
    layers = [layer for layer in alone.llm_engine.core.executor._runner._model.modules() if isinstance(layer, Linear)]
    assert all(isinstance(layer.method, GGUFMethod) for layer in layers)
    expected = [ask(alone, [each])[0] for each in work]
    llm = open_adapted(directory, [path], dtype="auto")
    assert ask(llm, work) == ask(llm, work) == expected
    assert all(expected[i] != expected[i + 1] for i in range(0, len(work), 2))


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("scheme", ["awq", "gptq-head", "ct-int8", "ct-w8a8", "fp8-block", "bnb-nf4"])
def test_additions_to_matrices_of_few_bits(tmp_path, scheme, dora):
    directory = write(scheme, tmp_path)
    tensors = every_matrix(2, 128, 64, 192, 4, 0)
    models = []
    for place, keeps in ((directory, KEEPS["cuda"]), (directory.parent / "floats", frozenset())):
        facts = read_facts(resolve_model(place))
        model = build_model(facts)
        adapters = adapt(model, device=torch.device("cpu"), dtype=torch.float32)
        load_weights(model, facts, device="cpu", dtype="float32", quantization=facts.quantization, keeps=keeps)
        models.append((model, LoRACache(adapters, model, 1, 16)))
    merged, _ = models[1]
    for name, (outputs, _) in shapes(False).items():
        down, up = (tensors[f"base_model.model.{name}.lora_{half}.weight"] for half in "AB")
        weight = _weight_of(merged, name)
        weight += up @ down
        if dora:
            lengths = torch.rand(outputs, generator=torch.Generator().manual_seed(outputs)) + 0.5
            tensors[f"base_model.model.{name}.lora_magnitude_vector"] = lengths
            weight *= (lengths / weight.norm(dim=1))[:, None]
    model, shelf = models[0]
    ref = AdapterRef(1, "", write_adapter(tmp_path / "adapter", tensors, r=4, use_dora=dora))
    shelf.read(ref)
    shelf.put(ref, 1)
    run = Sequences(model, 1, 40)
    run.adapters = [1]
    got, wanted = run.step([(0, PROMPTS[2])])[0], Sequences(merged, 1, 40).step([(0, PROMPTS[2])])[0]
    assert (got - wanted).abs().max() < 1e-3


def _weight_of(model, name: str) -> torch.Tensor:
    """A view of one matrix of the checkpoint where its layer has it."""
    path = name.removeprefix("model.")
    for at, layer in model.named_modules():
        parts = layer.parts(at) if hasattr(layer, "parts") else {}
        if path in parts:
            [(start, rows)] = parts[path].local
            return layer.weight.data[start : start + len(rows)]
    raise AssertionError(name)
