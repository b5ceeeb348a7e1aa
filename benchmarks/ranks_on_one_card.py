"""What collectives between ranks cost on one GPU that all ranks share: Llama-8B's shape, random weights, tp 2 and one rank.

    python benchmarks/ranks_on_one_card.py [--layers 32] [--rows 1 64] [--seconds 330]

It starts NVIDIA's multi-process service (MPS), without which ranks take turns on the GPU. First it compares the tokens of a
tiny model on ranks and stages with those of one rank. Then it prints one table: ms per decode step, steps that replayed a CUDA
graph, exchanges between hosts per step, and the time of one all-reduce. What does not fit into the time is left out, and said
so. Without a GPU it measures nothing.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

CONTROL = "nvidia-cuda-mps-control"
SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
    "torch_dtype": "bfloat16", "tie_word_embeddings": False, "bos_token_id": 128000, "eos_token_id": 128001,
}  # fmt: skip
TINY = SHAPE | {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 16, "vocab_size": 512, "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2,
    "torch_dtype": "float32",
}  # fmt: skip
HOST, DEVICE = {"QUIRE_CUDA_COLLECTIVES": "host"}, {"QUIRE_CUDA_COLLECTIVES": "symmetric"}
TWO = {"tensor_parallel_size": 2}
CHECKS: dict[str, dict[str, int]] = {
    "tp 2": TWO,
    "tp 4": {"tensor_parallel_size": 4},
    "pp 2": {"pipeline_parallel_size": 2},
    "tp 2 x pp 2": TWO | {"pipeline_parallel_size": 2},
}
RUNS: dict[str, tuple[dict[str, Any], Mapping[str, str]]] = {
    "one rank, graphs": ({}, {}),
    "tp 2, one-shot kernel, graphs": (TWO, DEVICE),
    "tp 2, through the hosts": (TWO, HOST),
    "tp 2, one-shot kernel, eager": (TWO | {"enforce_eager": True}, DEVICE),
    "one rank, eager": ({"enforce_eager": True}, {}),
}
SUM_BYTES = 65536


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--steps", type=int, default=128, help="decode steps that are measured")
    parser.add_argument("--seconds", type=float, default=330, help="for everything")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(json.loads(options.child))
    if not _has_gpu():
        print("no GPU: nothing was measured")
        return 0
    deadline = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as folder, mps(Path(folder)) as settings:
        if not settings:
            print(f"{CONTROL} was not found: ranks take turns on the GPU, so fewer steps are measured")
            options.steps = 8
        check(Path(folder), settings, deadline)
        measure(Path(folder), settings, deadline, options)
    return 0


def _has_gpu() -> bool:
    """Ask in another process: this one must not hold a context outside of MPS."""
    command = [sys.executable, "-c", "import torch; raise SystemExit(not torch.cuda.is_available())"]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


@contextlib.contextmanager
def mps(folder: Path) -> Iterator[dict[str, str]]:
    if shutil.which(CONTROL) is None:
        yield {}
        return
    settings = {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "log")}
    for path in settings.values():
        Path(path).mkdir()
    subprocess.run([CONTROL, "-d"], env=os.environ | settings, check=True, timeout=30)
    try:
        yield settings
    finally:
        subprocess.run([CONTROL], env=os.environ | settings, input="quit -t 5\n", text=True, check=False, timeout=60)


def check(folder: Path, settings: Mapping[str, str], deadline: float) -> None:
    model = write(folder / "tiny", TINY)
    given = {"model": model, "dtype": "float32", "rows": [8], "steps": 32, "kv_cache_memory_bytes": 64 << 20}
    one = run(given | {"sizes": {}}, settings, deadline)
    print(f"\n{'tokens of a tiny model, float32':34}{'equal':>7}{'replays':>9}{'exchanges':>11}")
    for name, sizes in CHECKS.items():
        found = run(given | {"sizes": sizes}, settings | DEVICE, deadline)
        if "error" in one or "error" in found:
            print(f"{name:34}{one.get('error') or found['error']}")
            continue
        [ours], [theirs] = found["rows"].values(), one["rows"].values()
        equal = "yes" if ours["tokens"] == theirs["tokens"] else "NO"
        print(f"{name:34}{equal:>7}{ours['replays']:9}{ours['exchanges']:11}", flush=True)


def measure(folder: Path, settings: Mapping[str, str], deadline: float, options: argparse.Namespace) -> None:
    model = write(folder / "model", SHAPE | {"num_hidden_layers": options.layers})
    given = {
        "model": model,
        "dtype": "bfloat16",
        "rows": options.rows,
        "steps": options.steps,
        "kv_cache_memory_bytes": 4 << 30,
    }
    print(f"\n{'Llama-8B, ' + str(options.layers) + ' layers, bfloat16':34}{'rows':>5}{'ms/step':>9}{'of one':>8}", end="")
    print(f"{'replays':>9}{'exchanges/step':>16}{'us per 64 KiB sum':>19}")
    first: dict[str, float] = {}
    for name, (sizes, variables) in RUNS.items():
        found = run(given | {"sizes": sizes}, settings | variables, deadline)
        if "error" in found:
            print(f"{name:34}{found['error']}", flush=True)
            continue
        for rows, row in found["rows"].items():
            each = first.setdefault(rows, row["ms"])
            print(f"{name:34}{rows:>5}{row['ms']:9.2f}{row['ms'] / each:8.2f}{row['replays']:9}", end="")
            print(f"{row['exchanges'] / options.steps:16.1f}{found['sum_us'] or '-':>19}", flush=True)


def write(folder: Path, config: Mapping[str, Any]) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def run(given: Mapping[str, Any], settings: Mapping[str, str], deadline: float) -> dict[str, Any]:
    """Run a child process; return what it found, or an error."""
    left = deadline - time.monotonic()
    if left < 20:
        return {"error": "left out: no time"}
    command = [sys.executable, __file__, "--child", json.dumps(given)]
    environment = os.environ | {"QUIRE_CUDA_RANKS": "1"} | settings
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, errors = process.communicate(timeout=left)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return {"error": "did not end in time"}
    if process.returncode:
        return {"error": (errors.strip().splitlines() or ["no output"])[-1][:120]}
    found: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    return found


def child(given: Mapping[str, Any]) -> None:
    """Measure one engine, print what was found, and end the process."""
    from quire import LLM
    from quire.dist.shared_memory import SharedMemoryGroup

    exchanges = [0]
    _count_barriers(SharedMemoryGroup, exchanges)
    llm = LLM(
        given["model"], device="cuda", load_format="dummy", dtype=given["dtype"], skip_tokenizer_init=True, seed=7,
        kv_cache_memory_bytes=given["kv_cache_memory_bytes"], max_num_seqs=64, max_num_batched_tokens=2048,
        max_model_len=1024, enable_prefix_caching=False, **given["sizes"],
    )  # fmt: skip
    found: dict[str, Any] = {"rows": {str(rows): _decode(llm, rows, given["steps"], exchanges) for rows in given["rows"]}}
    sums = llm.llm_engine.core.executor.call("measure_collectives", [SUM_BYTES])
    found["sum_us"] = next((f"{each['microseconds']:.1f}" for each in sums if each["collective"] == "all-reduce"), None)
    llm.llm_engine.shutdown()
    print(json.dumps(found), flush=True)
    os._exit(0)


def _count_barriers(kind: Any, exchanges: list[int]) -> None:
    """Count barriers between hosts, which are part of every exchange."""
    barrier = kind._barrier

    def counted(self: Any) -> None:
        exchanges[0] += 1
        barrier(self)

    kind._barrier = counted


def _decode(llm: Any, rows: int, steps: int, exchanges: list[int]) -> dict[str, Any]:
    """Return the time of a decode step; the third run is measured, after graphs were recorded."""
    from quire import SamplingParams

    prompts = [[3 + (7 * row + at) % 400 for at in range(16)] for row in range(rows)]
    tokens: list[list[int]] = []

    def seconds(count: int) -> float:
        nonlocal tokens
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        return time.perf_counter() - began

    for _ in range(2):
        seconds(1 + steps)
    short = min(seconds(1) for _ in range(2))
    before, exchanged = llm.llm_engine.core.executor.counts, exchanges[0]
    long = seconds(1 + steps)
    now = llm.llm_engine.core.executor.counts
    recorded = now.captures - before.captures  # each takes one exchange
    return {
        "ms": 1e3 * (long - short) / steps,
        "replays": now.replays - before.replays,
        "exchanges": exchanges[0] - exchanged - recorded,
        "tokens": tokens,
    }


if __name__ == "__main__":
    sys.exit(main())
