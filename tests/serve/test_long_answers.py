"""Long answers with tool calls, as no model should write them: reading them takes time in proportion to length, in turns."""

import asyncio
import gc
import time

import pytest

from parse_samples import FAMILIES, Folded
from quire.serve.events import Reading
from quire.text.pacing import Pace
from quire.text.parse.format import combine
from quire.text.parse.formats import BUILT_IN
from quire.types.outputs import CompletionOutput

TOOLS = {"f": {"properties": {"a": {"type": "array"}, "s": {"type": "string"}}}}
LONG = 100_000  # characters
TURN = 0.05  # seconds of processor time
TRIES = 4
CALL = [("f", {"a": ["@"], "s": "s"})]


def one_long_value(write, item):
    text = write("", "", CALL)
    return text.replace('"@"', "@").replace("'@'", "@").replace("@", ",".join([item] * (LONG // len(item))))


def calls_in_thought(write, item):
    text = write("", "", CALL).replace("@", item)
    return write("@", "", []).replace("@", text * (LONG // len(text)))


def only(mark):
    return lambda *_: mark * (LONG // len(mark))


@pytest.fixture(autouse=True, scope="module")
def frozen():
    gc.collect()
    gc.freeze()  # as the server does when the model is loaded
    yield
    gc.unfreeze()


CASES = [
    ("hermes", one_long_value),
    ("qwen3_coder", one_long_value),  # told when it is complete
    ("glm45", one_long_value),
    ("gemma4", one_long_value),
    ("llama4_pythonic", one_long_value),
    ("hermes", calls_in_thought),  # held back until the thought ends
    ("granite", calls_in_thought),
    ("qwen3_coder", calls_in_thought),
    ("glm45", only("<tool_call>")),
    ("hermes", only('<tool_call>{"arguments": {"n": 1}}')),  # calls without names
    ("minimax_m2", only('<invoke name="f">')),
]


async def listen(form, script, size):
    """What was read of pieces of this size, and the longest time in which nobody else had a turn."""
    longest, last, over = 0.0, time.thread_time(), False

    async def pulse():
        nonlocal longest, last
        while not over:
            now = time.thread_time()
            longest, last = max(longest, now - last), now
            await asyncio.sleep(0)

    beside = asyncio.create_task(pulse())
    reader, pace, events = Reading(form=form, tools=TOOLS).reader(), Pace(), []
    for begin in range(0, len(script), size):
        end = begin + size
        reason = "stop" if end >= len(script) else None
        part = CompletionOutput(index=0, text=script[begin:end], token_ids=[], finish_reason=reason)
        events += await reader.read(part, pace)
        if begin % (64 * size) == 0:
            pace.begin()
            await asyncio.sleep(0)
    over = True
    await beside
    return Folded.of(events), longest


@pytest.mark.parametrize(("family", "make"), CASES)
def test_reading_takes_turns(family, make):
    tool, thinking, write, _ = FAMILIES[family]
    form = combine(BUILT_IN[tool], BUILT_IN[thinking])
    script = make(write, "[]")
    stalls, said = [], []
    for _ in range(TRIES):
        told, longest = asyncio.run(listen(form, script, len(script)))
        stalls.append(longest)
        said.append(told)
        if longest < TURN:
            break
    assert min(stalls) < TURN, [round(1000 * stall) for stall in stalls]
    assert asyncio.run(listen(form, script, 50))[0] == said[0]
    assert len(said[0].text) + len(said[0].reasoning) + sum(len(arguments) for _, arguments in said[0].calls) > LONG // 10
