"""`quire doctor`: does this machine run models, and do ranks on it give the tokens of one process?"""

import argparse
import dataclasses
import random
import time
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.cli.bench_collectives import bytes_of, join_machine, measure, started, tiny_engine_args
from quire.config.args import EngineArgs, add_cli_arguments
from quire.types.errors import ConfigError, QuireError

if TYPE_CHECKING:
    from quire.llm import LLM
    from quire.types.prompts import TokensPrompt

DESCRIPTION = """\
Runs a tiny random model with the given engine arguments and says in about a minute whether this machine serves models. With
--parallel it also checks the links between GPUs and the collectives of ranks, and that ranks give the tokens of one process.
Their number is that of GPUs, or of -tp and -pp. On several machines run it on each with its --node-rank.
Exit code 1: a problem."""
SIZES = [bytes_of(text) for text in ("4K", "1M")]
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 6, 40, 24
ONE_PROCESS: dict[str, Any] = {
    "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "pipeline_layer_partition": None, "nnodes": 1,
    "distributed_executor_backend": None, "enable_expert_parallel": False,
}  # fmt: skip
Tokens = list[list[int]]


class Check(NamedTuple):
    text: str
    problem: bool = False


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "doctor", usage="%(prog)s [options]", help="check that this machine runs models, alone or in ranks",
        description=DESCRIPTION,
    )  # fmt: skip
    parser.add_argument("--parallel", action="store_true", help="check the ranks of --tensor-parallel-size and others")
    add_cli_arguments(parser)
    parser.set_defaults(run=run)


def run(namespace: argparse.Namespace) -> int:
    args = EngineArgs.from_cli(namespace)
    ranks = args.tensor_parallel_size * args.pipeline_parallel_size
    if not namespace.parallel and ranks > 1:
        raise ConfigError(f"{ranks} ranks are checked with --parallel; add it")
    if namespace.parallel and ranks == 1:
        args = dataclasses.replace(args, tensor_parallel_size=_default_ranks(args))
    problems = 0
    with tiny_engine_args(args, vars(namespace)) as args:
        if args.node_rank:
            return join_machine(args)
        for check in _checks(args):
            problems += check.problem
            print(f"{'PROBLEM' if check.problem else 'ok':<9}{check.text}", flush=True)
    verdict = {0: "no problem was found", 1: "1 problem was found"}.get(problems, f"{problems} problems were found")
    print(f"verdict: {verdict}")
    return 1 if problems else 0


def _default_ranks(args: EngineArgs) -> int:
    """Return as many ranks as there are GPUs; two on a CPU."""
    from quire.device.registry import describe, find_device

    return max(2, args.nnodes * describe(find_device() if args.device == "auto" else args.device).count)


def _checks(args: EngineArgs) -> Iterator[Check]:
    ranks = args.tensor_parallel_size * args.pipeline_parallel_size
    try:
        if ranks > 1:
            yield from _check_links(args, -(-ranks // args.nnodes))
        alone = yield from _check_alone(dataclasses.replace(args, **ONE_PROCESS))
        if ranks > 1:
            yield from _check_ranks(args, ranks, alone)
    except QuireError as error:
        yield Check(str(error), problem=True)


def _check_links(args: EngineArgs, ranks: int) -> Iterator[Check]:
    from quire.device.registry import find_device, open_device

    name = find_device() if args.device == "auto" else args.device
    for remark in open_device(name).check_links(ranks):
        yield Check(remark.text, remark.problem)


def _check_alone(args: EngineArgs) -> Generator[Check, None, Tokens]:
    """Return the tokens of a model in one process."""
    began = time.monotonic()
    with started(args) as llm:
        device = llm.llm_engine.config.device
        yield Check(f"a tiny model starts on {device} in {time.monotonic() - began:.1f} s")
        tokens = _tokens(llm)
        same = tokens == _tokens(llm)
        yield Check("it gives the same tokens twice" if same else "it gives other tokens the second time", not same)
    return tokens


def _check_ranks(args: EngineArgs, ranks: int, alone: Tokens) -> Iterator[Check]:
    began = time.monotonic()
    with started(args) as llm:
        yield Check(f"{ranks} ranks start in {time.monotonic() - began:.1f} s")
        for each in measure(llm, SIZES):
            bits = "the right bits" if each["right"] else "wrong bits"
            yield Check(
                f"{each['collective']} of {each['bytes']:,} bytes: {each['microseconds']:,.0f} us, {bits}", not each["right"]
            )
        tokens = _tokens(llm)
    other = sum(mine != theirs for mine, theirs in zip(tokens, alone, strict=True))
    if other:
        yield Check(f"{other} of {len(alone)} answers have other tokens than in one process", problem=True)
    else:
        yield Check(f"{len(alone)} answers have the tokens of one process")


def _tokens(llm: "LLM") -> Tokens:
    from quire.types.sampling import SamplingParams

    rng, vocabulary = random.Random(0), llm.llm_engine.config.facts.vocab_size
    prompts: list[TokensPrompt] = [
        {"prompt_token_ids": [rng.randrange(2, vocabulary) for _ in range(PROMPT_TOKENS)]} for _ in range(PROMPTS)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
