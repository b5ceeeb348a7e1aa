"""Adapters on a GPU: kernels inside graphs give the tokens of transformers with the additions in its matrices."""

import copy

import pytest
import torch
from tiny import open_model
from transformers import LlamaForCausalLM

from adapters import IDS, KINDS, halves, merge, write_adapter
from quire import SamplingParams
from quire.attn import latent_triton
from quire.lora.request import LoRARequest

pytestmark = pytest.mark.gpu

NONE = "none"
PROMPT = {"prompt_token_ids": IDS}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def answer(model, ids=IDS) -> list[int]:
    with torch.inference_mode():
        found = model.generate(input_ids=torch.tensor([ids]), max_new_tokens=12, min_new_tokens=12, do_sample=False)
    return found[0, len(ids) :].tolist()


@pytest.fixture(scope="module")
def expected(tiny_model, tmp_path_factory):
    """Adapters, and tokens with each: of two that kernels know, one that also has a head, and none."""
    folder, loras, answers = tmp_path_factory.mktemp("adapters"), {NONE: None}, {}
    for number, name in enumerate((NONE, *KINDS, "head")):
        model = LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        if name in KINDS:
            loras[name] = LoRARequest(name, number, merge(model, folder / name, *KINDS[name]))
        elif name == "head":
            added = halves("base_model.model.lm_head", *model.lm_head.weight.shape)
            down, up = added.values()
            model.lm_head.weight.data += up @ down * 2
            loras[name] = LoRARequest(name, number, write_adapter(folder / name, added, target_modules=["lm_head"]))
        answers[name] = answer(model)
    return loras, answers


@pytest.mark.parametrize("eager", [False, True])
def test_any_mixture(tiny_model, expected, eager):
    loras, answers = expected
    llm = open_model(
        tiny_model, device="cuda", dtype="float32", enable_lora=True, max_loras=2, max_cpu_loras=3, max_num_seqs=16,
        max_num_batched_tokens=256, enforce_eager=eager, enable_prefix_caching=False,
    )  # fmt: skip
    mixtures = (
        ["all"], ["all", NONE], ["some", "all", NONE, "some"], ["head", "all", NONE], ["all", "some"] * 8, [NONE] * 3,
        [NONE, "all"] * 5, ["some"] * 7, ["head"] * 2, ["all"],
    )  # fmt: skip
    for order in mixtures * 2:
        outputs = llm.generate([PROMPT] * len(order), GREEDY, use_tqdm=False, lora_request=[loras[name] for name in order])
        assert [output.outputs[0].token_ids for output in outputs] == [answers[name] for name in order], order
    graphs = llm.llm_engine.core.executor._runner.graphs
    assert eager or (graphs.replays > 20 and any(True in bucket.keys for bucket in graphs._recorded))
    llm.llm_engine.shutdown()


def test_what_makes_keys_and_values_of_latents(checkpoint, tmp_path, monkeypatch):
    """Absorbed and expanded, in graphs and beside one that kernels do not know."""
    monkeypatch.setattr(latent_triton, "LONG_ROW_TOKENS", 20)
    case, loras, answers = checkpoint("deepseek-v3"), [None], []
    prompts = [[*IDS[:6]], [3 + 7 * i % 190 for i in range(51)]]
    with torch.inference_mode():
        for place in range(3):
            merged, tensors = copy.deepcopy(case.reference), {}
            modules = [f"model.layers.{layer}.self_attn.kv_b_proj" for layer in range(place and len(case.facts.layers))]
            for number, module in enumerate([*modules, *["lm_head"] * (place == 2)]):
                weight = merged.get_submodule(module).weight
                added = halves(f"base_model.model.{module}", *weight.shape, seed=20 * place + number)
                tensors |= added
                down, up = added.values()
                weight += up @ down * 2
            if place:
                loras.append(LoRARequest(f"a{place}", place, write_adapter(tmp_path / f"{place}", tensors)))
            answers.append([answer(merged, ids) for ids in prompts])
    assert len({tuple(each[1]) for each in answers}) == 3
    llm = open_model(
        case.directory, device="cuda", dtype="float32", enable_lora=True, max_loras=2, max_num_seqs=16, max_model_len=100,
        skip_tokenizer_init=True, max_num_batched_tokens=512, enable_prefix_caching=False,
    )  # fmt: skip
    for order in ([1], [1, 0, 1], [2, 1, 0], [0, 1] * 5, [1]) * 2:
        for which, ids in enumerate(prompts):
            given = [{"prompt_token_ids": ids}] * len(order)
            outputs = llm.generate(given, GREEDY, use_tqdm=False, lora_request=[loras[n] for n in order])
            assert [output.outputs[0].token_ids for output in outputs] == [answers[n][which] for n in order], order
    llm.llm_engine.shutdown()


def test_graphs_that_idle_time_recorded(tiny_model, expected):
    """Before any adapter was there: they serve whoever comes."""
    loras, answers = expected
    llm = open_model(
        tiny_model, device="cuda", dtype="float32", enable_lora=True, max_loras=2, max_num_seqs=8, max_num_batched_tokens=64
    )
    core = llm.llm_engine.core
    while core.idle():
        pass
    graphs = core.executor._runner.graphs
    before = graphs.captures
    for order in (["all", NONE, "some"], ["some", "some"], ["all"]):
        outputs = llm.generate([PROMPT] * len(order), GREEDY, use_tqdm=False, lora_request=[loras[name] for name in order])
        assert [output.outputs[0].token_ids for output in outputs] == [answers[name] for name in order], order
    assert (graphs.captures, graphs.eager) == (before, 0)
    llm.llm_engine.shutdown()
