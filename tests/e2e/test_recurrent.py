"""Families with recurrent layers through the whole engine: the tokens are transformers' greedy ones whatever the chunks, the
cache, preemption; and a state that was saved is the state of the same tokens run anew."""

import json
import sys
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from adapters import write_with_peft
from forked import nursery
from oracle import TINY, open_reference
from quire import LLM, SamplingParams
from quire.cache.layout import make_layout, pages_for
from quire.cli.memory_plan import make_plan
from quire.config.args import EngineArgs
from quire.dist.mesh import Position, share_state
from quire.engine.executor import workers
from quire.lora.request import LoRARequest
from quire.types.errors import ConfigError
from recurrent_families import RECURRENT

NEW_TOKENS, BUDGET, PAGE = 18, 16, 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)
LENGTHS = (33, 5, 18, 30)
PROMPTS = [torch.randint(3, TINY["vocab_size"], (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in LENGTHS]
TOLERANCE = 1e-4
NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3, "adaptive": False}
THOROUGH = ("bamba", "mamba2", "qwen3-next")  # one hybrid, one without attention, one of another recurrence


def settings(**args):
    defaults = {
        "skip_tokenizer_init": True, "dtype": "float32", "device": "cpu", "block_size": PAGE, "max_num_seqs": 4,
        "max_model_len": 96, "max_num_batched_tokens": BUDGET, "kv_cache_memory_bytes": 32 << 20,
    }  # fmt: skip
    return defaults | args


def engine(case, **args) -> LLM:
    return LLM(str(case.directory), **settings(**args))


def check(case, prompt: list[int], output) -> list[int]:
    """The tokens are the most likely ones by transformers, which gives them the same probabilities."""
    tokens = list(output.outputs[0].token_ids)
    with torch.inference_mode():
        logits = case.reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
    assert tokens == logits.argmax(-1).tolist()
    expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    reported = torch.tensor([step[token].logprob for step, token in zip(output.outputs[0].logprobs, tokens, strict=True)])
    assert (reported - expected).abs().max() <= TOLERANCE
    return tokens


@pytest.mark.parametrize("name", sorted({*RECURRENT} - {*THOROUGH}))
def test_chunks_and_prefix_hits(checkpoint, name):
    case = checkpoint(name)
    assert [layer.cache for layer in case.model.recurrents] == list(case.facts.states)
    llm = engine(case)
    for prompt, output in zip(PROMPTS[:2], llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False), strict=True):
        check(case, prompt, output)
    [again] = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    check(case, PROMPTS[0], again)
    assert again.num_cached_tokens == 32


@pytest.mark.parametrize("name", THOROUGH)
def test_chunks_preemption_and_prefix_hits(checkpoint, name):
    """Prompts are cut; there are pages for one whole request and one more. Then prompts come again: whole, with their answers,
    and with another end, which branches off where no state was saved before the second time."""
    case = checkpoint(name)
    assert [layer.cache for layer in case.model.recurrents] == list(case.facts.states)
    longest = max(LENGTHS) + 2 * NEW_TOKENS + 2
    layout = make_layout(case.facts.layers, PAGE, 4, without_pages=True)
    pages = pages_for(layout, longest, BUDGET) + 1
    llm = engine(case, max_model_len=longest, num_gpu_blocks_override=pages)
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    answers = [check(case, prompt, output) for prompt, output in zip(PROMPTS, outputs, strict=True)]
    if case.facts.layers:
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
    for _ in range(2):
        again = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0]
        assert list(again.outputs[0].token_ids) == answers[0]
    assert again.num_cached_tokens == 32
    onward = PROMPTS[0] + answers[0] + [7, 8]
    following = llm.generate(onward, GREEDY, use_tqdm=False)[0]
    check(case, onward, following)
    assert following.num_cached_tokens == 48  # of what was sampled, a state every 4 pages
    cached = []
    for end in (9, 10, 11):
        prompt = PROMPTS[0][:22] + [end] * 5
        output = llm.generate(prompt, GREEDY, use_tqdm=False)[0]
        check(case, prompt, output)
        cached.append(output.num_cached_tokens)
    assert cached == [0, 20, 20]


