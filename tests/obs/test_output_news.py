import pytest

from quire.text.inputs import InputProcessor
from quire.text.outputs import OutputProcessor
from quire.types.outputs import TokenDelta
from quire.types.sampling import SamplingParams
from quire.types.stats import Arrived, OutputNews


class Witness:
    def __init__(self) -> None:
        self.arrived: list[Arrived] = []
        self.news: list[OutputNews] = []

    def on_arrival(self, request: Arrived) -> None:
        self.arrived.append(request)

    def on_outputs(self, news: OutputNews) -> None:
        self.news.append(news)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


@pytest.fixture
def witness() -> Witness:
    return Witness()


@pytest.fixture
def outputs(witness: Witness) -> OutputProcessor:
    return OutputProcessor(None, [witness])


def add(outputs: OutputProcessor, n: int = 1, name: str = "r") -> list[str]:
    inputs = InputProcessor(None, vocab_size=50, max_model_len=64, max_logprobs=5, eos_ids=(), seed=0)
    params = SamplingParams(n=n, max_tokens=9, temperature=1.0, detokenize=False)
    prepared = inputs.prepare(name, [1, 2, 3, 4], params, arrival=0.0)
    outputs.add(prepared, {"traceparent": "x"})
    return [request.id for request in prepared.requests]


def test_one_call_per_step(outputs: OutputProcessor, witness: Witness, clock: list[float]) -> None:
    (a,), (b,) = add(outputs, name="a"), add(outputs, name="b")
    assert [request.request_id for request in witness.arrived] == ["a", "b"]
    assert witness.arrived[0].prompt_ids == (1, 2, 3, 4)
    clock[0] = 101.0
    outputs.process([TokenDelta(a, [7], cached_tokens=2, scheduled_at=100.5), TokenDelta(b, [8], scheduled_at=100.5)])
    clock[0] = 101.25
    outputs.process([TokenDelta(a, [7]), TokenDelta(b, [8], "length")])
    first, second = witness.news
    assert (first.tokens, first.first_tokens, first.intervals) == (2, [1.0, 1.0], [])
    assert first.prompts == [(4, 2), (4, 0)]
    assert (second.tokens, second.first_tokens, second.intervals) == (2, [], [0.25, 0.25])
    assert (first.finished, [done.request_id for done in second.finished]) == ([], ["b"])
    done = second.finished[0]
    assert (done.prompt_tokens, done.generated, done.reasons, done.trace_headers) == (
        4,
        (2,),
        ("length",),
        {"traceparent": "x"},
    )
    assert (done.metrics.queued_ts, done.metrics.scheduled_ts, done.metrics.first_token_ts) == (100.0, 100.5, 101.0)
    assert (done.metrics.last_token_ts, done.metrics.finished_ts) == (101.25, 101.25)


def test_intervals_are_of_choices(outputs: OutputProcessor, witness: Witness, clock: list[float]) -> None:
    """Two choices of a request that get tokens in the same step are not zero seconds apart."""
    names = add(outputs, n=2)
    outputs.process([TokenDelta(name, [7]) for name in names])
    clock[0] += 0.5
    outputs.process([TokenDelta(names[0], [7], "stop"), TokenDelta(names[1], [7])])
    clock[0] += 0.25
    outputs.process([TokenDelta(names[1], [7], "length")])
    assert [news.intervals for news in witness.news] == [[], [0.5, 0.5], [0.25]]
    assert [len(news.prompts) for news in witness.news] == [1, 0, 0]
    (done,) = witness.news[2].finished
    assert (done.reasons, done.generated) == (("stop", "length"), (2, 3))
    assert not witness.news[1].finished


def test_who_is_dropped_is_told(outputs: OutputProcessor, witness: Witness, clock: list[float]) -> None:
    names = add(outputs, n=2)
    outputs.process([TokenDelta(names[0], [7], "stop")])
    clock[0] += 1.0
    outputs.forget("r")
    outputs.forget("r")
    outputs.process([TokenDelta(names[1], [7])])
    (done,) = [done for news in witness.news for done in news.finished]
    assert done.reasons == ("stop", "abort")
    assert done.metrics.finished_ts == clock[0]
    assert witness.news[-1].tokens == 0


def test_a_replay_does_not_change_what_was_cached(outputs: OutputProcessor, witness: Witness) -> None:
    (name,) = add(outputs)
    outputs.process([TokenDelta(name, [7], cached_tokens=2)])
    outputs.process([TokenDelta(name, [7], "length", cached_tokens=3)])
    assert witness.news[-1].finished[0].cached_tokens == 2
