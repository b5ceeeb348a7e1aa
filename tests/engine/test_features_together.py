"""Random requests with every feature on that can be combined get, together, what each of them gets alone."""

import random

import pytest
import torch
from tiny import open_model

from adapters import write_adapter
from quire import SamplingParams
from quire.features.lora.device import LoRAPart
from quire.features.speculation.device.part import SpeculationPart
from quire.lora.request import LoRARequest

REQUESTS = 14
STEM = [5 + i * 7 % 60 for i in range(48)]  # prompts begin with some of it, so that prefixes are shared and n-grams repeat
GRAMMARS = [{"regex": "[a-f ]{3,9}(one|two)[0-9]+x"}, {"choice": ["one two", "three"]}, {"json": {"type": "integer"}}]


def write_adapters(directory) -> list[LoRARequest]:
    """Two adapters that change every token after the first few."""
    found = []
    for number in (1, 2):
        generator = torch.Generator().manual_seed(number)
        halves = {"A": torch.randn(4, 32, generator=generator), "B": torch.randn(32, 4, generator=generator)}
        name = "base_model.model.model.layers.1.self_attn.q_proj"
        tensors = {f"{name}.lora_{half}.weight": values for half, values in halves.items()}
        found.append(
            LoRARequest(f"adapter-{number}", number, write_adapter(directory / str(number), tensors, r=4, lora_alpha=8))
        )
    return found


def random_request(rng: random.Random, adapters: list[LoRARequest]):
    prompt = [*STEM[: rng.choice((1, 9, 17, 33, 48))], *(rng.randrange(5, 300) for _ in range(rng.randrange(3)))]
    params = SamplingParams(
        temperature=rng.choice((0, 0.8)), seed=rng.randrange(99), max_tokens=rng.randrange(1, 20),
        ignore_eos=rng.random() < 0.5, top_p=rng.choice((1.0, 0.9)),
        repetition_penalty=rng.choice((1.0, 1.3)), logprobs=rng.choice((None, 2)),
        structured_outputs=rng.choice((None, None, *GRAMMARS)),
    )  # fmt: skip
    return {"prompt_token_ids": prompt}, params, rng.choice((None, *adapters))


def answers(outputs):
    return [(output.outputs[0].token_ids, output.outputs[0].text, output.outputs[0].finish_reason) for output in outputs]


@pytest.mark.parametrize(("cache", "method"), [("auto", "draft_model"), ("fp8", "ngram")])
def test_requests_together_get_what_each_gets_alone(tiny_model, tmp_path, cache, method):
    drafter = {"model": str(tiny_model)} if method == "draft_model" else {"method": method, "prompt_lookup_min": 1}
    rng, adapters = random.Random(6), write_adapters(tmp_path)
    llm = open_model(
        tiny_model, dtype="float32", max_num_seqs=5, max_num_batched_tokens=24, num_gpu_blocks_override=60,
        enable_prefix_caching=True, kv_cache_dtype=cache, enable_lora=True, max_loras=2, max_lora_rank=8,
        speculative_config={**drafter, "num_speculative_tokens": 2, "adaptive": False},
    )  # fmt: skip
    core = llm.llm_engine.core
    assert core.executor._runner.part(LoRAPart) and core.executor._runner.part(SpeculationPart)
    requests = [random_request(rng, adapters) for _ in range(REQUESTS)]
    prompts, params, chosen = (list(column) for column in zip(*requests, strict=True))
    together = answers(llm.generate(prompts, params, lora_request=chosen, use_tqdm=False))
    alone = [answers(llm.generate([p], [s], lora_request=[a], use_tqdm=False))[0] for p, s, a in requests]
    assert together == alone
    assert len({answer[0][0] for answer in together}) > 3 and core.stats.drafts.tokens
    assert method == "ngram" or core.stats.drafts.accepted > 10
    core.step()
    core.scheduler.roster.check()
    assert core.stats.free_pages == core.stats.pages
