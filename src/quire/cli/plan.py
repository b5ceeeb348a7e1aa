"""`quire plan MODEL`: print the memory that a model needs and what fits."""

import argparse
import dataclasses
import json
import re
from typing import Any

from quire.cli.memory_plan import MemoryPlan, make_plan
from quire.cli.parser import add_model_tag, engine_args
from quire.cli.plan_cards import CARDS_FLAGS, run_cards
from quire.config.args import add_cli_arguments
from quire.sim.analytic import CARDS, find_card
from quire.types.errors import ConfigError


def render(plan: MemoryPlan) -> str:
    counted = "" if plan.parameters_counted else ", estimated from the shapes"
    stored = f" ({size(plan.weights_stored)} as stored)" if plan.weights_stored else ""
    if plan.weights_held < plan.weights_loaded:
        stored += f", about {size(plan.weights_held)} on each GPU"
    code = "" if plan.served_by == "quire" else ", through transformers"
    lines = [
        ("Model", f"{plan.model} ({plan.architecture}{code}, {_count(plan.parameters)} parameters{counted})"),
        ("Device", _device(plan)),
        ("Weights", f"{size(plan.weights_loaded)} in {plan.weights_as}{stored}"),
        (
            "Largest step",
            f"{size(plan.activations)} for {plan.max_batched_tokens} tokens, {plan.max_seqs} requests (estimated)",
        ),
    ]
    if "generate" not in plan.tasks:
        lines.insert(1, ("Tasks", ", ".join(plan.tasks)))
        lines.append(("Pooling", f"{size(plan.pooling)} reserved for hidden states and results"))
    if plan.host_tier:
        staged = f", and {size(plan.staged)} of the device on the way" if plan.device != "cpu" else ""
        if plan.disk_tier:
            staged += f"; {size(plan.disk_tier)} on disk"
        lines.append(("Host memory", f"{size(plan.host_tier)} {_host_pages(plan)}{staged}"))
    if plan.graphs:
        lines.append(("CUDA graphs", f"{size(plan.graphs)} reserved (--enforce-eager: none)"))
    if plan.collectives:
        lines.append(("Collectives", f"{size(plan.collectives)} of each GPU for NCCL's buffers and ours (estimated)"))
    lines += _optional_lines(plan)
    for kind, per_token in plan.bytes_per_token.items():
        lines.append(("Cache per token", f"{size(per_token)} in {plan.layers[kind]} layers with {kind}"))
    if plan.states:
        slots = f"one for each of {plan.max_seqs} requests, {plan.snapshots:,} of prefixes"
        lines.append(("State", f"{size(plan.bytes_per_state)} in {plan.states} recurrent layers: {slots}"))
    cache = size(plan.cache)
    if plan.bytes_per_page:
        pages = f"{plan.pages:,} pages of {plan.page_size} tokens, {size(plan.bytes_per_page)} each"
        cache = f"{cache} in {plan.cache_dtype}: {pages}{' in addition to the states' if plan.states else ''}"
    elif plan.states:
        cache = f"{cache} for states; there are no keys and values"
    else:
        cache = "none: an encoder reads each prompt whole in one step and keeps no keys and values"
    each = [f"{number} {what}" for number, what in ((plan.ranks, "ranks"), (plan.engines, "engines")) if number > 1]
    lines.append(("Cache", ", in each of ".join([cache, " of each of ".join(each)] if each else [cache])))
    if len(plan.stages) > 1:
        lines.append(("Stages", f"{len(plan.stages)}, of {', '.join(map(str, plan.stages))} layers"))
    lines.append(("Context", f"{plan.max_model_len:,} tokens (the model was made for {plan.positions:,})"))
    for length, requests in plan.concurrency.items():
        if plan.bytes_per_page or plan.states:
            lines.append(("At once", f"{_requests(requests, plan.max_seqs)} of {length:,} tokens"))
        else:
            prompts = min(plan.max_seqs, plan.max_batched_tokens // length)
            lines.append(("In one step", f"{prompts} prompts of {length:,} tokens"))
    lines += [("Advice" if plan.fits else "Does not fit", text) for text in plan.advice]
    out, last = [], ""
    for name, text in lines:
        out.append(f"{'' if name == last else name:<16} {text}")
        last = name
    return "\n".join(out)


def _optional_lines(plan: MemoryPlan) -> list[tuple[str, str]]:
    lines = []
    if plan.copies:
        lines.append(("Copies", f"{size(plan.copies)} in {plan.dtype}, for large batches (--no-dequantized-copies: none)"))
    elif plan.no_copies:
        lines.append(("Copies", f"none: {plan.no_copies}"))
    if plan.drafter:
        weights = f"{plan.drafter}, with {size(plan.draft_weights)} of weights" if plan.draft_weights else plan.drafter
        cache = f" and {size(plan.draft_cache)} of cache" if plan.draft_cache else ""
        how = " of its own: it drafts by text" if plan.drafts_by_text else " under the model's pages" if cache else ""
        lines.append(("Drafts", weights + cache + how))
    if plan.encoder_weights:
        kept = f"{size(plan.encoder_cache)} for {plan.encoder_embeddings:,} embeddings"
        lines.append(("Images", f"an encoder with {size(plan.encoder_weights)} of weights, its cache {kept}"))
    if plan.adapters:
        room = f"{plan.adapters} at once, of rank {plan.adapter_rank} at most"
        taken = f"{size(plan.adapter_bytes)} reserved" if plan.adapter_bytes else "each takes its own size when it is loaded"
        lines.append(("Adapters", f"{room}: {taken}"))
    if plan.weights_twice:
        lines.append(("", f"{size(plan.weights_twice)} of the weights are stored in a second layout for them"))
    return lines


def _host_pages(plan: MemoryPlan) -> str:
    """Return what host memory is for."""
    if not plan.states:
        return "for evicted pages"
    record = plan.bytes_per_page or plan.bytes_per_state
    records = plan.host_tier // plan.ranks // record
    if not plan.bytes_per_page:
        return f"for {records:,} evicted snapshots"
    return f"for {records:,} evicted pages, or snapshots of the memory of {-(-plan.bytes_per_state // record):,} pages each"


def _device(plan: MemoryPlan) -> str:
    if plan.device != "cuda":
        return f"{plan.device}, {size(plan.memory)} available"
    usable, reserved = size(plan.memory_usable), size(plan.reserved)
    count = plan.ranks * plan.engines
    which = "GPU" if count == 1 else f"{count} GPUs, each"
    return f"{which} with {size(plan.memory)}, of which {usable} may be used and {reserved} are the driver's"


def _requests(number: float, max_seqs: int) -> str:
    shown = f"{number:,.1f}" if number < 10 else f"{number:,.0f}"
    return f"{shown} requests" if number <= max_seqs else f"{max_seqs} requests (max_num_seqs; the cache would hold {shown})"


def _count(number: int) -> str:
    for unit, scale in (("B", 10**9), ("M", 10**6)):
        if number >= scale:
            return f"{number / scale:.2f} {unit}" if number < 10 * scale else f"{number / scale:.1f} {unit}"
    return f"{number:,}"


def size(count: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}" if count < 100 * scale else f"{count / scale:.0f} {unit}"
    return f"{count} bytes"


MIN_BYTES = 2**20  # a smaller number without a unit is probably a mistake
MAX_BYTES = 2**60
_SIZE = re.compile(r"^(?P<number>\d+(\.\d+)?)\s*(?P<unit>[KMGT]?)(?P<binary>i?)B?$", re.IGNORECASE)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "plan",
        usage="%(prog)s [MODEL] [options]",
        help="how much memory a model needs and what fits",
        description="Prints the memory that a model needs and how many requests fit, from file headers. Takes all engine "
        "options and counts their effects.",
    )
    add_model_tag(parser)
    parser.add_argument(
        "--memory", "--gpu-memory", type=read_size, metavar="SIZE", default=None, help="memory of the device: 80GiB, 24GB; "
        "without --device cpu, the device is a GPU (default: the available memory of this machine, on its CPU)",
    )  # fmt: skip
    parser.add_argument(
        "--card", metavar="NAME", default=None, help=f"instead, a GPU with the memory of this one: {', '.join(CARDS)}"
    )
    for name, text, options in CARDS_FLAGS:
        parser.add_argument(f"--{name}", help=text, **options)
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_cli_arguments(parser)
    parser.set_defaults(run=run)


