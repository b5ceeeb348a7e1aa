"""Kills and stops engine processes and ranks at random moments under load, and sees that every stream ends with the same text.

    python benchmarks/losses.py MODEL --times 200 --tensor-parallel-size 2

For every loss it tells how long it took from the signal to the next token of any stream that the process had a part in. At the
end no process and no file in /dev/shm may be left. Exit code 1: a text differed, or something was left.
"""

import argparse
import asyncio
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from quire.async_llm import AsyncLLM
from quire.config.args import EngineArgs
from quire.types.sampling import RequestOutputKind, SamplingParams

STREAMS, TOKENS = 4, 150
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
QUIET = 0.3  # seconds between two losses, at most


class Load:
    """Streams that never end: as soon as one has, it begins again."""

    def __init__(self, llm: AsyncLLM, streams: int, tokens: int) -> None:
        self.llm, self.tokens = llm, tokens
        self.expected: list[list[int]] = []
        self.ended = self.wrong = 0
        self.latest = [0.0] * streams  # when each got a token
        self.over = False

    async def once(self, i: int) -> list[int]:
        params = SamplingParams(
            max_tokens=self.tokens, temperature=1.0, seed=i, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        tokens: list[int] = []
        name = f"{i}-{time.monotonic_ns()}"
        async for output in self.llm.generate({"prompt_token_ids": list(range(5 + i, 45 + i))}, params, name):
            tokens += output.outputs[0].token_ids
            if output.outputs[0].finish_reason == "error":
                raise RuntimeError(f"stream {i} ended after {len(tokens)} tokens: {output}")
            self.latest[i] = time.monotonic()
        return tokens

    async def run(self, i: int) -> None:
        while not self.over:
            self.wrong += await self.once(i) != self.expected[i]
            self.ended += 1


def descendants(pid: int) -> dict[int, str]:
    """Processes, and what they call themselves."""
    found: dict[int, str] = {}
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(name) for task in tasks for name in (task / "children").read_text().split()]
        for child in children:
            found |= {child: Path(f"/proc/{child}/comm").read_text().strip()} | descendants(child)
    except OSError:  # gone meanwhile
        pass
    return found


def ours() -> dict[int, str]:
    """Those that were started since this file was loaded."""
    return {pid: name for pid, name in descendants(os.getpid()).items() if pid not in BEFORE}


def victims() -> dict[int, str]:
    """Processes with a part in a step: pid -> what it is."""
    kinds = {"quire-engine": "engine", "quire-rank": "rank"}
    return {pid: kinds[name] for pid, name in ours().items() if name in kinds}


BEFORE = frozenset(descendants(os.getpid()))


async def lose(
    load: Load, rng: random.Random, times: int, signals: Sequence[signal.Signals] = SIGNALS, tell: bool = True
) -> dict[str, list[float]]:
    """-> seconds to the next token, by who was lost and how."""
    waits: dict[str, list[float]] = {}
    for number in range(times):
        await asyncio.sleep(rng.random() * QUIET)
        while load.llm.state != "ready" or not victims():
            await asyncio.sleep(0.01)
        pid, what = rng.choice(sorted(victims().items()))
        how = rng.choice(signals)
        kind = f"{what}, {how.name}"
        at, restarts = time.monotonic(), load.llm.restarts
        os.kill(pid, how)
        while load.llm.restarts == restarts:
            await asyncio.sleep(0.005)
        at_restart = time.monotonic()
        while max(load.latest) < at_restart:
            await asyncio.sleep(0.005)
        waits.setdefault(kind, []).append(max(load.latest) - at)
        while min(load.latest) < at_restart:  # a request that is lost three times without progress is taken for the cause
            await asyncio.sleep(0.005)
        if not tell:
            continue
        print(f"{number + 1:4} {kind:16} {at_restart - at:5.2f} s until noticed, {waits[kind][-1]:5.2f} s until the next token")
    return waits


async def wait_warm() -> None:
    """Wait until a lost engine would be forked; the kernel cuts process names to 15 characters."""
    while "quire-fork-serv" not in ours().values():
        await asyncio.sleep(0.05)


async def none_left() -> dict[int, str]:
    """Processes with a part in engines that are still there a while after the end."""
    deadline = time.monotonic() + 10
    while (left := {pid: name for pid, name in ours().items() if name.startswith("quire-")}) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    return left


async def measure(args: EngineArgs, times: int, seed: int, streams: int, tokens: int) -> int:
    llm = AsyncLLM.from_engine_args(args)
    try:
        await llm.wait_ready()
        load = Load(llm, streams, tokens)
        load.expected = [await load.once(i) for i in range(streams)]
        running = [asyncio.create_task(load.run(i)) for i in range(streams)]
        await wait_warm()
        began = time.monotonic()
        waits = await lose(load, random.Random(seed), times)
        load.over = True
        await asyncio.gather(*running)
        print(f"{times} losses in {time.monotonic() - began:.0f} s; {load.ended} streams ended, {load.wrong} with other tokens")
        for kind, seconds in sorted(waits.items()):
            print(f"{kind:16} n {len(seconds):3}  median {statistics.median(seconds):.2f} s  longest {max(seconds):.2f} s")
    finally:
        llm.shutdown()
    return int(bool(load.wrong or await none_left()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--streams", type=int, default=STREAMS)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--tensor-parallel-size", type=int, default=2)
    parser.add_argument("--data-parallel-size", type=int, default=1)
    parser.add_argument("--enable-expert-parallel", action="store_true")
    parser.add_argument("--skip-tokenizer-init", action="store_true")
    options = parser.parse_args()
    args = EngineArgs(
        model=options.model,
        device="cpu",
        dtype="float32",
        tensor_parallel_size=options.tensor_parallel_size,
        data_parallel_size=options.data_parallel_size,
        enable_expert_parallel=options.enable_expert_parallel,
        skip_tokenizer_init=options.skip_tokenizer_init,
        kv_cache_memory_bytes=8 << 20,
        max_engine_restarts=options.times + 1,
        engine_restart_window=1e9,
        warm_restart=True,
    )
    before = set(Path("/dev/shm").iterdir())
    code = asyncio.run(measure(args, options.times, options.seed, options.streams, options.tokens))
    left = set(Path("/dev/shm").iterdir()) - before
    print(f"left in /dev/shm: {len(left)}")
    return code or int(bool(left))


if __name__ == "__main__":
    sys.exit(main())
