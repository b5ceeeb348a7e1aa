"""With draft tokens, some of them wrong, every request gets the answer that it gets without: through LLM, for every depth."""

import json

import pytest
from tiny import make_model, open_model

from quire import SamplingParams
from quire.engine import speculation

DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
PROMPTS = [[5 + i * 7 % 300 for i in range(length)] for length in (1, 9, 17, 40)]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.9, top_k=50, min_p=0.01, seed=5, max_tokens=17, logprobs=2, prompt_logprobs=1),
    SamplingParams(
        temperature=0, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.3, max_tokens=14, logprobs=0
    ),
    SamplingParams(temperature=0.8, seed=2, n=3, max_tokens=11, ignore_eos=True, logit_bias={7: 2.0, 8: -3.0}),
]


class Oracle:
    """Knows the answers, and is wrong about every `wrong`th token."""

    def __init__(self, answers: list[list[int]], wrong: int) -> None:
        self.answers, self.wrong = answers, wrong

    def propose(self, text, most):
        known = list(text.tokens)
        answer = next((a for a in self.answers if a[: len(known)] == known), [])
        ahead = enumerate(answer[len(known) : len(known) + most], len(known))
        return [token + (at % self.wrong == 0) for at, token in ahead]

    def finished(self, text):
        pass


def told(outputs):
    """All that users see, logprobs to three digits."""
    return [
        (
            [(tuple(c.token_ids), c.text, c.finish_reason, c.stop_reason, scores(c.logprobs)) for c in output.outputs],
            scores(output.prompt_logprobs),
        )
        for output in outputs
    ]


def scores(positions):
    return positions and [p and [(t, one.rank, round(one.logprob, 3)) for t, one in sorted(p.items())] for p in positions]


@pytest.fixture(scope="module", params=["full", "window", pytest.param("cuda", marks=pytest.mark.gpu)])
def expected(request, tmp_path_factory):
    """A model, the requests, and what it answers without drafts."""
    directory = make_model(tmp_path_factory.mktemp("drafts"))
    device = "cuda" if request.param == "cuda" else "cpu"
    if request.param != "full":
        config = json.loads((directory / "config.json").read_text())
        window = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 6}
        (directory / "config.json").write_text(json.dumps(config | window))
    llm = open_model(directory, device=device, dtype="float32")
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    first = llm.generate(prompts, PARAMS, use_tqdm=False)
    words = [output.outputs[0] for output in first]
    middle = words[0].token_ids[7]  # ends in the middle of what is accepted together
    prompts += [prompts[0], prompts[0], prompts[2], prompts[1], prompts[2], prompts[3], prompts[0], prompts[0]]
    params = [
        *PARAMS,
        SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[middle], ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[middle], min_tokens=12, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=14, stop=[words[2].text[5:7]], include_stop_str_in_output=True, logprobs=1),
        SamplingParams(temperature=0.9, seed=9, max_tokens=16, structured_outputs={"regex": "[a-f ]{3,9}(one|two)[0-9]+x"}),
        SamplingParams(temperature=0, max_tokens=16, structured_outputs={"json": SCHEMA}, logprobs=0),
        SamplingParams(temperature=0, max_tokens=9, bad_words=[words[3].text[3:6]], ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=18, thinking_token_budget=6, thinking_end_ids=[40, 41], ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=18, thinking_token_budget=9, thinking_end_ids=[middle], ignore_eos=True),
    ]
    answers = llm.generate(prompts, params, use_tqdm=False)
    texts = [[*output.prompt_token_ids, *c.token_ids] for output in answers for c in output.outputs]
    return directory, device, prompts, params, told(answers), texts


@pytest.mark.parametrize(("depth", "wrong"), [(0, 5), (1, 2), (1, 1000), (2, 5)])
def test_answers_are_the_same_with_drafts(expected, depth, wrong, monkeypatch):
    directory, device, prompts, params, answers, texts = expected
    monkeypatch.setattr(speculation, "make_drafter", lambda *_: Oracle(texts, wrong))
    llm = open_model(
        directory, device=device, dtype="float32", max_num_seqs=6, num_gpu_blocks_override=60, speculative_config=DRAFTS
    )
    core = llm.llm_engine.core
    core.depth = depth
    assert told(llm.generate(prompts, params, use_tqdm=False)) == answers
    drafts = core.stats.drafts
    rate = drafts.accepted / drafts.tokens
    assert drafts.tokens > 50 and (rate > 0.8 if wrong == 1000 else 0.1 < rate < 0.8)
    assert told(llm.generate(prompts[::-1], params[::-1], use_tqdm=False)) == answers[::-1]
    core.step()
    core.scheduler.roster.check()
    assert core.stats.free_pages == core.stats.pages


def test_memory_is_measured_with_all_drafts(tiny_model, monkeypatch):
    llm = open_model(tiny_model, max_num_seqs=4, max_num_batched_tokens=64, speculative_config=DRAFTS)
    runner, drawn = llm.llm_engine.core.executor._runner, []
    logits = runner._model.logits
    monkeypatch.setattr(
        runner._model, "logits", lambda hidden, adapters: (drawn.append(len(hidden)), logits(hidden, adapters))[1]
    )
    runner._profile_run()
    assert drawn == [4 * (1 + DRAFTS["num_speculative_tokens"])]
