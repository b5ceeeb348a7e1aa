"""The grammar process dies, hangs or is slow under requests that use it: they pause, their tokens are those of an undisturbed
run, and those without a grammar do not notice."""

import os
import signal
import sys
from pathlib import Path

import pytest
from tiny import TEXT, open_model

from patience import PATIENCE
from quire import SamplingParams
from quire.features.structured.grammar import client, wire
from quire.sampling_params import StructuredOutputsParams
from quire.types.errors import EngineError, InvalidParameter

FAULTY = (sys.executable, str(Path(__file__).parents[1] / "grammar" / "faulty_grammar.py"))
DIGITS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 999}, "minItems": 6, "maxItems": 6}


def bound(seed: int, max_tokens: int = 60, **options) -> SamplingParams:
    constraint = {name: options.pop(name) for name in ("json", "regex", "choice", "starts_after") if name in options}
    return SamplingParams(max_tokens=max_tokens, seed=seed, structured_outputs=StructuredOutputsParams(**constraint), **options)


def requests() -> dict[str, SamplingParams]:
    return {
        "json": bound(1, json=DIGITS),
        "regex": bound(2, regex="(a|b){40}"),
        "three": bound(3, regex="[a-z ]{30}", n=3),
        "reported": bound(4, regex="[xyz]{20}", logprobs=1, prompt_logprobs=1),
        "later": bound(5, regex="[0-9]{9}", starts_after=[40], logit_bias={40: 5.0}, max_tokens=200),
        "free": SamplingParams(max_tokens=120, seed=6, ignore_eos=True),
    }


class Run:
    """Requests in an engine that is turned by hand."""

    def __init__(self, engine, params: dict[str, SamplingParams]) -> None:
        self.engine, self.answers, self.lengths, self.turns = engine, {}, {}, 0
        for name, one in params.items():
            engine.add_request(name, TEXT[0], one)

    def turn(self) -> None:
        self.turns += 1
        for output in self.engine.step():
            self.lengths[output.request_id] = len(output.outputs[0].token_ids)
            if output.finished:
                self.answers[output.request_id] = output.outputs
        self.engine.core.scheduler.roster.check()

    def finish(self, kill_at=()):
        """Of kills in a row, a late one waits until the one before is overcome: on a busy machine that takes many turns."""
        due, lane = sorted(kill_at, reverse=True), self.engine.core.constraints.grammars.first
        while self.engine.has_unfinished_requests():
            if due and self.turns >= due[-1] and (due[-1] < 20 or not lane._lost):
                due.pop()
                kill(self.engine)
            self.turn()
        return self.answers


def kill(engine) -> None:
    running = engine.core.constraints.grammars.first._process
    if running is not None:
        os.kill(running.pid, signal.SIGKILL)


def told(answers) -> dict:
    return {name: [(choice.token_ids, choice.finish_reason) for choice in choices] for name, choices in answers.items()}


def open_engine(model: Path, **args):
    return open_model(model, kv_cache_memory_bytes=1 << 20, **args).llm_engine  # all pages are checked in every turn


@pytest.fixture(scope="module", params=[0, 1])
def engine(request, tiny_model):
    engine = open_engine(tiny_model, async_scheduling=bool(request.param))
    assert engine.core.depth == request.param
    return engine


@pytest.fixture(scope="module")
def undisturbed(engine) -> dict:
    expected = told(Run(engine, requests()).finish())
    assert all(choice[1] != "error" for choices in expected.values() for choice in choices)
    return expected


@pytest.fixture(scope="module")
def shared_faulty(tiny_model):
    return open_engine(tiny_model)


@pytest.fixture
def faulty(shared_faulty, monkeypatch):
    monkeypatch.setattr(wire, "COMMAND", FAULTY)
    return shared_faulty


@pytest.mark.parametrize("kill_at", [(0,), (3,), (9, 30), (14, 15)])
def test_nobody_loses_an_answer_or_a_token(engine, undisturbed, kill_at):
    run = Run(engine, requests())
    answers = run.finish(kill_at)
    assert told(answers) == undisturbed
    reported = answers["reported"][0]
    assert len(reported.logprobs) == len(reported.token_ids)
    assert not len(engine.core.constraints.grammars)


def test_those_without_a_grammar_do_not_wait(engine):
    run = Run(engine, {"bound": bound(1, 200, regex="(a|b){190}"), "free": SamplingParams(max_tokens=100, ignore_eos=True)})
    while run.lengths.get("bound", 0) < 5:
        run.turn()
    kill(engine)
    lane = engine.core.constraints.grammars.first
    while lane._process is None or lane._lost or not run.lengths.get("free"):
        run.turn()
    before = dict(run.lengths)
    for _ in range(10):
        run.turn()
    assert run.lengths["free"] >= before["free"] + 9 or "free" in run.answers
    run.finish()