def run(namespace: argparse.Namespace) -> int:
    args, memory, link = engine_args(namespace), namespace.memory, namespace.link
    if namespace.cards is not None:
        return run_cards(args, namespace)
    if namespace.card is not None:
        if memory is not None or args.device not in ("auto", "cuda"):
            other = "--memory" if memory is not None else f"--device {args.device}"
            raise ConfigError(f"--card is a GPU and its memory; drop it, or {other}")
        card = find_card(namespace.card)
        memory, link = card.memory, link or card.link
    plan = make_plan(args, memory, link)
    print(json.dumps(dataclasses.asdict(plan), indent=2) if namespace.json else render(plan))
    return 0 if plan.fits else 1


def read_size(text: str) -> int:
    match = _SIZE.match(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 80GiB, 24GB or 512MiB")
    power = " KMGT".index(match["unit"].upper() or " ")
    size = float(match["number"]) * (1024 if match["binary"] else 1000) ** power
    if size > MAX_BYTES:
        raise argparse.ArgumentTypeError(f"{text[:20]} is more than any device has; give a size such as 80GiB")
    count = int(size)
    if not count:
        raise argparse.ArgumentTypeError(f"{text} is too small; give a size such as 80GiB")
    if text == match["number"] and count < MIN_BYTES:
        raise argparse.ArgumentTypeError(f"{text} would be bytes; use {text}GiB")
    return count
