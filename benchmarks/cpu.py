"""Quire, llama.cpp and transformers side by side on a CPU.

    pip install 'quire[bench]'
    python benchmarks/cpu.py [MODEL.gguf] [--threads 2] [--rounds 3] [--engines quire,quire-float32,llama.cpp,transformers]

Each engine is a process of its own that waits while another one runs; the engines take turns in every round, so that a noisy
machine is noisy for all, and a ratio compares neighbours in time. Quire and llama.cpp are told how many requests there will be
(`max_num_seqs`, `n_seq_max`). Every engine's threads wait as it has them wait by default, and llama.cpp keeps a cache for each
sequence, which is its default and faster than one for all. Prompts are random token ids, outputs are greedy and do not stop.
Where prompts take several steps, what some requests have drawn when the last one gets its first token is not counted as
decoded. Engines that are not installed are skipped;
`--llama-python` names another interpreter that has llama-cpp-python. Quire alone, on a long prompt:

    python benchmarks/cpu.py --engines quire --requests 1 --inputs 1900 --outputs 8

`--processor-time` counts that of all threads instead of the clock's: for a busy machine, with `--threads 1`.
"""

import argparse
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORKLOADS = {1: (128, 64), 16: (128, 64), 64: (64, 64)}  # requests -> tokens in, tokens out
TARGETS = {"quire": "llama.cpp", "quire-float32": "transformers"}
ENGINES = ("quire", "quire-float32", "llama.cpp", "transformers")
clock = time.process_time if "--processor-time" in sys.argv else time.perf_counter
Run = Callable[
    [list[list[int]], int], tuple[float, float]
]  # prompts, tokens out -> seconds to the first tokens, and to the rest


def open_quire(model: str, dtype: str, requests: int, longest: int) -> Run:
    from quire import LLM, SamplingParams

    llm = LLM(
        model, device="cpu", dtype=dtype, max_model_len=longest, max_num_seqs=requests, enable_prefix_caching=False,
        kv_cache_memory_bytes=1 << 30,
    )  # fmt: skip
    engine = llm.llm_engine

    def run(prompts: list[list[int]], outputs: int) -> tuple[float, float]:
        params = SamplingParams(temperature=0.0, max_tokens=outputs + 1, ignore_eos=True, detokenize=False)
        for number, ids in enumerate(prompts):
            engine.add_request(str(number), {"prompt_token_ids": ids}, params)
        begun, drawn, first, ahead = clock(), dict[str, int](), 0.0, 0
        while engine.has_unfinished_requests():
            drawn |= {output.request_id: len(output.outputs[0].token_ids) for output in engine.step()}
            if not first and len(drawn) == len(prompts) and all(drawn.values()):
                first, ahead = clock() - begun, sum(drawn.values()) - len(prompts)
        whole = len(prompts) * outputs
        return first, (clock() - begun - first) * whole / (whole - ahead)

    return run


def open_llama(model: str, threads: int) -> Run:
    import llama_cpp as api
    import numpy as np

    api.llama_backend_init()
    loaded = api.llama_model_load_from_file(model.encode(), api.llama_model_default_params())
    vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(loaded))

    def run(prompts: list[list[int]], outputs: int) -> tuple[float, float]:
        settings = api.llama_context_default_params()
        settings.n_ctx = len(prompts) * max(len(ids) + outputs + 8 for ids in prompts)
        settings.n_batch, settings.n_ubatch, settings.n_seq_max, settings.kv_unified = 2048, 512, len(prompts), False
        settings.n_threads = settings.n_threads_batch = threads
        context, batch = api.llama_init_from_model(loaded, settings), api.llama_batch_init(2048, 0, 1)
        drawn = [0] * len(prompts)

        def decode(tokens: list[tuple[int, int, int, bool]]) -> None:
            """(token, position, sequence, whether its logits are wanted)"""
            batch.n_tokens = len(tokens)
            for i, (token, position, sequence, wanted) in enumerate(tokens):
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
                batch.seq_id[i][0], batch.logits[i] = sequence, wanted
            assert api.llama_decode(context, batch) == 0
            for i, (_, _, sequence, wanted) in enumerate(tokens):
                if wanted:
                    logits = api.llama_get_logits_ith(context, i)
                    drawn[sequence] = int(np.ctypeslib.as_array(logits, (vocabulary,)).argmax())

        begun = clock()
        all_in = [(t, p, s, p == len(ids) - 1) for s, ids in enumerate(prompts) for p, t in enumerate(ids)]
        for start in range(0, len(all_in), 2048):
            decode(all_in[start : start + 2048])
        first = clock() - begun
        for step in range(outputs):
            decode([(drawn[s], len(ids) + step, s, True) for s, ids in enumerate(prompts)])
        rest = clock() - begun - first
        api.llama_batch_free(batch)
        api.llama_free(context)
        return first, rest

    return run


