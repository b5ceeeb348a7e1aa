from array import array

from quire.sched.limits import finish
from quire.types.request import EngineRequest, Request
from quire.types.sampling import RepetitionDetectionParams, SamplingParams


def after(sampled: list[int], limit: int = 100, **params) -> object:
    spec = EngineRequest("r", (7, 7, 7), SamplingParams(max_tokens=90, **params), 0, frozenset({1, 2}), frozenset({2}), 0.0)
    return finish(Request(spec, limit=limit, order=0, tokens=array("i", [7, 7, 7, *sampled])), sampled[-1])


def test_stop_ids():
    assert after([5]) is None
    assert after([5, 1]) == ("stop", 1)
    assert after([5, 2]) == ("stop", None)


def test_not_before_min_tokens_are_out():
    assert after([5, 1], min_tokens=2) is None
    assert after([5, 5, 1], min_tokens=2) == ("stop", 1)


def test_length_even_before_min_tokens_and_a_stop_id_wins():
    assert after([5, 5], limit=5, min_tokens=9) == ("length", None)
    assert after([5, 1], limit=5) == ("stop", 1)


def test_repetition():
    pattern = {"repetition_detection": RepetitionDetectionParams(max_pattern_size=3, min_pattern_size=2, min_count=3)}
    assert after([8, 9] * 3, **pattern) == ("repetition", None)
    assert after([8, 9, 8, 9, 8], **pattern) is None
    assert after([3, 4, 5] * 3, **pattern) == ("repetition", None)
    assert after([3, 4, 5, 3, 4, 5, 3, 4, 6], **pattern) is None
    assert after([6] * 5, **pattern) is None, "a pattern of one is too small"
    assert after([6] * 6, **pattern) == ("repetition", None), "but two of them are a pattern of two"
    assert after([7] * 3, **pattern) is None, "the prompt does not count"
    off = {"repetition_detection": RepetitionDetectionParams()}
    assert after([6] * 50, **off) is None
