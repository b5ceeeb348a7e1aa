"""Logits processors with vLLM's interface, through LLM: a batch-level one, one for requests, and what goes wrong."""

import copy
import logging
import os
import sys
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from tiny import open_model

from quire import LogitsProcessor, SamplingParams
from quire.features.logits_processors.batch import BatchRequest, PersistentBatch
from quire.types.errors import ConfigError, InvalidParameter, NotSupported
from quire.types.sampling import BeamSearchParams
from quire.v1.sample.logits_processor import AdapterLogitsProcessor, BatchUpdate, MoveDirectionality

SHORT = {"target_token": 9, "shape": 1}
PROMPTS = [{"prompt_token_ids": [5 + i, 12, 19 + 2 * i, 26, 33][: 2 + i % 4]} for i in range(12)]


def args(target):
    return {} if target is None else {"extra_args": {"target_token": target}}


class Forcing(LogitsProcessor):
    """After two tokens, only the target token; written as for vLLM."""

    updates: ClassVar[list] = []

    @classmethod
    def validate_params(cls, sampling_params):
        target = (sampling_params.extra_args or {}).get("target_token")
        if target is not None and not isinstance(target, int):
            raise ValueError(f"target_token must be an integer; got {target!r}")

    def __init__(self, vllm_config, device, is_pin_memory):
        assert vllm_config.scheduler_config.max_num_seqs > 0 and vllm_config.model_config.get_vocab_size() == 320
        assert device.type == "cpu" and is_pin_memory is False
        self.requests = {}

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        if batch_update is None:
            return
        self.updates.append(batch_update)
        for index in batch_update.removed:
            self.requests.pop(index, None)
        for index, params, prompt, output in batch_update.added:
            self.requests.pop(index, None)
            if params.extra_args and "target_token" in params.extra_args:
                assert len(prompt) >= 2
                self.requests[index] = params.extra_args["target_token"], output
        for first, second, direction in batch_update.moved:
            moved = self.requests.pop(first, None)
            other = self.requests.pop(second, None)
            if moved is not None:
                self.requests[second] = moved
            if other is not None and direction is MoveDirectionality.SWAP:
                self.requests[first] = other
        assert all(index < batch_update.batch_size for index in self.requests)

    def apply(self, logits):
        for index, (target, output) in self.requests.items():
            if len(output) >= 2:
                kept = logits[index, target].clone()
                logits[index] = -float("inf")
                logits[index, target] = kept
        return logits


class PerRequest(AdapterLogitsProcessor):
    """The same for one request at a time; `whole` callables get the prompt as well."""

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        extra = params.extra_args or {}
        if "refuse" in extra:
            raise KeyError("made on purpose")
        target = extra.get("target_token")
        if target is None:
            return None

        def force(output, logits):
            if extra.get("fail") == len(output):
                raise RuntimeError("at this token")
            if extra.get("exit") == len(output):
                raise SystemExit("at this one")
            if extra.get("shape") == len(output):
                return logits[:5]
            if len(output) >= 2:
                only = torch.full_like(logits, -torch.inf)
                only[target] = logits[target]
                return only
            return logits

        return (lambda prompt, output, logits: force(output, logits)) if extra.get("whole") else force


class Broken(LogitsProcessor):
    """Does what extra_args ask for, in the whole batch."""

    def __init__(self, vllm_config, device, is_pin_memory):
        self.requests = {}

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        if batch_update is not None:
            for _, params, _, _ in batch_update.added:
                self.how = (params.extra_args or {}).get("how")
            if self.how == "update":
                raise OSError("of update")

    def apply(self, logits):
        how, self.how = self.how, None
        if how == "exit":
            raise SystemExit(3)
        if how == "raise":
            raise ZeroDivisionError("of apply")
        if how == "nan":
            logits[0, 3] = float("nan")
        if how == "nothing":
            logits[0] = -torch.inf
        if how == "resize":
            logits.resize_(1, 3)
        return {"shape": logits[:, :7], "none": None}.get(how, logits) if how in ("shape", "none") else logits


class Least(LogitsProcessor):
    """Forbids all but the most likely token: greedy rows do not change, so it is only for random ones."""

    rows: ClassVar[list] = []

    def __init__(self, vllm_config, device, is_pin_memory):
        pass

    def is_argmax_invariant(self):
        return True

    def update_state(self, batch_update):
        pass

    def apply(self, logits):
        self.rows.append(len(logits))
        return logits.masked_fill(logits < logits.max(dim=1, keepdim=True).values, -torch.inf)


