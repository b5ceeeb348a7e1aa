"""`quire bench throughput`, `latency` and `startup`: measurements of a model in this process, or in new ones.

Flags have vLLM's names where vLLM has them. `OfflineReport` and `engine_facts` also serve `quire bench steps`.
"""

import argparse
import asyncio
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.bench_serve import DATASET, DATASETS, YES, Flags, N, X, add_groups, dataset_of, pairs, plain
from quire.config.args import EngineArgs, add_cli_arguments
from quire.features.profiling.host import REMEDY
from quire.types.errors import ConfigError

if TYPE_CHECKING:
    from quire.bench.datasets import DatasetOptions
    from quire.bench.offline import Figures, OfflineWork
    from quire.bench.samples import Sample
    from quire.llm import LLM
    from quire.text.tokenizer import Tokenizer
    from quire.types.prompts import PromptType

REPORT: Flags = (
    ("output-json", "write the result", {"metavar": "FILE", "type": Path}),
    ("compare", "print ratios to a saved result", {"metavar": "FILE", "type": Path}),
    ("metadata", "written into the result", {"metavar": "NAME=VALUE", "nargs": "+", "default": []}),
)
PROFILE = ("profile", "profile one more run, which is not measured; requires --profiler-config", YES)
HIDDEN = ("run", "command", "measurement", "hf_token", "metadata")


def add_benchmark(
    subparsers: Any,
    name: str,
    about: str,
    description: str,
    groups: Sequence[tuple[str, Flags]],
    run: Callable[[argparse.Namespace], int],
) -> None:
    """Add a benchmark's parser with its groups of flags, the flags of the report and those of the engine."""
    parser = subparsers.add_parser(name, usage="%(prog)s [options]", help=about, description=description)
    add_groups(parser, (*groups, ("report", REPORT)))
    add_cli_arguments(parser)
    parser.set_defaults(run=run)


def at_least(flag: str, value: int, minimum: int) -> int:
    from quire.bench.metrics import MAX_TOKENS, check_count

    return check_count(flag, value, minimum, MAX_TOKENS)


def engine_args(namespace: argparse.Namespace, *, tokens_only: bool) -> EngineArgs:
    """Return the engine arguments. If all prompts are token ids, no tokenizer is loaded unless a flag requests it."""
    args = EngineArgs.from_cli(namespace)
    if "disable_log_stats" not in vars(namespace):  # a benchmark reads no metrics
        args = dataclasses.replace(args, disable_log_stats=True)
    if tokens_only and args.tokenizer is None and "skip_tokenizer_init" not in vars(namespace):
        args = dataclasses.replace(args, skip_tokenizer_init=True)
    return args


def check_profiler(namespace: argparse.Namespace, args: EngineArgs) -> None:
    if namespace.profile and not args.profiler_config.get("profiler"):
        raise ConfigError(f"--profile requires --profiler-config; got none. Add {REMEDY}")


def print_profile(llm: "LLM", work: "OfflineWork") -> list[str]:
    """Profile a run of the workload, and print where the traces are."""
    from quire.bench.offline import profile

    traces = profile(llm, work)
    for trace in traces:
        print(f"profile: {trace}")
    return traces


class OfflineReport:
    """The report of one measurement. It is created before the model is loaded, so that wrong flags are reported early."""

    def __init__(self, kind: str, namespace: argparse.Namespace) -> None:
        from quire.bench.report import read_result

        self._kind, self._namespace = kind, namespace
        self._metadata = pairs(namespace.metadata, "--metadata")
        self._then = read_result(namespace.compare, kind) if namespace.compare else None

    def print_heading(self, title: str, model: str, engine: Mapping[str, Any], machine: Mapping[str, Any]) -> None:
        from quire.bench.report import heading

        device = machine.get("gpu") or f"{machine['cpu']}, {machine['cpu_count']} processors"
        print(
            heading(title, {"Model": model, "Device": device, **{name: engine[name] for name in ("dtype",) if name in engine}})
        )

    def close(
        self,
        model: str,
        engine: Mapping[str, Any],
        machine: Mapping[str, Any],
        figures: "Figures",
        details: Mapping[str, Any],
    ) -> None:
        """Print the comparison and save the result, if flags request it."""
        from quire.bench.machine import provenance
        from quire.bench.report import comparison, save

        flags = {name: plain(value) for name, value in vars(self._namespace).items() if name not in HIDDEN}
        result = {
            "kind": self._kind,
            **provenance(sys.argv),
            "model_id": model,
            "flags": flags,
            "engine": dict(engine),
            "machine": dict(machine),
            **self._metadata,
            **details,
            "figures": figures,
        }
        if self._then is not None:
            print(comparison(result, self._then, self._namespace.compare.name))
        if self._namespace.output_json is not None:
            save(result, self._namespace.output_json)
            print(f"saved: {self._namespace.output_json}")