@pytest.mark.parametrize("how", [{"long_prefill_token_threshold": 1}, {"long_prefill_token_threshold": 7},
                                 {"async_scheduling": True}, {"enable_prefix_caching": False}])  # fmt: skip
def test_several_of_one(checkpoint, how):
    case = checkpoint("bamba")
    llm = engine(case, **how)
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        check(case, prompt, output)
    several = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=8, ignore_eos=True)
    one, other = (llm.generate(PROMPTS[0], several, use_tqdm=False)[0] for _ in range(2))
    assert [part.token_ids for part in one.outputs] == [part.token_ids for part in other.outputs]
    assert len({tuple(part.token_ids) for part in one.outputs}) > 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("how", [{}, {"enforce_eager": True, "long_prefill_token_threshold": 7}])
def test_on_cuda(checkpoint, name, how):
    case = checkpoint(name)
    llm = engine(case, device="cuda", max_num_batched_tokens=64, kv_cache_memory_bytes=256 << 20, **how)
    for _ in range(2):
        for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, GREEDY, use_tqdm=False), strict=True):
            check(case, prompt, output)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ({"pipeline_parallel_size": 2, "speculative_config": NGRAM}, "pipeline_parallel_size=2 .* with speculative_config"),
        ({"pipeline_parallel_size": 4}, "the model's 3 layers cannot be divided among that many stages; use at most 3"),
        ({"speculative_config": {"method": "draft_model", "model": "BAMBA", "num_speculative_tokens": 2}}, "draft model"),
        ({"kv_cache_memory_bytes": 4096, "max_num_seqs": 64}, "max_num_seqs 64 requires"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(checkpoint, args, named):
    case = checkpoint("bamba")
    if "model" in args.get("speculative_config", {}):
        args = {"speculative_config": args["speculative_config"] | {"model": str(case.directory)}}
    with pytest.raises(ConfigError, match=named):
        engine(case, **args)


class Guesses:
    """What comes next, as far as it was told, but for some tokens."""

    texts: ClassVar[list[list[int]]] = []

    def propose(self, text, most):
        at, known = len(text.tokens), list(text.tokens)
        found = next((whole for whole in self.texts if whole[:at] == known), [])
        return [token if place % 3 else 3 for place, token in enumerate(found[at : at + most], at)]


@pytest.mark.parametrize("name", ["bamba", "mamba2", "qwen3.5", "lfm2"])
def test_drafts(checkpoint, name, monkeypatch):
    """States go back behind drafts that were wrong, near and far; the tokens are those without drafts, and the states that were
    saved are those of the tokens."""
    case = checkpoint(name)
    custom = {"method": "custom_class", "model": "test_recurrent:Guesses", "num_speculative_tokens": 4, "adaptive": False}
    llm = engine(case, speculative_config=custom, max_num_batched_tokens=32)
    told = sys.modules["test_recurrent"].Guesses
    monkeypatch.setattr(told, "texts", [])
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    answers = [check(case, prompt, output) for prompt, output in zip(PROMPTS, outputs, strict=True)]
    monkeypatch.setattr(told, "texts", [prompt + answer for prompt, answer in zip(PROMPTS, answers, strict=True)])
    again = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in again] == answers
    drafts = [(output.metrics.num_draft_tokens, output.metrics.num_accepted_draft_tokens) for output in again]
    assert all(0 < accepted < drafted for drafted, accepted in drafts), drafts
    onward = PROMPTS[0] + answers[0] + [7, 8]
    check(case, onward, llm.generate(onward, GREEDY, use_tqdm=False)[0])


@pytest.fixture(scope="module")
def forked_ranks(tmp_path_factory):
    with nursery(tmp_path_factory.mktemp("rank"), "rank") as command:
        yield command


@pytest.fixture
def ranks(forked_ranks, monkeypatch):
    monkeypatch.setattr(workers, "COMMAND", forked_ranks)