def run(llm, params, prompts=PROMPTS):
    outputs = llm.generate(prompts[: len(params)], params, use_tqdm=False)
    return [[*completion.token_ids] for output in outputs for completion in output.outputs]


def mixed(target=lambda i: 40 + i if i % 2 else None, **more):
    """Requests of several lengths, greedy and seeded, with penalties, of which every other one has a target."""
    return [
        SamplingParams(
            temperature=0.0 if i % 3 else 0.9,
            seed=i,
            max_tokens=4 + 3 * (i % 4),
            ignore_eos=True,
            repetition_penalty=1.0 if i % 4 else 1.3,
            **{**args(target(i)), **more},
        )
        for i in range(12)
    ]


def test_a_batch_level_processor_through_changing_batches(tmp_path_factory, model):
    """Continuous batching, chunked prefill, preemption for want of pages, prefix hits: each request as it is alone."""
    plain = run(open_model(model), mixed(lambda i: None))
    Forcing.updates.clear()
    llm = open_model(model, logits_processors=[Forcing], max_num_batched_tokens=8, num_gpu_blocks_override=14)
    found = run(llm, mixed())
    for i, (with_it, without) in enumerate(zip(found, plain, strict=True)):
        if i % 2:
            assert with_it[:2] == without[:2] and set(with_it[2:]) == {40 + i}, i
        else:
            assert with_it == without, i
    assert llm.llm_engine.core.stats.preemptions
    assert any(update.moved for update in Forcing.updates) and any(update.removed for update in Forcing.updates)
    assert run(llm, mixed()) == found  # from the prefix cache


@pytest.mark.parametrize("whole", [False, True])
def test_an_adapter_of_requests(whole, model):
    llm = open_model(model, logits_processors=["test_logits_processors:PerRequest"])
    params = [SamplingParams(max_tokens=8, n=2, seed=3, ignore_eos=True, extra_args={"target_token": 44, "whole": whole})]
    for tokens in run(llm, params):
        assert set(tokens[2:]) == {44}
    grammar = SamplingParams(
        max_tokens=8, temperature=0, structured_outputs={"choice": ["the quick", "brown"]}, extra_args={"target_token": 44}
    )
    [output] = llm.generate(PROMPTS[:1], grammar, use_tqdm=False)
    assert output.outputs[0].finish_reason == "error" and "no token is allowed" in output.outputs[0].error


def test_a_request_that_fails_alone(model):
    llm = open_model(model, logits_processors=[PerRequest])
    params = [
        SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, extra_args=extra)
        for extra in (
            None,
            {"target_token": 7, "fail": 3},
            {"refuse": True},
            {"target_token": 8},
            {"target_token": 9, "shape": 1},
            {"target_token": 10, "exit": 2},
        )
    ]
    outputs = [output.outputs[0] for output in llm.generate(PROMPTS[:6], params, use_tqdm=False)]
    assert [output.finish_reason for output in outputs] == ["length", "error", "error", "length", "error", "error"]
    assert [len(output.token_ids) for output in outputs] == [6, 3, 0, 6, 1, 2]
    assert "PerRequest failed: SystemExit: at this one" in outputs[5].error
    assert "PerRequest failed: RuntimeError: at this token" in outputs[1].error
    assert "PerRequest failed: KeyError: 'made on purpose'" in outputs[2].error
    assert "must return logits of shape [320]; got [5]" in outputs[4].error
    assert set(outputs[3].token_ids[2:]) == {8}


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("raise", "failed: ZeroDivisionError: of apply"),
        ("exit", "failed: SystemExit: 3"),
        ("update", "failed: OSError: of update"),
        ("shape", "failed: ValueError: apply must return logits of shape [1, 320]; got [1, 7]"),
        ("resize", "failed: ValueError: apply must return logits of shape [1, 320]; got [1, 3]"),
        ("none", "failed: TypeError: apply must return a tensor; got None"),
        ("nan", "returned NaN or +inf"),
        ("nothing", "forbids every token"),
    ],
)
def test_a_broken_processor_is_named_and_the_engine_goes_on(how, why, broken):
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, extra_args={"how": how})
    [output] = broken.generate(PROMPTS[:1], params, use_tqdm=False)
    assert output.outputs[0].finish_reason == "error"
    assert output.outputs[0].error == f"the logits processor test_logits_processors:Broken {why}"
    [tokens] = run(broken, [SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)])
    assert len(tokens) == 4