def engine_facts(llm: "LLM") -> dict[str, Any]:
    """Return the resolved settings of the engine."""
    config = llm.llm_engine.config
    return {
        "device": config.device,
        "dtype": config.dtype,
        "load_format": config.args.load_format,
        "max_model_len": llm.llm_engine.max_model_len,
        "max_num_seqs": config.max_seqs,
        "max_num_batched_tokens": config.max_batched_tokens,
        "block_size": config.page_size,
        "enable_prefix_caching": config.prefix_caching,
        "async_scheduling": config.depth > 0,
        "enforce_eager": config.args.enforce_eager,
        "executor": config.args.distributed_executor_backend or ("mp" if config.world > 1 else "uni"),
    }


THROUGHPUT_DESCRIPTION = """\
Sends a model all requests of a workload at once and measures how long it takes to answer them. Named workloads are random token
ids with fixed seeds, the same for every engine; data sets are those of `quire bench serve`, without their times. Prompts of
token ids run without a tokenizer. The prefix cache is emptied before every run, and the best run is the result."""
WORKLOADS = ("single", "mixed", "batch", "prefill", "longctx", "shared", "cpu1", "cpu16", "cpu64")
NUM_PROMPTS = 1000
OFFLINE_DATASETS = [name for name in DATASETS if name != "random-mm"]
TEXT_DATASET = [each for each in DATASET if not each[0].startswith("random-mm")]
# --input-len and --output-len are short for the data set's own flags
INPUT_LEN = {"random": "random_input_len"}
OUTPUT_LEN = {
    "random": "random_output_len",
    "prefix_repetition": "prefix_repetition_output_len",
    "sharegpt": "sharegpt_output_len",
    "custom": "custom_output_len",
}
WORK: Flags = (
    ("workload", f"named workloads, one after the other: {', '.join(WORKLOADS)}", {"nargs": "+", "choices": WORKLOADS}),
    ("dataset-name", "instead of a workload (default random)", {"choices": OFFLINE_DATASETS}),
    ("dataset-path", "of sharegpt (JSON), custom and timed_trace (JSON lines)", {"metavar": "FILE"}),
    ("num-prompts", f"requests (default {NUM_PROMPTS}; of a workload: the first of them, by default all)", N),
    ("input-len", "tokens of each random prompt, as --random-input-len", N),
    ("output-len", "tokens to generate for each request, of a workload too", N),
    ("disable-shuffle", "keep the order of the data set", YES),
    ("no-oversample", "do not repeat samples when the data set has too few", YES),
    *TEXT_DATASET,
    ("temperature", "(default 0: greedy)", X | {"default": 0.0}),
    ("top-p", "(default 1)", X | {"default": 1.0}),
    ("top-k", "(default 0: all)", N | {"default": 0}),
    ("disable-detokenize", "token ids only, even with a tokenizer", YES),
)
RUNS: Flags = (
    ("runs", "measured runs (default 2)", N | {"default": 2}),
    ("warmup-runs", "runs before them (default 0)", N | {"default": 0}),
    PROFILE,
)


def add_throughput_parser(subparsers: Any) -> None:
    about = "how long a model takes for many requests at once"
    add_benchmark(subparsers, "throughput", about, THROUGHPUT_DESCRIPTION, [("requests", WORK), ("runs", RUNS)], run_throughput)