def open_transformers(model: str, threads: int) -> Run:
    import torch
    import transformers

    torch.set_num_threads(threads)
    path = Path(model)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()

    def run(prompts: list[list[int]], outputs: int) -> tuple[float, float]:
        ids, steps, begun = torch.tensor(prompts), [], clock()

        def note(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            steps.append(clock())
            return scores

        with torch.inference_mode():
            loaded.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=outputs + 1,
                min_new_tokens=outputs + 1, pad_token_id=0, logits_processor=[note],
            )  # fmt: skip
        return steps[0] - begun, clock() - steps[0]

    return run


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def work(engine: str, model: str, threads: int, requests: int, longest: int) -> None:
    """The process of one engine: requests on stdin, answers on stdout, a JSON line each."""
    answers, sys.stdout = sys.stdout, sys.stderr
    opened = {
        "quire": lambda: open_quire(model, "auto", requests, longest),
        "quire-float32": lambda: open_quire(model, "float32", requests, longest),
        "llama.cpp": lambda: open_llama(model, threads),
        "transformers": lambda: open_transformers(model, threads),
    }[engine]()
    print(json.dumps({"resident": resident()}), file=answers, flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        dice = random.Random(task["seed"])
        prompts = [[dice.randrange(1000, 30000) for _ in range(task["inputs"])] for _ in range(task["requests"])]
        first, rest = opened(prompts, task["outputs"])
        print(json.dumps({"first": first, "rest": rest, "resident": resident()}), file=answers, flush=True)


class Worker:
    def __init__(self, engine: str, requests: int, options: argparse.Namespace) -> None:
        self.engine, self.requests = engine, requests
        python = options.llama_python if engine == "llama.cpp" else sys.executable
        environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
        command = [python, __file__, options.model, "--worker", engine, "--threads", str(options.threads)]
        command += ["--requests", str(options.most or requests), "--longest", str(max(1024, 2 * (options.inputs or 0)))]
        command += ["--processor-time"] * options.processor_time
        log = subprocess.DEVNULL if not options.verbose else None
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
        )
        self.resident = self.answer()["resident"]

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.engine} ended with exit status {self.process.wait()}; --verbose shows why")
        found: dict[str, Any] = json.loads(line)
        return found

    def measure(self, requests: int, inputs: int, outputs: int, seed: int) -> tuple[float, float]:
        """Tokens per second in, and out."""
        assert self.process.stdin is not None
        task = {"requests": requests, "inputs": inputs, "outputs": outputs, "seed": seed}
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()
        found = self.answer()
        self.resident = max(self.resident, found["resident"])
        return requests * inputs / found["first"], requests * outputs / found["rest"]


def installed(engine: str, options: argparse.Namespace) -> bool:
    if engine == "llama.cpp":
        return subprocess.run([options.llama_python, "-c", "import llama_cpp"], capture_output=True).returncode == 0
    return engine != "transformers" or importlib.util.find_spec("transformers") is not None


def report(found: dict[tuple[int, str], list[tuple[float, float]]], workers: list[Worker]) -> None:
    print("| requests | engine | prefill tok/s | decode tok/s |\n|---|---|---|---|")
    for (requests, engine), rates in found.items():
        prefill, decode = (statistics.median(rate[at] for rate in rates) for at in (0, 1))
        print(f"| {requests} | {engine} | {prefill:.0f} | {decode:.0f} |")
    print("\nratios, median of the rounds (and each round)")
    for (requests, engine), rates in found.items():
        theirs = found.get((requests, TARGETS.get(engine, "")))
        if theirs:
            for at, what in enumerate(("prefill", "decode")):
                ratios = [mine[at] / other[at] for mine, other in zip(rates, theirs, strict=True)]
                each = " ".join(f"{ratio:.2f}" for ratio in ratios)
                print(f"  {engine} / {TARGETS[engine]}, {requests} requests, {what}: {statistics.median(ratios):.2f} ({each})")
    for worker in workers:
        print(f"  {worker.engine}, {worker.requests} requests: {worker.resident / 2**20:.0f} MiB resident at most")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a GGUF file (default: the default model)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", default="1,16,64")
    parser.add_argument("--most", type=int, help="Quire's max_num_seqs; default: as many requests as the workload has")
    parser.add_argument("--inputs", type=int, default=None, help="tokens in, for longer prompts")
    parser.add_argument("--outputs", type=int, default=None, help="tokens out, for a shorter run")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--llama-python", default=sys.executable)
    parser.add_argument("--processor-time", action="store_true", help="per second of processor time, not of the clock's")
    parser.add_argument("--verbose", action="store_true", help="show what the engines print")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--longest", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.model, options.threads, int(options.requests), options.longest)
        return
    if options.model is None:
        from quire.files.resolve import resolve_model

        options.model = str(resolve_model("smollm2").path)
    wanted = [engine for engine in options.engines.split(",") if installed(engine, options)]
    ended: list[Worker] = []
    found: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for requests in map(int, options.requests.split(",")):
        inputs, outputs = WORKLOADS[requests]
        workers = [Worker(engine, requests, options) for engine in wanted]
        for seed in range(options.rounds + 1):  # the first is to warm up
            for worker in workers:
                rates = worker.measure(requests, options.inputs or inputs, options.outputs or outputs, seed)
                if seed:
                    found.setdefault((requests, worker.engine), []).append(rates)
                    print(
                        f"{requests:3d} {worker.engine:14s} {rates[0]:8.1f} in {rates[1]:8.1f} out", file=sys.stderr, flush=True
                    )
        for worker in workers:
            worker.process.terminate()
        ended += workers
    report(found, ended)


if __name__ == "__main__":
    main()
