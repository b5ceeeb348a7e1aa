"""Sampling flags shared by the commands that generate."""

import argparse
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from quire.step_loop import interrupts_between_steps
from quire.types.errors import EngineError
from quire.types.prompts import PromptType
from quire.types.sampling import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from quire.llm_engine import LLMEngine

_FLAGS: tuple[tuple[str, type, str], ...] = (
    ("temperature", float, "randomness, 0 is greedy"),
    ("top_p", float, "keep the most likely tokens up to this mass"),
    ("top_k", int, "keep this many of the most likely tokens, 0 keeps all"),
    ("min_p", float, "drop tokens less likely than this fraction of the most likely one"),
    ("repetition_penalty", float, "above 1 discourages tokens that were seen before"),
    ("presence_penalty", float, "discourages tokens that were generated before"),
    ("frequency_penalty", float, "the same, more with every occurrence"),
    ("sampling_seed", int, "the same seed gives the same text"),
)

# parameters that `/set` of `quire chat` changes: how a value is read, and an example
SETTABLE: dict[str, tuple[Callable[[str], Any], str]] = {
    "max_tokens": (int, "512"),
    "temperature": (float, "0.7"),
    "top_p": (float, "0.9"),
    "top_k": (int, "40"),
    "min_p": (float, "0.05"),
    "repetition_penalty": (float, "1.1"),
    "presence_penalty": (float, "0.5"),
    "frequency_penalty": (float, "0.5"),
    "seed": (int, "1"),
    "stop": (lambda text: [text], "END"),
}


def add_sampling_arguments(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, default=max_tokens, help=f"most tokens to generate (default {max_tokens})")
    for name, kind, text in _FLAGS:
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, default=None, help=f"{text} (default: the model's own)")
    group.add_argument("--stop", action="append", default=None, help="end before this text; may be given several times")


def sampling_values(namespace: argparse.Namespace, defaults: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the command line's sampling parameters over the model's defaults, checked."""
    values: dict[str, Any] = {**(defaults or {}), "max_tokens": namespace.max_tokens}
    for name, _, _ in _FLAGS:
        value = getattr(namespace, name)
        if value is not None:
            values["seed" if name == "sampling_seed" else name] = value
    if namespace.stop:
        values["stop"] = namespace.stop
    SamplingParams(**values)
    return values


def sampling_params(namespace: argparse.Namespace, defaults: dict[str, Any] | None = None) -> SamplingParams:
    return SamplingParams(**sampling_values(namespace, defaults))


_ids = itertools.count()


def print_stream(engine: "LLMEngine", prompt: PromptType, params: SamplingParams) -> str:
    """Returns the whole text. Ctrl-C ends the request and is passed on."""
    request_id = f"cli-{next(_ids)}"
    params = params.clone()
    params.output_kind = RequestOutputKind.DELTA
    engine.add_request(request_id, prompt, params)
    parts: list[str] = []
    try:
        with interrupts_between_steps() as check:
            while engine.has_unfinished_requests():
                check()
                for output in engine.step():
                    for choice in output.outputs:
                        print(choice.text, end="", flush=True)
                        parts.append(choice.text)
                        if choice.error:
                            raise EngineError(choice.error)
    finally:
        engine.abort_request(request_id)
    return "".join(parts)
