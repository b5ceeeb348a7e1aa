"""Weights that stay in GGUF's blocks, through the whole engine: as good as dequantized ones, and the same in every company."""

import math

import pytest

from quire import LLM, SamplingParams
from quire.device.cpu.autotune import NEVER

pytestmark = pytest.mark.model

TEXT = (
    "The miller had three sons, and when he grew old he called them to the table beside the stove. To the eldest he gave "
    "the mill, because the eldest had carried sacks since he was a boy and knew the moods of the stream. To the second he "
    "gave the donkey and the cart, and a map of the villages on which every good customer was marked with a small red "
    "cross. The youngest waited. His father looked out of the window for a while, where the wheel was turning slowly in the"
    " evening light, and said that there was nothing left in the house but the cat, and that a cat which catches mice is "
    "worth more than a field which grows stones. The boy thanked him, took the cat under his arm and went down to the river"
    " to think. Water is patient, he thought; it moves the heaviest wheel in the country by leaning on it a little all day "
    "long. In the morning he borrowed his brother's cart, loaded it with empty sacks, and drove to the market in the town, "
    "where nobody knew that they were empty."
)


def perplexity(llm: LLM) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    [output] = llm.generate([TEXT], params, use_tqdm=False)
    chosen = [next(iter(entry.values())).logprob for entry in output.prompt_logprobs if entry]
    assert len(chosen) > 180
    return math.exp(-sum(chosen) / len(chosen))


@pytest.fixture(scope="module")
def engines() -> dict[str, LLM]:
    shared = {"device": "cpu", "max_model_len": 512, "kv_cache_memory_bytes": 64 << 20, "enable_prefix_caching": False}
    with pytest.MonkeyPatch.context() as patch:
        for module in ("segments", "network"):
            patch.setattr(f"quire.device.cpu.{module}.dequantize_from", lambda quickly: NEVER)
        few_rows = LLM("smollm2", **shared)  # never enough to dequantize for
    return {
        "auto": LLM("smollm2", **shared),
        "few rows": few_rows,
        "float32": LLM("smollm2", dtype="float32", **shared),
    }


def test_the_capital_of_france(engines):
    params = SamplingParams(temperature=0.0, max_tokens=4)
    [output] = engines["auto"].generate(["The capital of France is"], params, use_tqdm=False)
    assert output.outputs[0].text.startswith(" Paris")


@pytest.mark.parametrize("engine", ["auto", "few rows"])
def test_perplexity_within_one_percent_of_the_dequantized_weights(engines, engine):
    kept, dequantized = perplexity(engines[engine]), perplexity(engines["float32"])
    print(f"{engine}: {kept / dequantized:.4f} of {dequantized:.3f}")
    assert kept == pytest.approx(dequantized, rel=0.01)


PROMPTS = ["The river was", "Once upon a time there was a king who", "2 + 2 =", "A list of colours: red,"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def answers(llm: LLM, prompts: list[str]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


def test_company_does_not_change_the_tokens(engines):
    """In steps too small to dequantize for. Else last bits may differ, as on a GPU."""
    together = answers(engines["few rows"], PROMPTS)
    assert together == [answers(engines["few rows"], [prompt])[0] for prompt in PROMPTS]
    assert together == answers(engines["few rows"], PROMPTS * 3)[:4]


def test_equal_prompts_that_come_together(engines, monkeypatch):
    """All but the first adopt pages that are filled in their own first step, and have one token left: which goes through the
    network, where the prompt is too long for that."""
    monkeypatch.setattr("quire.device.cpu.network.dequantize_from", lambda quickly: 64)
    llm = LLM("smollm2", device="cpu", max_model_len=512, kv_cache_memory_bytes=64 << 20)
    prompt = {"prompt_token_ids": llm.get_tokenizer().encode(TEXT)[:161]}
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    [expected] = engines["auto"].generate([prompt], params, use_tqdm=False)
    outputs = llm.generate([prompt] * 3, params, use_tqdm=False)
    assert [output.num_cached_tokens for output in outputs] == [0, 160, 160]
    assert [output.outputs[0].token_ids for output in outputs] == [expected.outputs[0].token_ids] * 3


def test_a_chunk_of_a_prompt_beside_tokens(engines):
    """Of a prompt that is longer than a step, while another request is generating."""
    engine = LLM(
        "smollm2", device="cpu", max_model_len=512, kv_cache_memory_bytes=64 << 20, max_num_batched_tokens=256
    ).llm_engine
    [expected] = answers(engines["few rows"], PROMPTS[:1])
    engine.add_request("a", PROMPTS[0], GREEDY)
    found = {}
    for count in range(60):
        if count == 3:
            engine.add_request(
                "b", {"prompt_token_ids": list(range(1000, 1400))}, SamplingParams(temperature=0.0, max_tokens=2)
            )
        found |= {output.request_id: output.outputs[0] for output in engine.step()}
        if not engine.has_unfinished_requests():
            break
    assert {name: output.finish_reason for name, output in found.items()} == {"a": "length", "b": "length"}
    assert list(found["a"].token_ids)[:3] == expected[:3] and len(found["a"].token_ids) == GREEDY.max_tokens


def test_prefix_hits_and_preemption_leave_good_tokens(engines):
    """A cache of a few pages, where rows are preempted and adopt pages that lie elsewhere. What was computed in a prompt
    differs in its last bits, so of two tokens that are nearly as likely the other one may be chosen."""
    small = LLM("smollm2", device="cpu", max_model_len=128, num_gpu_blocks_override=7)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    outputs = small.generate([TEXT[:200] + prompt for prompt in PROMPTS * 2], params, use_tqdm=False)
    assert any(output.num_cached_tokens for output in outputs)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    whole = [{"prompt_token_ids": [*output.prompt_token_ids, *output.outputs[0].token_ids]} for output in outputs]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    for judged in engines["auto"].generate(whole, params, use_tqdm=False):
        for token, entry in list(zip(judged.prompt_token_ids, judged.prompt_logprobs, strict=True))[-24:]:
            assert entry[token].logprob > max(choice.logprob for choice in entry.values()) - 0.5
