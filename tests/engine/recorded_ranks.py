"""Ranks on CPUs that record steps as ranks on GPUs do: `python recorded_ranks.py MODEL`, or `rank ...` in a rank's process.

A recording runs the same calls once more (`recorded_steps.py`). Prints the tokens of one rank and of several, and what each
rank recorded, replayed and exchanged.
"""

import hashlib
import json
import os
import sys

import pytest
import recorded_steps

from quire import LLM, SamplingParams
from quire.device.cpu.device import CPUDevice
from quire.dist.shared_memory import SharedMemoryGroup
from quire.engine.executor import worker, workers
from quire.features.speculation.device.part import SpeculationPart
from quire.runner import graphs
from quire.runner.core import RunnerCore

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SETTINGS = {"device": "cpu", "dtype": "float32", "kv_cache_memory_bytes": 32 << 20, "skip_tokenizer_init": True}
PROMPTS = [list(range(3, 3 + n)) for n in (33, 5, 18, 9)]
SIZES = {
    "one": {},
    "tp 2 x pp 2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "tp 2, one fails": {"tensor_parallel_size": 2},
    "tp 2, drafts": {"tensor_parallel_size": 2, "speculative_config": {"num_speculative_tokens": 3}},  # by the model itself
}
calls = []  # collectives of this rank


def play() -> None:
    """Let this process record: for good."""
    recorded_steps.play_recording(pytest.MonkeyPatch())
    graphs.BORROWED_REPLAYS = 6  # so that borrowed graphs are replaced within the test
    SharedMemoryGroup.records = True
    for name in ("add", "join"):
        setattr(SharedMemoryGroup, name, noted(name, getattr(SharedMemoryGroup, name)))
    RunnerCore.recorded = recorded


class Failing(recorded_steps.Recorder):
    """It runs out of memory at its third recording."""

    def capture(self, run):
        self.left = getattr(self, "left", 4) - 1  # the first one is repeated
        if self.left < 0:
            raise RuntimeError("out of memory")
        return super().capture(run)


def noted(name, method):
    def call(self, part, *more):
        calls.append((name, tuple(part.shape), *more))
        return method(self, part, *more)

    return call


def recorded(self):
    counts = self.counts
    digest = hashlib.sha256(str(calls).encode()).hexdigest()
    return {
        "counts": [counts.captures, counts.replays],
        "calls": len(calls),
        "digest": digest,
        "buckets": list(map(str, self.graphs._recorded)),
        "drafts": [part.drafter._graphs.captures for part in self._parts if isinstance(part, SpeculationPart)],
    }


def main() -> None:
    play()
    if sys.argv[1] == "rank":
        if "FAILING" in os.environ:
            CPUDevice.recorder = lambda _: Failing()
        sys.exit(worker.main(sys.argv[2:]))
    workers.COMMAND = (sys.executable, __file__, "rank")
    said = {}
    for name, sizes in SIZES.items():
        calls.clear()
        os.environ.pop("FAILING", None)
        if name == "tp 2, one fails":
            os.environ["FAILING"] = "1"
        if "speculative_config" in sizes:
            sizes["speculative_config"]["model"] = sys.argv[1]
        llm = LLM(sys.argv[1], max_num_seqs=8, max_num_batched_tokens=64, **SETTINGS, **sizes)
        tokens = []
        for few in (PROMPTS, PROMPTS[:3], PROMPTS[:1], PROMPTS):
            tokens.append([list(output.outputs[0].token_ids) for output in llm.generate(few, GREEDY, use_tqdm=False)])
            for _ in range(3):
                llm.llm_engine.core.idle()
        found = llm.llm_engine.core.executor.call_all("recorded")
        said[name] = {"tokens": tokens, "ranks": found}
        llm.llm_engine.shutdown()
    print(json.dumps(said), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
