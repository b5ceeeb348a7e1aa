"""What a GPU waits for: the host's time from a step's result to the next launch, where drafts of the host need that result.

    python benchmarks/turn.py [--rows 1 4 16] [--drafts 0 4 8]

No GPU is needed: a CPU plays one. Graphs are chosen and their inputs written as on a GPU, but a replay does nothing and the
same tokens are always there, so that what is left is the host's own time, without that of CUDA's calls. All drafts are wrong.
"""

import argparse
import json
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from quire import LLM, SamplingParams
from quire.attn import backend
from quire.attn.reference import ReferenceAttention
from quire.attn.triton import FixedCuts
from quire.device.base import Prepared
from quire.device.cpu.device import CPUDevice
from quire.device.cuda import updates
from quire.engine.core import EngineCore
from quire.engine.executor.local import LocalExecutor
from quire.runner import graph_inputs, transfer
from quire.runner.graphs import Graphs, StepRecorder
from quire.runner.sampler.pipeline import Sampler
from quire.runner.step import Runner
from quire.sched.results import Results
from quire.sched.scheduler import Scheduler

DRAWN, WRONG, VOCABULARY = 7, 9, 2048
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 64,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16,
    "vocab_size": VOCABULARY, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "eos_token_id": 2,
}  # fmt: skip


class Guessing:
    def propose(self, text: Any, most: int) -> list[int]:  # noqa: ARG002
        return [WRONG] * most


class Event:
    def record(self, stream: Any) -> None: ...

    def query(self) -> bool:
        return True


class Replayed:
    def __init__(self, rows: int) -> None:
        self._logits = torch.zeros(rows, VOCABULARY)

    def replay(self) -> torch.Tensor:
        return self._logits


class Recorder:
    def taken_bytes(self) -> int:
        return 0


class Updates(updates.CUDAUpdates):
    def __init__(self) -> None:
        self._buffer, self._sent, self._stream = None, deque(), None


def play_a_gpu() -> None:
    drawn = torch.zeros(2, 4096, dtype=torch.int32)
    drawn[0] = DRAWN
    facts = CPUDevice.facts

    def record(_: Any, bucket: Any) -> tuple[Replayed, torch.Tensor]:
        replayed = Replayed(bucket.rows)
        return replayed, replayed.replay()

    def send(buffer: Any, _: Any) -> None:
        buffer._run = buffer._word = 0

    def new_buffer() -> updates.StagingBuffer:
        return updates.StagingBuffer(torch.empty(8 * updates.RUNS + updates.WORDS, dtype=torch.int32), Event())

    backend.BACKENDS = {"reference": backend.BACKENDS["reference"]}
    ReferenceAttention.fixed = lambda *_: FixedCuts(16, 16)
    StepRecorder.record, updates.StagingBuffer.send, updates._new_buffer = record, send, new_buffer
    CPUDevice.records, CPUDevice.recorder, CPUDevice.updates = True, lambda _: Recorder(), lambda _: Updates()
    CPUDevice.prepare = lambda _device, model, _setting: Prepared(model.run_blocks)
    CPUDevice.facts = lambda *args: replace(facts(*args), overlaps=True, times_steps=False)
    Sampler.sample_fused, Sampler.latest = (lambda *_: None), property(lambda _: drawn)


class Marks:
    """Moments, by what had happened just then."""

    def __init__(self) -> None:
        self._turns: list[list[tuple[str, float]]] = [[]]

    def after(self, owner: Any, name: str, what: str) -> None:
        inner: Callable[..., Any] = getattr(owner, name)

        def outer(*args: Any, **options: Any) -> Any:
            result = inner(*args, **options)
            if what == "landed":
                self._turns.append([])
            self._turns[-1].append((what, time.perf_counter()))
            return result

        setattr(owner, name, outer)

    def clear(self) -> None:
        self._turns = [[]]

    def read(self) -> tuple[float, dict[str, float]]:
        """Microseconds from a result to the next launch (medians), and those before each mark."""
        parts, whole = defaultdict(list), []
        for turn in self._turns:
            if [what for what, _ in turn][:1] == ["landed"] and "launched" in dict(turn):
                moments = turn[: [what for what, _ in turn].index("launched") + 1]
                whole.append(moments[-1][1] - moments[0][1])
                for (_, begin), (what, end) in pairwise(moments):
                    parts[what].append(end - begin)
        return 1e6 * median(whole), {what: 1e6 * median(times) for what, times in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 4, 8])
    options = parser.parse_args()
    torch.set_num_threads(1)
    play_a_gpu()
    marks = Marks()
    for owner, name, what in (
        (transfer.Download, "wait", "landed"), (Results, "commit", "committed"), (EngineCore, "_guess", "guessed"),
        (Scheduler, "schedule", "planned"), (Runner, "_take_in", "taken in"), (graph_inputs.Inputs, "_deliver", "written"),
        (Graphs, "run", "launched"), (LocalExecutor, "submit", "submitted"),
    ):  # fmt: skip
        marks.after(owner, name, what)
    for drafts in options.drafts:
        asked = {"method": "custom_class", "model": f"{__name__}:Guessing", "num_speculative_tokens": drafts, "adaptive": False}
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
            llm = LLM(
                folder, load_format="dummy", skip_tokenizer_init=True, max_num_seqs=max(options.rows), device="cpu",
                dtype="float32", kv_cache_memory_bytes=1 << 28, enable_prefix_caching=False, max_num_batched_tokens=8192,
                speculative_config=asked if drafts else None,
            )  # fmt: skip
        for rows in options.rows:
            prompts = [{"prompt_token_ids": [10 + (7 * i + j) % 1000 for j in range(100)]} for i in range(rows)]
            for tokens in (40, 300):
                marks.clear()
                params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
                llm.generate(prompts, params, use_tqdm=False)
            whole, parts = marks.read()
            told = ", ".join(f"{what} {microseconds:.0f}" for what, microseconds in parts.items())
            print(f"{rows} rows, {drafts} drafts each: {whole:.0f} us from a result to the next launch ({told})", flush=True)
        llm.llm_engine.shutdown()


if __name__ == "__main__":
    main()