def run_throughput(namespace: argparse.Namespace) -> int:
    from quire.bench.datasets import SYNTHETIC
    from quire.bench.machine import machine
    from quire.bench.offline import best, measure, throughput_of
    from quire.bench.report import throughput_lines

    report = OfflineReport("throughput", namespace)
    runs, warmups = at_least("runs", namespace.runs, 1), at_least("warmup-runs", namespace.warmup_runs, 0)
    options = None if namespace.workload else _throughput_dataset(namespace)
    check_workload_flags(namespace)
    args = engine_args(namespace, tokens_only=options is None or options.name in SYNTHETIC)
    check_profiler(namespace, args)
    from quire.llm import LLM

    llm = LLM.from_engine_args(args)
    engine = engine_facts(llm)
    report.print_heading("Throughput", args.model, engine, machine(engine["device"]))
    figures: dict[str, float] = {}
    entries = []
    for work in works(namespace, options, llm):
        done = measure(llm, work, warmups=warmups, runs=runs, use_tqdm=sys.stderr.isatty())
        print("\n".join(throughput_lines(work.name, done)), flush=True)
        entries.append(throughput_of(work.name, done))
        figures |= {f"{work.name} {name}": value for name, value in best(done).figures().items()}
        if namespace.profile:
            entries[-1]["traces"] = print_profile(llm, work)
    facts = machine(engine["device"])
    if (resident := facts.get("resident_mb")) is not None:
        print(f"{resident:,.0f} MB resident")
        figures["resident_mb"] = float(resident)
    report.close(args.model, engine, facts, figures, {"workloads": entries})
    return 0


def check_workload_flags(namespace: argparse.Namespace) -> None:
    """Refuse flags that would change a named workload; it can only be shortened."""
    if namespace.workload is None:
        return
    others = [
        flag for flag, _, _ in (*TEXT_DATASET, ("dataset-name", "", {}), ("dataset-path", "", {}), ("input-len", "", {}))
        if getattr(namespace, flag.replace("-", "_")) is not None
    ]  # fmt: skip
    if others or namespace.disable_shuffle or namespace.no_oversample:
        named = f"--{others[0]}" if others else "the order of a data set"
        raise ConfigError(f"{named} does not belong to --workload; drop one of them")
    for flag in ("num-prompts", "output-len"):
        value = getattr(namespace, flag.replace("-", "_"))
        if value is not None:
            at_least(flag, value, 1)


def _throughput_dataset(namespace: argparse.Namespace) -> "DatasetOptions":
    """Return the options by the flags of `bench serve`; --input-len and --output-len stand for the data set's own flags."""
    full = argparse.Namespace(**vars(namespace))
    full.dataset_name = namespace.dataset_name or "random"
    full.num_prompts = NUM_PROMPTS if namespace.num_prompts is None else namespace.num_prompts
    full.seed = getattr(namespace, "seed", 0)
    for flag, names in (("input-len", INPUT_LEN), ("output-len", OUTPUT_LEN)):
        value, name = getattr(namespace, flag.replace("-", "_")), names.get(full.dataset_name)
        if value is None:
            continue
        if name is None:
            raise ConfigError(f"--{flag} does not belong to --dataset-name {full.dataset_name}")
        if getattr(full, name) is not None:
            raise ConfigError(f"--{flag} and --{name.replace('_', '-')} are the same; drop one")
        setattr(full, name, value)
    return dataset_of(full)


def works(namespace: argparse.Namespace, options: "DatasetOptions | None", llm: "LLM") -> "list[OfflineWork]":
    from quire.bench.samples import RandomPrompts, workload
    from quire.bench.sources import SOURCES

    vocab_size = llm.llm_engine.config.facts.vocab_size
    if options is not None:
        samples = asyncio.run(SOURCES[options.name](options, RandomPrompts(vocab_size), LocalTokenCounter(llm)))
        return [work_of(namespace, options.name, samples, llm)]
    found = []
    for name in namespace.workload:
        whole = workload(name, vocab_size)
        samples = whole[: namespace.num_prompts]
        if namespace.output_len is not None:
            samples = [dataclasses.replace(sample, output_tokens=namespace.output_len) for sample in samples]
        cut = [f"{len(samples)} requests"] if len(samples) < len(whole) else []
        cut += [f"{namespace.output_len} out"] if namespace.output_len is not None else []
        found.append(work_of(namespace, f"{name} ({', '.join(cut)})" if cut else name, samples, llm))
    return found


