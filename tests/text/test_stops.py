from hypothesis import given
from hypothesis import strategies as st

from quire.text.detokenizer import StopStrings

LETTERS = st.text(alphabet="abc", max_size=30)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4)


def reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def could_be_stop(text: str, stops: list[str]) -> int:
    """Length of the longest suffix that may still become a stop string."""
    return max(n for n in range(len(text) + 1) if n == 0 or any(s.startswith(text[-n:]) and len(s) > n for s in stops))


@given(LETTERS, STOPS, st.booleans(), st.lists(st.integers(1, 6)))
def test_every_chunking_gives_the_reference(text: str, stops: list[str], include: bool, sizes: list[int]) -> None:
    machine = StopStrings(stops, include=include)
    out, seen, stopped = "", "", None
    while len(seen) < len(text) and stopped is None:
        size = sizes.pop() if sizes else 1
        chunk = text[len(seen) : len(seen) + size]
        seen += chunk
        emitted, stopped = machine.feed(chunk)
        out += emitted
        if stopped is None:
            assert out == seen[: len(seen) - could_be_stop(seen, stops)]  # nothing is held that need not be
    out += machine.finish()
    assert (out, stopped) == reference(text, stops, include)


def test_the_stop_that_is_complete_first_wins() -> None:
    assert StopStrings(["abcd", "bc"]).feed("xabcd") == ("xa", "bc")


def test_of_two_that_end_together_the_longer_wins() -> None:
    assert StopStrings(["c", "abc"]).feed("xabc") == ("x", "abc")


def test_text_is_shown_as_soon_as_it_cannot_become_a_stop() -> None:
    machine = StopStrings(["\n\nHuman:"])
    assert machine.feed("Hi\n") == ("Hi", None)
    assert machine.feed("\nthere") == ("\n\nthere", None)
    assert machine.feed("\n\nHum") == ("", None)
    assert machine.finish() == "\n\nHum"
    assert machine.finish() == ""


def test_nothing_comes_after_the_stop() -> None:
    machine = StopStrings(["END"], include=True)
    assert machine.feed("a END b") == ("a END", "END")
    assert machine.feed("more") == ("", "END")
    assert machine.finish() == ""


def test_a_long_stop_string_costs_no_more_per_character() -> None:
    machine = StopStrings(["a" * 20_000 + "b"])
    assert machine.feed("a" * 40_000)[0] == "a" * 20_000
