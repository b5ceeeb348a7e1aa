"""What deciding costs: processor time of `Scheduler.schedule` and `commit` for a step in which every request gets one token.

    python benchmarks/host_cost.py [--running 1 64 256 1024] [--outputs 16 128 1024 8192] [--depth 1]

There is no model: the results are invented. Prompts differ in length, so that requests do not all need pages in the same step;
there are twice as many pages as they will ever need. Two tables: against the number of running requests, and, at 256 of them,
against the length of their outputs. Each figure is the mean over the last steps, in microseconds: pages are taken and published
for some requests in one step, and for none in the next.
"""

import argparse
import time
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from quire.cache.layout import make_layout
from quire.sched.plan_builder import Scheduled
from quire.sched.scheduler import Scheduler
from quire.step_loop import little_garbage_collection
from quire.types.cache import LayerCache
from quire.types.plan import StepResult
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams

PAGE, PROMPT, VOCABULARY = 16, 64, 1000
SPREAD = 64  # of the prompts' lengths: pages are taken and published for so many tokens at a time
WATCHED = 3 * SPREAD  # steps, the last ones


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="+", default=[1, 64, 256, 1024])
    parser.add_argument("--outputs", type=int, nargs="+", default=[16, 128, 1024, 8192])
    parser.add_argument("--depth", type=int, default=1, help="steps in flight while the next one is planned")
    parser.add_argument("--at", type=int, default=256, help="running requests in the second table")
    options = parser.parse_args()
    print(f"{'running':>8}{'output':>8}{'schedule':>10}{'commit':>10}{'both':>10}  us per step (mean)")
    rows = [(count, 256) for count in options.running] + [(options.at, length) for length in options.outputs]
    for count, length in rows:
        with little_garbage_collection():  # as engines do
            planning, committing = np.array(list(steps(count, length, options.depth)))[-WATCHED:].T * 1e6
        both = planning + committing
        print(f"{count:>8}{length:>8}" + "".join(f"{part.mean():>10.1f}" for part in (planning, committing, both)))


def steps(count: int, length: int, depth: int) -> Iterator[tuple[float, float]]:
    """Seconds of planning and of committing, for every step in which all run and none ends."""
    longest = PROMPT + SPREAD + length
    scheduler = Scheduler(
        make_layout([LayerCache(8, 128, None)], PAGE, 2), pages=2 * count * (longest // PAGE + 1), max_model_len=longest,
        max_batched_tokens=count * (PROMPT + SPREAD), max_seqs=count,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    for number in range(count):
        scheduler.add(request(number, length, rng))
    sampled = rng.integers(0, VOCABULARY, (64, count), dtype=np.int32)
    flights: deque[Scheduled] = deque()
    clock, generated = time.thread_time, 0
    while generated < length - 1 - depth:
        began = clock()
        scheduled = scheduler.schedule(0.0)
        planning = clock() - began
        assert scheduled is not None
        flights.append(scheduled)
        if len(flights) <= depth:
            continue
        landed = flights.popleft()
        lengths = landed.plan.sample.astype(np.int32)
        result = StepResult(landed.plan.step, lengths, sampled[generated % 64][: lengths.sum()])
        began = clock()
        scheduler.results.commit(landed, result)
        committing = clock() - began
        if len(landed.requests) == count and landed.plan.sample.all():
            generated += 1
            if generated > 1 + depth:
                yield planning, committing


def request(number: int, length: int, rng: np.random.Generator) -> EngineRequest:
    prompt: Sequence[int] = rng.integers(0, VOCABULARY, PROMPT + number % SPREAD).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=length)
    ends = frozenset({VOCABULARY})
    return EngineRequest(str(number), tuple(prompt), params, 0, stop_ids=ends, eos_ids=ends, arrival=0.0)


if __name__ == "__main__":
    main()