def work_of(namespace: argparse.Namespace, name: str, samples: "list[Sample]", llm: "LLM") -> "OfflineWork":
    from quire.bench.offline import OfflineWork
    from quire.types.sampling import SamplingParams

    longest = max((sample.prompt_tokens or 0) + sample.output_tokens for sample in samples)
    if longest > llm.llm_engine.max_model_len:
        raise ConfigError(f"{name} needs --max-model-len {longest}; got {llm.llm_engine.max_model_len}")
    params = [
        SamplingParams(
            temperature=namespace.temperature,
            top_p=namespace.top_p,
            top_k=namespace.top_k,
            max_tokens=sample.output_tokens,
            ignore_eos=True,
            detokenize=not namespace.disable_detokenize,
        )
        for sample in samples
    ]
    return OfflineWork(name, [prompt_of(sample, llm) for sample in samples], params)


def prompt_of(sample: "Sample", llm: "LLM") -> "PromptType":
    """Return the prompt of a sample. Text stays text: its tokenization is measured, the rendering of a chat template is not."""
    if sample.messages is not None:
        tokenizer = llm.get_tokenizer()
        text = tokenizer.apply_chat_template(sample.messages, tokenize=False, add_generation_prompt=True)
        return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}
    assert sample.prompt is not None
    return sample.prompt if isinstance(sample.prompt, str) else sample.prompt.tolist()


class LocalTokenCounter:
    """Counts tokens with the model's own tokenizer."""

    def __init__(self, llm: "LLM") -> None:
        self._llm = llm
        self._tokenizer: Tokenizer | None = None

    async def count(self, text: str) -> int:
        self._tokenizer = self._tokenizer or self._llm.get_tokenizer()
        return len(self._tokenizer.encode(text, add_special_tokens=False))


LATENCY_DESCRIPTION = """\
Runs one batch of requests of equal length many times and reports how long the whole batch takes, the time to the first token
(mean over all requests) and the time for each token after it. The prefix cache is emptied before every iteration."""
BATCH: Flags = (
    ("batch-size", "requests in the batch (default 8)", N | {"default": 8}),
    ("input-len", "tokens of each prompt (default 32)", N | {"default": 32}),
    ("output-len", "tokens to generate for each (default 128)", N | {"default": 128}),
    ("num-iters-warmup", "iterations that are not counted (default 10)", N | {"default": 10}),
    ("num-iters", "iterations (default 30)", N | {"default": 30}),
    ("temperature", "(default 0: greedy)", X | {"default": 0.0}),
    ("disable-detokenize", "token ids only, even with --no-skip-tokenizer-init", YES),
    PROFILE,
)


def add_latency_parser(subparsers: Any) -> None:
    about = "how long a model takes for one batch"
    add_benchmark(subparsers, "latency", about, LATENCY_DESCRIPTION, [("batch", BATCH)], run_latency)


def run_latency(namespace: argparse.Namespace) -> int:
    import numpy as np

    from quire.bench.machine import machine
    from quire.bench.offline import OfflineWork, latency_of, measure
    from quire.bench.report import latency_lines
    from quire.bench.samples import RandomPrompts
    from quire.types.sampling import SamplingParams

    report = OfflineReport("latency", namespace)
    for flag, _, _ in BATCH[:5]:
        at_least(flag, getattr(namespace, flag.replace("-", "_")), 0 if flag == "num-iters-warmup" else 1)
    args = engine_args(namespace, tokens_only=True)
    check_profiler(namespace, args)
    from quire.llm import LLM

    llm = LLM.from_engine_args(args)
    engine = engine_facts(llm)
    rng, alphabet = np.random.default_rng(args.seed), RandomPrompts(llm.llm_engine.config.facts.vocab_size)
    params = SamplingParams(
        temperature=namespace.temperature,
        max_tokens=namespace.output_len,
        ignore_eos=True,
        detokenize=not namespace.disable_detokenize,
    )
    prompts = [alphabet.draw(rng, namespace.input_len).tolist() for _ in range(namespace.batch_size)]
    work = OfflineWork("latency", prompts, [params] * namespace.batch_size)
    report.print_heading("Latency", args.model, engine, machine(engine["device"]))
    print(f"{namespace.num_iters_warmup} iterations to warm up, {namespace.num_iters} measured", file=sys.stderr)
    latency = latency_of(measure(llm, work, warmups=namespace.num_iters_warmup, runs=namespace.num_iters))
    print("\n".join(latency_lines(latency)))
    traces = {"traces": print_profile(llm, work)} if namespace.profile else {}
    report.close(args.model, engine, machine(engine["device"]), latency.figures(), latency.as_dict() | traces)
    return 0