def test_an_invariant_processor_is_for_random_rows(model):
    llm = open_model(model, logits_processors=[Least])
    greedy = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    hot = SamplingParams(max_tokens=5, temperature=1.7, seed=5, ignore_eos=True)
    Least.rows.clear()
    [expected] = run(llm, [greedy])
    assert not Least.rows
    assert run(llm, [hot]) == [expected] and len(Least.rows) == 5
    assert run(open_model(model), [hot]) != [expected]


def test_parameters_are_validated(model):
    llm = open_model(model, logits_processors=[Forcing])
    with pytest.raises(InvalidParameter, match="Forcing: target_token must be an integer; got 'x'"):
        run(llm, [SamplingParams(extra_args={"target_token": "x"})])
    assert len(run(llm, [SamplingParams(max_tokens=3, ignore_eos=True)])[0]) == 3
    with pytest.raises(NotSupported, match="extra_args requires logits processors, and this engine has none"):
        run(open_model(model), [SamplingParams(extra_args={"target_token": 3})])
    for bad in ([1], {1: 2}, {"a": object()}):
        with pytest.raises(InvalidParameter, match="extra_args must"):
            SamplingParams(extra_args=bad)


def test_arguments_that_cannot_be(model):
    class Raises(Least):
        def __init__(self, *_):
            raise KeyError("weights")

    class Local(Least):
        pass

    speculation = {"method": "ngram", "num_speculative_tokens": 2}
    for options, why in (
        ({"logits_processors": ["nowhere:X"]}, "nowhere:X cannot be used: ModuleNotFoundError"),
        ({"logits_processors": ["nowhere"]}, "must be module:Class; got 'nowhere'"),
        ({"logits_processors": [dict]}, "builtins:dict cannot be used: it is not a subclass of LogitsProcessor"),
        ({"logits_processors": [Raises]}, "Raises cannot be made: KeyError: 'weights'"),
        ({"logits_processors": Least}, "must be a list of classes or of module:Class"),
        ({"logits_processors": [Least], "speculative_config": speculation}, "not supported with speculation"),
        ({"logits_processors": [Local], "tensor_parallel_size": 2}, "Local is defined in .* Move it to a module"),
    ):
        with pytest.raises(ConfigError, match=why):
            open_model(model, **options)


def test_plugins_of_packages(packages, model, monkeypatch, caplog):
    code = "from vllm.v1.sample.logits_processor import LogitsProcessor\nfrom test_logits_processors import Forcing, Least\n"
    code += "assert LogitsProcessor is Forcing.__mro__[1]\nwrong = dict\n"
    packages.add("forcing", "[vllm.logits_processors]\nforce = forcing:Forcing\nwrong = forcing:wrong\n", code)
    [tokens] = run(open_model(model), [SamplingParams(max_tokens=5, ignore_eos=True, **args(33))])
    assert tokens[2:] == [33] * 3
    assert "the logits processor 'wrong' of forcing 1.0 (forcing:wrong) cannot be used: it is not a subclass" in caplog.text
    with pytest.raises(ConfigError, match="'wrong' of forcing"):
        open_model(model, require_plugins=True)
    with caplog.at_level(logging.WARNING):
        open_model(model, speculative_config={"method": "ngram", "num_speculative_tokens": 2})
    assert "not used with speculation" in caplog.text
    monkeypatch.setenv("QUIRE_PLUGINS", "")
    with pytest.raises(NotSupported, match="extra_args requires"):
        run(open_model(model), [SamplingParams(**args(33))])


