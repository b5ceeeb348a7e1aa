"""The runner with a tiny Llama: whatever the pages, chunks, slots and company, a request computes the same."""

import logging
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from runner_support import admission, entries, ints, plan

from quire.attn.batch import PLAIN
from quire.config.facts import ModelFacts
from quire.device.registry import open_device
from quire.engine.executor.local import LocalExecutor
from quire.features.base import Pooled, StepPart
from quire.files.resolve import ModelFiles
from quire.load.load import load_weights
from quire.runner.settings import RunnerSettings, WeightSettings
from quire.runner.step import Runner
from quire.runner.warmup import kinds_of_layers, warm_up_parts, warm_up_steps
from quire.types.cache import CacheGroup, CacheLayout, LayerCache
from quire.types.errors import ConfigError, EngineError

PAGE, PAGES, LENGTH, VOCABULARY = 4, 40, 64, 97
HF = {
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 4, "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": LENGTH,
    "vocab_size": VOCABULARY, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
FULL, WINDOW = LayerCache(2, 8), LayerCache(2, 8, window=6)
# two groups over the same two buffers, in pages with room to spare
LAYOUT = CacheLayout(
    PAGE, 2 * 2 * 8 * PAGE * 4 + 64, 2, (CacheGroup("full", None, (0, 2)), CacheGroup("window", 6, (1, 3)))
)  # fmt: skip


def facts() -> ModelFacts:
    return ModelFacts(
        architecture="MistralForCausalLM", hf=HF, dtype="float32", vocab_size=VOCABULARY, hidden_size=32, max_position=LENGTH,
        layers=(FULL, WINDOW, FULL, WINDOW), eos_ids=(), bos_id=None, generation={}, weight_bytes=0, parameters=0,
        files=ModelFiles("tiny", Path("tiny"), "hf", ()),
    )  # fmt: skip


def make_runner(device: str = "cpu") -> Runner:
    opened = open_device(device)
    opened.start()
    settings = RunnerSettings("float32", max_seqs=6, max_batched_tokens=64, weights=WeightSettings("dummy"))
    runner = Runner(facts(), settings, LAYOUT, device=opened)
    with patch("quire.runner.settings.load_weights", load_weights_that_matter):
        runner.load()
    return runner


def load_weights_that_matter(model, facts, **options) -> None:
    """Dummy weights are too small for tokens to matter to each other."""
    load_weights(model, facts, **options)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        mean, spread = (1.0, 0.1) if "norm" in name else (0.0, 0.25)
        parameter.data.copy_(torch.empty(parameter.shape).normal_(mean, spread, generator=generator))


@pytest.fixture
def runner():
    runner = make_runner()
    runner.allocate(PAGES, LENGTH)
    return runner


class Driver:
    """Gives each tenant its own pages, and steps rows by name of the slot and number of tokens."""

    def __init__(self, runner: Runner, seed: int = 0) -> None:
        self.runner, self.step = runner, 0
        for buffer in runner._state[1].raw:
            buffer.fill_(0xFF)  # NaN: whatever reads a place nobody wrote shows
        self.free = list(np.random.default_rng(seed).permutation(np.arange(1, PAGES + 1)))
        self.done: dict[int, int] = {}
        self.known: dict[int, int] = {}
        self.scored: dict[int, int] = {}  # the prompt length of those who want logprobs of it

    def admit(self, a, length: int, **parts):
        """A plan's parts for a tenant that will have at most `length` tokens."""
        self.done[a.slot], self.known[a.slot] = a.start, len(a.tokens)
        self.scored[a.slot] = 0 if a.params.prompt_logprobs is None else a.prompt_length
        pages = [(g, a.slot, i, int(self.free.pop())) for g in range(2) for i in range(-(-length // PAGE))]
        return {"admitted": (a,), **entries(*pages), **parts}

    def launch(self, *rows: tuple[int, int], **parts):
        full, scored, token = [], [], 0
        for slot, count in rows:
            wanted = min(count, self.scored.get(slot, 0) - 1 - self.done[slot])
            scored += range(token, token + wanted)
            token += count
            self.done[slot] += count
            full.append((slot, count, self.done[slot], self.done[slot] == self.known[slot]))
            self.known[slot] += full[-1][3]
        self.step += 1
        return self.runner.launch(plan(self.step, full, scored=scored, **parts))

    def run(self, a, chunks, outputs: int):
        """Tokens and results of one tenant alone."""
        results = []
        parts = self.admit(a, len(a.tokens) + outputs)
        for count in [*chunks, *[1] * (outputs - 1)]:
            results.append(self.launch((a.slot, count), **parts).result())
            parts = {}
        return [token for r in results for token in r.ids.tolist()], results


PROMPT = np.random.default_rng(1).integers(0, VOCABULARY, 23).tolist()


def joined(results, attribute):
    values = [getattr(r, attribute)[0].values for r in results if getattr(r, attribute)]
    return np.concatenate(values)


def test_chunks_pages_and_slots_do_not_matter(runner):
    params = {"temperature": 0.9, "seed": 3, "logprobs": 2, "prompt_logprobs": 1}
    tokens, results = Driver(runner).run(admission(0, PROMPT, **params), [23], 8)
    assert len(tokens) == 8 and len(set(tokens)) > 3
    again, others = Driver(runner, seed=5).run(admission(4, PROMPT, **params), [5, 1, 9, 8], 8)
    assert again == tokens
    np.testing.assert_allclose(joined(others, "logprobs"), joined(results, "logprobs"), atol=1e-4)
    np.testing.assert_allclose(joined(others, "prompt_logprobs"), joined(results, "prompt_logprobs"), atol=1e-4)
    assert [r.prompt_logprobs[0].ids[:, 0].tolist() for r in others[:4]] == [
        PROMPT[1:6], PROMPT[6:7], PROMPT[7:16], PROMPT[16:23],
    ]  # fmt: skip
    assert all(not r.prompt_logprobs for r in others[4:])


def test_prompt_logprobs_are_those_of_drawing_each_token(runner):
    """Position p's draw report and position p's prompt report are the same numbers."""
    _, results = Driver(runner).run(admission(0, PROMPT, temperature=0, prompt_logprobs=3), [23], 1)
    top = results[0].prompt_logprobs[0]
    assert top.ids.shape == (22, 4)
    for p in (0, 7, 21):
        _, alone = Driver(runner, seed=2).run(admission(1, PROMPT[: p + 1], temperature=0, logprobs=3), [p + 1], 1)
        assert alone[0].logprobs[0].ids[0, 1:].tolist() == top.ids[p, 1:].tolist()
        np.testing.assert_allclose(alone[0].logprobs[0].values[0, 1:], top.values[p, 1:], atol=1e-4)


def test_long_prompts_are_reported_in_pieces(runner, monkeypatch):
    _, whole = Driver(runner).run(admission(0, PROMPT, temperature=0, prompt_logprobs=0), [23], 1)
    monkeypatch.setattr("quire.runner.step.PROMPT_CHUNK", 5)
    _, pieces = Driver(runner).run(admission(0, PROMPT, temperature=0, prompt_logprobs=0), [23], 1)
    np.testing.assert_allclose(pieces[0].prompt_logprobs[0].values, whole[0].prompt_logprobs[0].values, atol=1e-5)
    assert pieces[0].prompt_logprobs[0].rank.tolist() == whole[0].prompt_logprobs[0].rank.tolist()


def test_company_does_not_matter(runner):
    """Three tenants at different points, one of them greedy, in shared steps."""
    cast = [
        admission(1, PROMPT, temperature=0.8, seed=1),
        admission(3, PROMPT[:7], temperature=0),
        admission(0, PROMPT[3:15], top_k=20, seed=2**63 + 5, repetition_penalty=1.2),
    ]
    alone = [Driver(runner, seed=9).run(a, [len(a.tokens)], 4)[0] for a in cast]
    driver, got = Driver(runner), [[], [], []]
    steps = [
        ([(1, 10)], cast[0]),
        ([(3, 7), (1, 10)], cast[1]),
        ([(0, 5), (1, 3), (3, 1)], cast[2]),
        ([(1, 1), (0, 7), (3, 1)], None),
        ([(0, 1), (3, 1), (1, 1)], None),
        ([(1, 1), (0, 1)], None),
        ([(0, 1)], None),
    ]
    names = {a.slot: i for i, a in enumerate(cast)}
    for rows, new in steps:
        parts = driver.admit(new, len(new.tokens) + 4) if new else {}
        result = driver.launch(*rows, **parts).result()
        drawing = [slot for (slot, _), length in zip(rows, result.lengths.tolist(), strict=True) if length]
        for slot, token in zip(drawing, result.ids.tolist(), strict=True):
            got[names[slot]].append(token)
    assert got == alone


def test_steps_may_be_launched_before_results_are_read(runner):
    a = admission(2, PROMPT, temperature=1.0, seed=8, frequency_penalty=1.0)
    expected, _ = Driver(runner).run(a, [23], 5)
    driver = Driver(runner)
    flights = [driver.launch((2, 23), **driver.admit(a, 28))] + [driver.launch((2, 1)) for _ in range(4)]
    assert [int(f.result().ids[0]) for f in reversed(flights)][::-1] == expected


def test_a_replayed_tenant_goes_on_where_it_was(runner):
    """Preempted after four tokens: admitted again elsewhere with what it had, it draws what it would have drawn."""
    params = {"temperature": 0.9, "seed": 5, "presence_penalty": 0.7, "repetition_penalty": 1.1}
    expected, _ = Driver(runner).run(admission(0, PROMPT, **params), [23], 8)
    replay = admission(3, PROMPT + expected[:4], prompt=23, **params)
    assert Driver(runner, seed=4).run(replay, [11, 16], 4)[0] == expected[4:]


def test_copied_pages_serve_a_fork(runner):
    """The second tenant shares three full pages of each group with the first, and takes a copy of the part-filled ones."""
    first = admission(0, PROMPT[:14], temperature=0)
    expected, _ = Driver(runner).run(admission(1, [*PROMPT[:13], 5], temperature=0), [14], 3)
    driver = Driver(runner)
    parts = driver.admit(first, 16)
    driver.launch((0, 14), **parts)
    table = {(g, i): page for g, _, i, page in zip(*(parts[k].tolist() for k in parts if k.startswith("entry")), strict=True)}
    fork = admission(1, [*PROMPT[:13], 5], start=13, temperature=0)
    driver.done[1], driver.known[1] = 13, 14
    new = {g: int(driver.free.pop()) for g in range(2)}
    shared = [(g, 1, i, table[g, i]) for g in range(2) for i in range(3)] + [(g, 1, 3, new[g]) for g in range(2)]
    copies = {"copy_from": ints(table[0, 3], table[1, 3]), "copy_to": ints(new[0], new[1])}
    tokens = [driver.launch((1, 1), admitted=(fork,), **entries(*shared), **copies)]
    tokens += [driver.launch((1, 1)) for _ in range(2)]
    assert [int(f.result().ids[0]) for f in tokens] == expected


def test_a_slot_is_reused_without_traces(runner):
    a = admission(0, PROMPT[:9], temperature=0)
    expected, _ = Driver(runner).run(a, [9], 3)
    driver = Driver(runner)
    driver.run(admission(0, PROMPT, temperature=0, logit_bias={3: 90.0}, logprobs=1), [23], 3)
    flights = [driver.launch((0, 9), retired=ints(0), **driver.admit(a, 12)), driver.launch((0, 1)), driver.launch((0, 1))]
    results = [f.result() for f in flights]
    assert [int(r.ids[0]) for r in results] == expected and not results[0].logprobs


def test_a_broken_row_fails_alone(runner):
    embedding = runner._model.embed_tokens.weight.data
    bad = next(t for t in range(VOCABULARY) if t not in PROMPT)
    embedding[bad] = float("nan")
    good, broken = admission(0, PROMPT[:5], temperature=0), admission(1, [bad, bad], temperature=0, logprobs=1)
    expected, _ = Driver(runner).run(good, [5], 1)
    driver = Driver(runner)
    one, two = driver.admit(good, 6), driver.admit(broken, 3)
    parts = {k: np.concatenate([one[k], two[k]]) for k in one if k.startswith("entry")}
    result = driver.launch((0, 5), (1, 2), admitted=(good, broken), **parts).result()
    assert (result.ids.tolist(), result.lengths.tolist()) == (expected[:1], [1, 0])
    assert list(result.failed) == [1] and "NaN" in result.failed[1] and not result.logprobs
    chunk = admission(2, [bad, bad, 1], temperature=0, prompt_logprobs=0)
    result = driver.launch((2, 2), **driver.admit(chunk, 3)).result()
    assert list(result.failed) == [0] and not result.prompt_logprobs


def test_an_exception_in_a_step_leaves_the_runner_usable(runner, monkeypatch):
    a = admission(0, PROMPT[:9], temperature=0)
    expected, _ = Driver(runner).run(a, [9], 2)
    driver = Driver(runner)
    parts = driver.admit(a, 11)

    def fall(*_):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(runner._model, "logits", fall)
        with pytest.raises(RuntimeError, match="out of memory"):
            driver.launch((0, 9), **parts)
    driver.done[0], driver.known[0] = 0, 9
    assert [int(driver.launch((0, n)).result().ids[0]) for n in (9, 1)] == expected


def test_a_plan_without_rows_changes_hands_only(runner):
    result = runner.launch(plan(7, retired=ints(0, 1))).result()
    assert result.step == 7 and len(result.ids) == 0


def test_layers_share_buffers_but_not_groups(runner):
    views = [attention.kv for attention in runner._model.attentions]
    assert {tuple(view.shape) for view in views} == {(PAGES + 1, 2, 2, PAGE, 8)}
    assert views[0].data_ptr() == views[1].data_ptr() != views[2].data_ptr() == views[3].data_ptr()
    assert [attention.group for attention in runner._model.attentions] == [0, 1, 0, 1]
    assert not any(view.any() for view in views)


def test_the_local_executor(runner):
    executor = LocalExecutor(runner)
    assert executor.call("profile", 0.9, 12345) == 12345
    with pytest.raises(ConfigError, match="positive"):
        executor.call("profile", 0.9, 0)
    for name in ("_profile_run", "nothing"):
        with pytest.raises(EngineError, match=name):
            executor.call(name)
    assert executor.submit(plan()).result().failed == {}
    executor.stop()
    with pytest.raises(EngineError, match="no model"):
        executor.submit(plan())


def test_the_profile_run_works_and_leaves_room(runner):
    runner._profile_run()
    with pytest.raises(EngineError, match="allocated"):
        runner.launch(plan())
    runner.allocate(PAGES, LENGTH)
    runner.launch(plan())


def test_every_layer_and_step_of_the_warm_up_can_be_run(caplog, monkeypatch):
    monkeypatch.setattr("quire.device.cpu.prepare.runtime_for_floats", lambda: None)  # as on a GPU, layer by layer
    runner = make_runner()
    runner.allocate(0, LENGTH)
    with caplog.at_level(logging.DEBUG):
        slots, _, sampler = runner._state
        warm_up_parts(runner._model, slots, sampler, runner._facts.vocab_size, LENGTH)
    assert not caplog.records
    attentions, norms, others = kinds_of_layers(runner._model)
    assert (len(attentions), len(norms), len(others)) == (2, 1, 1)
    for step in warm_up_steps(6, 64, LENGTH):
        assert not runner.launch(step).result().failed
    assert not runner._state[0].known.any()


@pytest.mark.gpu
def test_traffic_finds_its_kernels_compiled():
    runner = make_runner("cuda")
    runner.warm_up()
    runner.allocate(PAGES, LENGTH)
    before = runner.counts
    assert before.compilations + before.loads >= 5
    Driver(runner).run(admission(0, PROMPT, temperature=0.9), [16, 7], 8)
    after = runner.counts
    assert (after.compilations, after.loads) == (before.compilations, before.loads)
    assert after.captures == 1
    assert after.replays > 0


class Handing(StepPart):
    """Hands hidden states to the host as they are."""

    name = "handing"

    def graph_key(self, rows):
        return False

    def pool(self, rows, hidden, index):
        return [Pooled({0: len(index)}, hidden[torch.from_numpy(index)])]


def test_hidden_states_are_handed_out(runner):
    runner._parts = (*runner._parts, Handing())
    a = admission(1, PROMPT, temperature=0)
    driver = Driver(runner)
    result = driver.launch((1, 23), pool=[20, 22], **driver.admit(a, 24)).result()
    [pooled] = result.pooled.values()
    assert pooled.shape == (2, 32)
    assert int(runner._model.logits(torch.from_numpy(pooled), PLAIN)[1].argmax()) == result.ids[0]