STARTUP_DESCRIPTION = """\
Starts the engine in new processes, one after the other, and measures the time from the start of the process until the engine is
ready and until the first token, with the parts that the engine reports. Cold starts have an empty cache of compiled
kernels, warm starts the existing one; weights may be in the page cache of the system for both."""
STARTS: Flags = (
    ("num-iters-cold", "cold starts (default 1)", N | {"default": 1}),
    ("num-iters-warm", "warm starts (default 3)", N | {"default": 3}),
    ("num-iters-warmup", "warm starts that are not counted (default 0)", N | {"default": 0}),
    ("input-len", "tokens of the prompt (default 32)", N | {"default": 32}),
)
CHILD = "quire.cli.bench_offline"


def add_startup_parser(subparsers: Any) -> None:
    about = "how long an engine takes from the start of its process to the first token"
    add_benchmark(subparsers, "startup", about, STARTUP_DESCRIPTION, [("starts", STARTS)], run_startup)


def run_startup(namespace: argparse.Namespace) -> int:
    from quire.bench.machine import machine
    from quire.bench.offline import start_once, startup_figures
    from quire.bench.report import startup_lines

    report = OfflineReport("startup", namespace)
    for flag, _, _ in STARTS:
        at_least(flag, getattr(namespace, flag.replace("-", "_")), 1 if flag == "input-len" else 0)
    if not namespace.num_iters_cold + namespace.num_iters_warm:
        raise ConfigError("no starts to measure: --num-iters-cold or --num-iters-warm must be above 0")
    args = engine_args(namespace, tokens_only=False)
    command = [sys.executable, "-m", CHILD]
    question = {"engine": dataclasses.asdict(args), "input_len": namespace.input_len}
    device = device_of(args.device)
    for _ in range(namespace.num_iters_warmup):
        start_once(command, question, cold=False)
    starts = [start_once(command, question, cold=True) for _ in range(namespace.num_iters_cold)]
    starts += [start_once(command, question, cold=False) for _ in range(namespace.num_iters_warm)]
    facts = machine(device)
    report.print_heading("Start-up", args.model, {}, facts)
    print("\n".join(startup_lines(starts)))
    report.close(args.model, {}, facts, startup_figures(starts), {"starts": [start.as_dict() for start in starts]})
    return 0


def device_of(asked: str) -> str:
    """Return the device: a GPU if the system shows one. torch is not asked, since it would occupy the device."""
    from quire.bench.machine import gpu

    return asked if asked != "auto" else "cuda" if gpu() else "cpu"


def run_child() -> None:
    asked = json.load(sys.stdin)
    from quire.config.args import EngineArgs
    from quire.llm import LLM
    from quire.types.sampling import SamplingParams

    llm = LLM.from_engine_args(EngineArgs(**asked["engine"]))
    ready = time.monotonic()
    vocab_size = llm.llm_engine.config.facts.vocab_size
    prompt = [1 + i % (vocab_size - 1) for i in range(asked["input_len"])]
    llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True), use_tqdm=False)
    first_token = time.monotonic()
    timeline = getattr(llm.llm_engine, "timeline", None)
    parts = [] if timeline is None else timeline.parts
    print(json.dumps({"ready": ready, "first_token": first_token, "parts": parts}), flush=True)


if __name__ == "__main__":
    run_child()
