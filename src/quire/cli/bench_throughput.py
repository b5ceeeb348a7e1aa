"""`quire bench throughput`: all requests at once through a model in this process. Flags have vLLM's names where it has them."""

import argparse
import asyncio
import dataclasses
import sys
from typing import TYPE_CHECKING, Any

from quire.cli.bench_offline import OfflineReport, add_group, add_report_and_engine_flags, at_least, engine_args, engine_facts
from quire.cli.bench_serve import DATASET, DATASETS, YES, Flags, N, X
from quire.types.errors import ConfigError

if TYPE_CHECKING:
    from quire.bench.datasets.options import DatasetOptions
    from quire.bench.offline import OfflineWork
    from quire.bench.samples import Sample
    from quire.llm import LLM
    from quire.text.tokenizer import Tokenizer
    from quire.types.prompts import PromptType

DESCRIPTION = """\
Gives a model all requests of a workload at once and measures how long it takes to answer them. Named workloads are random token
ids with fixed seeds, the same in every engine; data sets are those of `quire bench serve`, without their times. Prompts of
token ids run without a tokenizer. The prefix cache is emptied before every run, and the best run is the result."""
WORKLOADS = ("single", "mixed", "batch", "prefill", "longctx", "shared", "cpu1", "cpu16", "cpu64")
NUM_PROMPTS = 1000
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
    ("dataset-name", "instead of a workload (default random)", {"choices": DATASETS}),
    ("dataset-path", "of sharegpt (JSON), custom and timed_trace (JSON lines)", {"metavar": "FILE"}),
    ("num-prompts", f"requests (default {NUM_PROMPTS}; of a workload: the first of them, by default all)", N),
    ("input-len", "tokens of each random prompt, as --random-input-len", N),
    ("output-len", "tokens to generate for each request, of a workload too", N),
    ("disable-shuffle", "keep the order of the data set", YES),
    ("no-oversample", "do not repeat samples when the data set has too few", YES),
    *DATASET,
    ("temperature", "(default 0: greedy)", X | {"default": 0.0}),
    ("top-p", "(default 1)", X | {"default": 1.0}),
    ("top-k", "(default 0: all)", N | {"default": 0}),
    ("disable-detokenize", "token ids only, even where there is a tokenizer", YES),
)
RUNS: Flags = (
    ("runs", "measured runs (default 2)", N | {"default": 2}),
    ("warmup-runs", "runs before them (default 0)", N | {"default": 0}),
)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "throughput",
        usage="%(prog)s [options]",
        help="how long a model takes for many requests at once",
        description=DESCRIPTION,
    )
    add_group(parser, "requests", WORK)
    add_group(parser, "runs", RUNS)
    add_report_and_engine_flags(parser)
    parser.set_defaults(run=run)


def run(namespace: argparse.Namespace) -> int:
    from quire.bench.datasets.options import SYNTHETIC
    from quire.bench.machine import machine
    from quire.bench.offline import best, measure, throughput_of
    from quire.bench.report import throughput_lines

    report = OfflineReport("throughput", namespace)
    runs, warmups = at_least("runs", namespace.runs, 1), at_least("warmup-runs", namespace.warmup_runs, 0)
    options = None if namespace.workload else dataset_of(namespace)
    check_workload_flags(namespace)
    args = engine_args(namespace, tokens_only=options is None or options.name in SYNTHETIC)
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
    facts = machine(engine["device"])
    if (resident := facts.get("resident_mb")) is not None:
        print(f"{resident:,.0f} MB resident")
        figures["resident_mb"] = float(resident)
    report.close(args.model, engine, facts, figures, {"workloads": entries})
    return 0


def check_workload_flags(namespace: argparse.Namespace) -> None:
    """A named workload is what it is: it can be cut, not changed."""
    if namespace.workload is None:
        return
    others = [
        flag for flag, _, _ in (*DATASET, ("dataset-name", "", {}), ("dataset-path", "", {}), ("input-len", "", {}))
        if getattr(namespace, flag.replace("-", "_")) is not None
    ]  # fmt: skip
    if others or namespace.disable_shuffle or namespace.no_oversample:
        named = f"--{others[0]}" if others else "the order of a data set"
        raise ConfigError(f"{named} does not belong to --workload; drop one of them")
    for flag in ("num-prompts", "output-len"):
        value = getattr(namespace, flag.replace("-", "_"))
        if value is not None:
            at_least(flag, value, 1)


def dataset_of(namespace: argparse.Namespace) -> "DatasetOptions":
    """The flags of `bench serve`, with --input-len and --output-len for those that the data set has."""
    from quire.cli.bench_serve import dataset_of as options_of

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
    return options_of(full)


def works(namespace: argparse.Namespace, options: "DatasetOptions | None", llm: "LLM") -> "list[OfflineWork]":
    from quire.bench.datasets import find
    from quire.bench.samples import RandomPrompts, workload

    vocab_size = llm.llm_engine.config.facts.vocab_size
    if options is not None:
        samples = asyncio.run(find(options.name)(options, RandomPrompts(vocab_size), LocalTokenCounter(llm)))
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
        raise ConfigError(f"{name} needs --max-model-len {longest}; here it is {llm.llm_engine.max_model_len}")
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
    """Text stays text: tokenization is part of what is measured. A conversation is put into the model's template before."""
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