def test_whoever_leaves_meanwhile_leaves_nothing(engine):
    run = Run(engine, {name: bound(1, 200, regex="(a|b){190}") for name in ("stays", "leaves")})
    for turn in range(40):
        if turn == 20:
            kill(engine)
        run.turn()
    engine.abort_request("leaves")
    assert len(engine.core.constraints.grammars) == 1
    assert list(run.finish()) == ["stays"] and not len(engine.core.constraints.grammars)


def test_a_deadly_grammar_ends_its_own_requests(faulty):
    """However many are at work when the process dies, the one that kills it is found."""
    good = {f"good{i}": bound(i, regex=f"[ab]{{{20 + i}}}") for i in range(4)}
    expected = told(Run(faulty, good).finish())
    bad = {"bad": bound(9, regex="deadly[ab]{9}"), "twin": bound(8, regex="deadly[ab]{9}", n=2)}
    answers = Run(faulty, good | bad).finish()
    assert {name: told(answers)[name] for name in good} == expected
    for choice in answers["bad"] + answers["twin"]:
        assert choice.finish_reason == "error" and "crash or hang" in choice.error
    with pytest.raises(InvalidParameter, match="crash or hang"):
        faulty.add_request("again", TEXT[0], bad["bad"])
    assert told(Run(faulty, good).finish()) == expected


def test_a_grammar_that_hangs_is_a_deadly_one(faulty, monkeypatch):
    monkeypatch.setattr(client, "STEP_TIMEOUT_S", 2.0)
    monkeypatch.setattr(client, "COMPILE_TIMEOUT_S", 4.0)
    answers = Run(faulty, {"bad": bound(9, regex="stuck[ab]{9}"), "good": bound(1, regex="[ab]{20}")}).finish()
    assert answers["bad"][0].finish_reason == "error" and "crash or hang" in answers["bad"][0].error
    assert answers["good"][0].finish_reason == "stop"


def test_who_cannot_be_blamed_is_not_tried_for_ever(faulty):
    """Alone, each of them is harmless."""
    answers = Run(
        faulty, {"a": bound(1, regex="frail[ab]{40}", logprobs=0), "b": bound(2, regex="[ab]{40}", logprobs=0)}
    ).finish()
    assert [choice.finish_reason for choices in answers.values() for choice in choices].count("error") >= 1
    assert all("8 times" in choice.error for choices in answers.values() for choice in choices if choice.error)


def test_a_process_that_does_not_start_is_not_the_requests_fault(tiny_model, monkeypatch):
    engine = open_engine(tiny_model)
    monkeypatch.setattr(wire, "COMMAND", (sys.executable, "-c", "raise SystemExit(7)"))
    with pytest.raises(EngineError, match="does not start"):
        engine.add_request("a", TEXT[0], bound(1, regex="ab"))
    monkeypatch.undo()
    assert Run(engine, {"a": bound(1, regex="ab")}).finish()["a"][0].text == "ab", "the next one tries again"
    monkeypatch.setattr(wire, "COMMAND", (sys.executable, "-c", "raise SystemExit(7)"))
    run = Run(engine, {"b": bound(1, 200, regex="(a|b){190}")})
    while run.lengths.get("b", 0) < 5:
        run.turn()
    kill(engine)
    assert "does not start" in run.finish()["b"][0].error


def test_masks_that_are_late_change_no_token(tiny_model, faulty, monkeypatch):
    params = {f"r{i}": bound(i, regex="sleepy?[a-z ]{20}", logprobs=1 if i == 2 else None, n=1 + i % 2) for i in range(4)}
    params |= {"json": bound(7, json=DIGITS), "free": SamplingParams(max_tokens=40, seed=6, ignore_eos=True)}
    expected = told(Run(open_engine(tiny_model), params).finish())
    suspended = []
    suspend = faulty.core.scheduler.roster.suspend
    monkeypatch.setattr(faulty.core.scheduler.roster, "suspend", lambda name: (suspended.append(name), suspend(name)))
    assert told(Run(faulty, params).finish()) == expected
    assert suspended, "some were late"


def test_a_grammar_that_is_slow_is_given_up_and_slows_nobody_down(faulty, monkeypatch):
    monkeypatch.setattr(client, "MAX_MASK_CPU_S", 1.0)
    good = {"good": bound(1, regex="[ab]{20}"), "free": SamplingParams(max_tokens=150, seed=6, ignore_eos=True)}
    expected = told(Run(faulty, good).finish())
    answers = Run(faulty, good | {"bad": bound(9, regex="slow[ab]{55}")}).finish()
    assert {name: told(answers)[name] for name in good} == expected
    assert answers["bad"][0].finish_reason == "error" and "take too long" in answers["bad"][0].error
    assert len(answers["bad"][0].token_ids) > 4 and not len(faulty.core.constraints.grammars)