@pytest.mark.parametrize(("name", "size", "drafts"), [("qwen3-next", 2, True), ("mamba2", 4, False), ("jamba", 2, False)])
def test_ranks(checkpoint, ranks, name, size, drafts):
    """Each rank has a part of the states, of snapshots, too: prompts in chunks, preempted, and from prefixes."""
    case = checkpoint(name)
    more = {"speculative_config": {**NGRAM, "num_speculative_tokens": 2}} if drafts else {}
    longest = max(LENGTHS) + 2 * NEW_TOKENS + 2
    pages = pages_for(make_layout(case.facts.layers, PAGE, 4, without_pages=True), longest, BUDGET) + 1
    options = {"tensor_parallel_size": size, "max_model_len": longest, "num_gpu_blocks_override": pages, **more}
    llm = engine(case, **options)
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    answers = [check(case, prompt, output) for prompt, output in zip(PROMPTS, outputs, strict=True)]
    assert not case.facts.layers or sum(output.metrics.num_preemptions for output in outputs) > 0
    for _ in range(2):
        [again] = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
        assert list(again.outputs[0].token_ids) == answers[0]
    assert again.num_cached_tokens == 32
    held = [rank["state_bytes"] for rank in llm.collective_rpc("describe_rank")]
    plan = make_plan(EngineArgs.from_kwargs(model=str(case.directory), **settings(**options)), 1 << 32)
    assert max(held) == plan.bytes_per_state
    for rank, count in enumerate(held):
        assert count == sum(share_state(state, Position(rank, size)).bytes(4) for state in case.facts.states)
    assert size > 2 or held == [sum(state.bytes(4) for state in case.facts.states) // 2] * 2
    llm.llm_engine.shutdown()


@pytest.mark.parametrize(("name", "size", "partition"), [("bamba", 2, "1,2"), ("mamba2", 1, None), ("nemotron-h", 1, "2,1,1")])
def test_stages(checkpoint, ranks, name, size, partition):
    """Each stage has the states of its layers; it may have no attention layer, or no recurrent one. Steps overlap."""
    case = checkpoint(name)
    stages = partition.count(",") + 1 if partition else 2
    options = {"tensor_parallel_size": size, "pipeline_parallel_size": stages, "pipeline_layer_partition": partition}
    llm = engine(case, **options)
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    answers = [check(case, prompt, output) for prompt, output in zip(PROMPTS, outputs, strict=True)]
    again = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in again] == answers
    assert again[0].num_cached_tokens == 32
    held = [rank["state_bytes"] for rank in llm.collective_rpc("describe_rank")]
    plan = make_plan(EngineArgs.from_kwargs(model=str(case.directory), **settings(**options)), 1 << 32)
    assert len(held) == size * stages and max(held) == plan.bytes_per_state
    assert sum(held) == sum(state.bytes(4) for state in case.facts.states)
    llm.llm_engine.shutdown()


def test_more_ranks_than_heads(checkpoint):
    with pytest.raises(ConfigError, match=r"the 6 heads of the recurrent layers of Mamba2ForCausalLM .* use at most 6"):
        engine(checkpoint("mamba2"), tensor_parallel_size=7)


@pytest.mark.parametrize("size", [1, 2])
def test_adapters(checkpoint, ranks, tmp_path, size):
    """Of what is before the recurrence and behind it; a prefix with one is not a prefix without."""
    case = checkpoint("bamba")
    adapted = write_with_peft(
        open_reference(case.directory), tmp_path, 3, r=2, lora_alpha=4, target_modules=["in_proj", "out_proj", "q_proj"]
    )
    llm = engine(case, enable_lora=True, tensor_parallel_size=size)
    plain, other, again = llm.generate(
        [PROMPTS[0]] * 3, GREEDY, use_tqdm=False, lora_request=[None, *[LoRARequest("a", 1, str(tmp_path))] * 2]
    )
    assert check(case, PROMPTS[0], plain) != check(replace(case, reference=adapted), PROMPTS[0], other)
    assert other.outputs[0].token_ids == again.outputs[0].token_ids
    llm.llm_engine.shutdown()
    with pytest.raises(ConfigError, match="enable_lora"):
        engine(checkpoint("zamba2"), enable_lora=True)


def test_layer_types_that_nobody_knows(checkpoint, tmp_path):
    """A configuration that does not make sense is refused with the name of what is wrong."""
    case = checkpoint("lfm2")
    for file in case.directory.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    config = json.loads((case.directory / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"layer_types": ["conv", "full_attention", "mystery"]}))
    with pytest.raises(Exception, match="layer_types in the model's config must be a list of 3 of"):
        LLM(str(tmp_path), skip_tokenizer_init=True, device="cpu")
