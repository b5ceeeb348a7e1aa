"""Many adapters, few adapter slots: requests in a Zipf mixture, with loads, unloads, updates in place and aborts, on an
engine without a model. Its tokens depend on the version of the adapter that a row really ran with and on
whatever the cache pages hold, so every answer is compared with what that version says alone.

    python benchmarks/adapter_traffic.py [--adapters 2000] [--requests 50000] [--slots 8] [--host 64] [--seed 0]

Prints how many answers were right, how many were refused because the files had changed before they were read, and how often
adapters were read and put on the device. An answer of a wrong adapter or version, a page that is lost or an adapter that is
held by nobody ends it with an error.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

from quire.cache.layout import make_layout
from quire.config.features import cache_salt
from quire.engine.core import EngineCore
from quire.engine.executor.fake import FakeExecutor
from quire.engine.executor.fake_model import FakeModel
from quire.features.lora.client import AdapterNames, NamedAdapter
from quire.sched.scheduler import Scheduler
from quire.types.adapter import LoRARequest
from quire.types.cache import LayerCache
from quire.types.errors import RequestError
from quire.types.prompts import NO_EXTRAS, Extras
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams

LAYOUT = make_layout([LayerCache(1, 8), LayerCache(1, 8, 6)], 4, 2)
MODEL = FakeModel.of(LAYOUT)
PAGES, SEATS, LENGTH, BUDGET = 400, 32, 64, 128
PREFIXES = 6  # that prompts begin with: an adapter that read another's pages would be found out
MAX_OPEN = 96


@dataclass
class Tally:
    right: int = 0
    refused: int = 0
    aborted: int = 0
    updates: int = 0
    unloads: int = 0
    reads: int = 0
    puts: int = 0
    wrong: list[str] = field(default_factory=list)


def _replace(file: Path, content: bytes) -> None:
    """Write a file at once: a thread of the engine may read it meanwhile."""
    beside = file.parent.with_name(f"{file.parent.name}.{file.name}")
    beside.write_bytes(content)
    beside.replace(file)


class Traffic:
    def __init__(self, folder: Path, adapters: int, slots: int, host: int, depth: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._folder, self._contents = folder, [0] * adapters
        scheduler = Scheduler(LAYOUT, pages=PAGES, max_model_len=LENGTH, max_batched_tokens=BUDGET, max_seqs=SEATS)
        executor = FakeExecutor(LAYOUT, MODEL, pages=PAGES, max_seqs=SEATS, max_model_len=LENGTH)
        self.core = EngineCore(scheduler, executor, depth, adapters=(slots, host))
        self.core.constraints.on_refused = self._on_refused
        self._names = AdapterNames(enabled=True)
        self._weights = list(accumulate(1 / (rank + 1) for rank in range(adapters)))
        self._open: dict[str, tuple[EngineRequest, list[int]]] = {}
        self._aborted: set[str] = set()
        self.tally = Tally()
        for number in range(adapters):
            self._write(number)

    def play(self, requests: int) -> Tally:
        sent = 0
        while sent < requests or self._open:
            for _ in range(self._random.randrange(6)):
                if sent < requests and len(self._open) < MAX_OPEN:
                    self._send(f"r{sent}")
                    sent += 1
            chance = self._random.random()
            if chance < 0.02:
                self._update(self._pick())
            elif chance < 0.03:
                self._unload(self._pick())
            elif chance < 0.05 and self._open:
                name = self._random.choice(list(self._open))
                self._aborted.add(name)
                self.core.abort([name])
            for delta in self.core.step():
                self._hear(delta.request_id, delta.token_ids, delta.finish_reason)
        while self.core.has_unfinished:
            self.core.step()
        self.core.scheduler.roster.check()
        self.core.adapters.check()
        stats = self.core.stats
        if stats.free_pages != stats.pages:
            self.tally.wrong.append(f"{stats.pages - stats.free_pages} pages are lost")
        self.tally.reads, self.tally.puts = stats.adapter_reads, stats.adapter_puts
        self.core.stop()
        return self.tally

    def _pick(self) -> int:
        return self._random.choices(range(len(self._contents)), cum_weights=self._weights)[0]

    def _directory(self, number: int) -> Path:
        return self._folder / f"a{number}"

    def _write(self, number: int) -> None:
        directory = self._directory(number)
        directory.mkdir(exist_ok=True)
        header = json.dumps({"__metadata__": {"content": f"{number} {self._contents[number]}"}}).encode()
        _replace(directory / "adapter_config.json", json.dumps({"r": 1 + number % 16}).encode())
        _replace(directory / "adapter_model.safetensors", len(header).to_bytes(8, "little") + header)

    def _request(self, number: int, inplace: bool = False) -> LoRARequest:
        return LoRARequest(f"a{number}", number + 1, str(self._directory(number)), load_inplace=inplace)

    def _named(self, number: int, inplace: bool = False) -> NamedAdapter:
        lora = self._names.check(self._request(number, inplace))
        known = self._names.known(lora)
        if known is None:
            known = self._names.resolve(lora)
            gone = self._names.put(known)
            if gone is not None:
                self.core.retire_adapter(gone)
        return known

    def _update(self, number: int) -> None:
        self._contents[number] += 1
        self._write(number)
        self._named(number, inplace=True)
        self.tally.updates += 1

    def _unload(self, number: int) -> None:
        if f"a{number}" in self._names:
            gone = self._names.remove(f"a{number}")
            if gone is not None:
                self.core.retire_adapter(gone)
            self.tally.unloads += 1

    def _send(self, name: str) -> None:
        extras: Extras = NO_EXTRAS if self._random.random() < 0.1 else self._named(self._pick()).extras
        prefix = self._random.randrange(PREFIXES)
        prompt = [7 * prefix + i for i in range(9)] + [
            self._random.randrange(1000) for _ in range(self._random.randrange(1, 6))
        ]
        params = SamplingParams(max_tokens=self._random.randrange(1, 9))
        seed = self._random.randrange(1 << 32)
        spec = EngineRequest(
            name, tuple(prompt), params, seed, frozenset(), frozenset(), 0.0, salt=cache_salt(extras), extras=extras
        )
        self._open[name] = (spec, [])
        self.core.add(spec)

    def _on_refused(self, name: str, error: RequestError) -> None:
        self._open.pop(name, None)
        self.tally.refused += 1
        if "have changed since" not in str(error):
            self.tally.wrong.append(f"{name} was refused: {error}")

    def _hear(self, name: str, tokens: list[int], finish: str | None) -> None:
        if name not in self._open:
            return
        spec, said = self._open[name]
        said += tokens
        if finish is None:
            return
        del self._open[name]
        version = "" if spec.extras.lora is None else spec.extras.lora.version
        seed, most = spec.seed, spec.params.max_tokens or 0
        expected = MODEL.generate(spec.prompt, seed=seed, max_tokens=most, adapter=version)
        if said != expected[: len(said)] or (finish != "length" and name not in self._aborted):
            self.tally.wrong.append(f"{name} ({finish}): {said} instead of {expected}")
        elif name in self._aborted:
            self.tally.aborted += 1
        else:
            self.tally.right += 1


def play(adapters: int, requests: int, slots: int, host: int, depth: int = 1, seed: int = 0) -> Tally:
    with tempfile.TemporaryDirectory() as folder:
        return Traffic(Path(folder), adapters, slots, host, depth, seed).play(requests)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag, default in (("adapters", 2000), ("requests", 50_000), ("slots", 8), ("host", 64), ("depth", 1), ("seed", 0)):
        parser.add_argument(f"--{flag}", type=int, default=default)
    asked = vars(parser.parse_args())
    began = time.monotonic()
    tally = play(**asked)
    print(f"{asked}: {time.monotonic() - began:.1f} s")
    print(f"right {tally.right}, aborted {tally.aborted}, refused after a change {tally.refused}, wrong {len(tally.wrong)}")
    print(f"updates {tally.updates}, unloads {tally.unloads}, reads {tally.reads}, puts {tally.puts}")
    for line in tally.wrong[:20]:
        print(line)
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