def test_the_choices_of_a_request_share_its_budget_of_mask_time(faulty, monkeypatch):
    monkeypatch.setattr(client, "MAX_MASK_CPU_S", 1.0)
    good = {"good": bound(1, regex="[ab]{20}")}
    expected = told(Run(faulty, good).finish())
    answers = Run(faulty, good | {"bad": bound(9, regex="slow[ab]{54}", n=4)}).finish()
    assert told(answers)["good"] == expected["good"]
    assert all(choice.finish_reason == "error" and "take too long" in choice.error for choice in answers["bad"])
    assert sum(len(choice.token_ids) for choice in answers["bad"]) <= 16, "0.1 s a mask, and 1 s for all of them"


def test_a_stopped_process_stops_only_those_who_need_it(engine, monkeypatch):
    monkeypatch.setattr(client, "STEP_TIMEOUT_S", PATIENCE)  # it is not given up meanwhile
    params = {"bound": bound(1, 50, regex="(a|b){40}"), "free": SamplingParams(max_tokens=100, seed=6, ignore_eos=True)}
    expected = told(Run(engine, params).finish())
    run = Run(engine, params)
    while run.lengths.get("bound", 0) < 3:
        run.turn()
    pid = engine.core.constraints.grammars.first._process.pid
    os.kill(pid, signal.SIGSTOP)
    before, losses = run.lengths["bound"], engine.core.constraints.grammars.losses
    try:
        while "free" not in run.answers:
            run.turn()
        assert run.lengths["bound"] < 40 and run.lengths["bound"] <= before + 2
        assert engine.core.constraints.grammars.losses == losses
    finally:
        os.kill(pid, (signal.SIGCONT, signal.SIGKILL)[engine.core.depth])
    assert told(run.finish()) == expected


def kill_first_starts(monkeypatch, counter: Path, count: int) -> None:
    """The first `count` grammar processes are killed before they are up."""
    script = (
        "import os, pathlib, signal, sys\n"
        f"counter = pathlib.Path({str(counter)!r})\n"
        "number = len(counter.read_text()) if counter.exists() else 0\n"
        "counter.write_text('x' * (number + 1))\n"
        f"if number < {count}: os.kill(os.getpid(), signal.SIGKILL)\n"
        "from quire.features.structured.grammar.worker import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    monkeypatch.setattr(wire, "COMMAND", (sys.executable, "-P", "-c", script))
    monkeypatch.setattr(client, "MAX_RESTART_PAUSE_S", 0.01)


def test_processes_killed_before_they_are_up_cost_nobody_an_answer(tiny_model, monkeypatch, tmp_path):
    engine = open_engine(tiny_model)
    asked = {"a": bound(1, regex="[ab]{9}"), "b": bound(2, regex="[cd]{9}")}
    expected = told(Run(engine, asked).finish())
    engine.core.constraints.stop()
    kill_first_starts(monkeypatch, tmp_path / "starts", 6)
    run = Run(engine, asked)
    assert len((tmp_path / "starts").read_text()) == 7, "it went on for the question whether the grammar is valid"
    (tmp_path / "starts").unlink()
    kill(engine)
    assert told(run.finish()) == expected
    assert len((tmp_path / "starts").read_text()) == 7


def test_starts_that_are_killed_for_too_long_are_given_up(tiny_model, monkeypatch, tmp_path):
    engine = open_engine(tiny_model)
    kill_first_starts(monkeypatch, tmp_path / "starts", 100)
    monkeypatch.setattr(client, "MAX_KILLED_STARTS_S", 0.0)
    with pytest.raises(EngineError, match="does not start"):
        engine.add_request("a", TEXT[0], bound(1, regex="ab"))


def test_a_kill_from_outside_is_not_blamed_on_the_grammar(engine, monkeypatch):
    asked = {"alone": bound(1, regex="[abc]{12}")}
    expected, left, handle = told(Run(engine, asked).finish()), [1, 2], client.Grammars._handle

    def killing(self, answer, process):
        if left and isinstance(answer, wire.GrammarOpened) and self._by_number[answer.id].name is not None:
            left.pop()
            os.kill(process.pid, signal.SIGKILL)
        else:
            handle(self, answer, process)

    monkeypatch.setattr(client.Grammars, "_handle", killing)
    assert told(Run(engine, asked).finish()) == expected and not left


def test_kills_between_which_a_request_goes_on_are_not_counted_together(engine, monkeypatch):
    monkeypatch.setattr(client, "MAX_LOSSES", 2)
    asked = {"alone": bound(1, regex="[abc]{30}")}
    expected, run = told(Run(engine, asked).finish()), Run(engine, asked)
    lane, kills = engine.core.constraints.grammars.first, 0
    while engine.has_unfinished_requests():
        entry = next(iter(lane._open.values()), None)
        if entry is not None and entry.ready and kills < 3 and len(entry.tokens) > max(0, entry.tokens_at_kill):
            kills += 1
            os.kill(lane._process.pid, signal.SIGKILL)
            entry.sent_in = lane._sent + 1  # at work, whatever it has answered by now
        run.turn()
    assert told(run.answers) == expected and kills == 3
