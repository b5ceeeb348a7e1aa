"""Rank 1 of `test_external.py`: the script that all ranks run, `python external_rank.py MODEL TEXT_MODEL`."""

import json
import sys

from quire import LLM, SamplingParams
from quire.types.errors import EngineDead, RequestError

GREEDY = SamplingParams(temperature=0.0, repetition_penalty=1.5, max_tokens=12, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.9, n=2, max_tokens=12, ignore_eos=True)  # no seed: only one of the ranks draws
FOX = SamplingParams(temperature=0.8, max_tokens=20, logprobs=2, stop=["g"], structured_outputs={"regex": "(fox|dog) [a-z]{3}"})
PROMPTS = [list(range(3, 3 + n)) for n in (33, 5, 18)]
TEXT = ["the quick brown fox", "a quire is"]


def script(model: str, device: str = "cpu", **sizes) -> list:
    """What a user writes; every rank gets the same."""
    llm = LLM(
        model, device=device, dtype="float32", block_size=4 if device == "cpu" else 16, max_num_seqs=8,
        max_num_batched_tokens=64, kv_cache_memory_bytes=4 << 20, distributed_executor_backend="external_launcher", **sizes,
    )  # fmt: skip
    said = []
    for prompts, params in ((PROMPTS, GREEDY), (PROMPTS, DRAWN), (TEXT, FOX)):
        outputs = llm.generate(prompts, params, use_tqdm=False)
        said.append([[[list(one.token_ids), one.text, one.finish_reason] for one in output.outputs] for output in outputs])
    for prompt, params in (([5] * 300, GREEDY), (TEXT[0], SamplingParams(structured_outputs={"regex": "("}))):
        try:
            llm.generate(prompt, params, use_tqdm=False)
        except RequestError as error:
            said.append(f"{type(error).__name__}: {error}")
    said += [[rank["rank"] for rank in llm.collective_rpc("describe_rank")], llm.reset_prefix_cache()]
    llm.llm_engine.shutdown()
    return said


if __name__ == "__main__":
    model, *sizes = sys.argv[1:]
    print(json.dumps([script(model, **json.loads(one)) for one in sizes]), flush=True)
    if any("cuda" in one for one in sizes):
        sys.exit()
    llm = LLM(model, device="cpu", kv_cache_memory_bytes=4 << 20, distributed_executor_backend="external_launcher",
              tensor_parallel_size=2)  # fmt: skip
    try:
        llm.generate(TEXT[1:], GREEDY, use_tqdm=False)  # rank 0 asks for something else
    except EngineDead as error:
        print(error, flush=True)