def test_a_class_written_for_vllm(model, tmp_path, monkeypatch):
    """`import vllm` in its module means Quire, as in packages."""
    code = "from vllm.v1.sample.logits_processor import LogitsProcessor\nfrom test_logits_processors import Forcing\n"
    (tmp_path / "written_for_vllm.py").write_text(
        code + "class Named(Forcing):\n    assert LogitsProcessor in Forcing.__mro__\n"
    )
    (tmp_path / "needs_more.py").write_text("import vllm_of_another_kind\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    llm = open_model(model, logits_processors=["written_for_vllm:Named"])
    [tokens] = run(llm, [SamplingParams(max_tokens=5, ignore_eos=True, **args(33))])
    assert tokens[2:] == [33] * 3
    with pytest.raises(ConfigError, match="No module named 'vllm_of_another_kind'"):
        open_model(model, logits_processors=["needs_more:Named"])


def test_two_ranks_sample_on_the_first(model, monkeypatch):
    here = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")]))
    llm = open_model(model, logits_processors=[Forcing], tensor_parallel_size=2)
    with llm:
        for i, tokens in enumerate(run(llm, mixed())):
            assert not i % 2 or set(tokens[2:]) == {40 + i}


def test_two_stages_sample_on_the_last(model, monkeypatch):
    """The first stage embeds, the last one samples and has the processors; its batches take turns."""
    here = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")]))
    with open_model(model, logits_processors=[Forcing], pipeline_parallel_size=2, max_num_seqs=6) as llm:
        found = run(llm, mixed())
    plain = run(open_model(model), mixed(lambda i: None))
    for i, tokens in enumerate(found):
        assert tokens == plain[i] if not i % 2 else set(tokens[2:]) == {40 + i}


def test_several_choices_through_preemption(model):
    """Each of n choices has its own output list, also when its pages were taken and it is added again."""
    params = [
        SamplingParams(
            n=2, temperature=0.9, seed=i, max_tokens=4 + 3 * (i % 4), ignore_eos=True, **args(40 + i if i % 2 else None)
        )
        for i in range(12)
    ]
    alone = run(open_model(model, logits_processors=[Forcing]), params)
    llm = open_model(model, logits_processors=[Forcing], max_num_batched_tokens=8, num_gpu_blocks_override=14)
    assert run(llm, params) == alone and llm.llm_engine.core.stats.preemptions
    for i, tokens in enumerate(alone):
        assert not (i // 2) % 2 or set(tokens[2:]) == {40 + i // 2}


def test_beams_are_refused(model, packages):
    beams = BeamSearchParams(beam_width=2, max_tokens=3)
    with pytest.raises(NotSupported, match=r"logits processors \(test_logits_processors:Forcing\). Start without them"):
        open_model(model, logits_processors=[Forcing]).beam_search(PROMPTS[:1], beams)
    packages.add(
        "forcing", "[vllm.logits_processors]\nforce = forcing:Forcing\n", "from test_logits_processors import Forcing\n"
    )
    with pytest.raises(NotSupported, match=r"\(the logits processor 'force' of forcing 1.0.*QUIRE_PLUGINS"):
        open_model(model).beam_search(PROMPTS[:1], beams)
    speculation = {"method": "ngram", "num_speculative_tokens": 2}
    assert open_model(model, speculative_config=speculation).beam_search(PROMPTS[:1], beams)  # where it is not used


def test_the_persistent_batch_replayed_by_its_updates():
    """Any sequence of requests that come, pause and go: a processor that follows the updates knows who is where."""
    import random

    rng = random.Random(0)
    batch, seen, live = PersistentBatch(), dict[int, int](), dict[int, int]()
    for serial in range(400):
        for slot in [slot for slot in live if rng.random() < 0.2]:
            batch.retire(slot)
            del live[slot]
        for slot in range(6):
            if slot not in live and rng.random() < 0.4:
                live[slot] = serial * 10 + slot
                batch.admit(slot, BatchRequest(SamplingParams(), [live[slot]], []))
        update = batch.update([slot for slot in live if rng.random() < 0.7])
        if update is not None:
            assert isinstance(update, BatchUpdate)
            for index in update.removed:
                del seen[index]
            for index, _, [name], _ in update.added:
                seen[index] = name
            for first, second, direction in update.moved:
                assert direction is MoveDirectionality.UNIDIRECTIONAL
                seen[second] = seen.pop(first)
            assert update.batch_size == len(seen)
        assert seen == {at: live[slot] for slot, at in batch.index.items()}
        assert sorted(seen) == list(range(len(seen)))
    assert copy.copy(seen)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from tiny import make_model

    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def broken(model):
    return open_model(model, logits_processors=["test_logits_processors:Broken"])
