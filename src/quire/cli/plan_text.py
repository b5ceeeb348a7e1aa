"""A plan, and as text for the terminal."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryPlan:
    """All sizes in bytes."""

    model: str
    architecture: str
    served_by: str  # "quire" or "transformers"
    parameters: int
    parameters_counted: bool  # from weight files, or estimated from the shapes
    weights_stored: int  # 0: there are no files
    weights_loaded: int
    weights_held: int  # by one device, of several that each have a part
    weights_as: str  # a type, or the file's blocks
    copies: int  # of quantized matrices, in the model's type, on one device
    no_copies: str  # why there are none, where there could be
    dtype: str
    device: str
    memory: int
    memory_usable: int
    activations: int
    reserved: int  # held by the driver and other programs on the device
    graphs: int  # kept free for CUDA graphs
    max_batched_tokens: int
    max_seqs: int
    cache_dtype: str
    layers: dict[str, int]  # "full attention", "a window of N" or "chunks of N" -> layers
    bytes_per_token: dict[str, int]  # by the same kinds
    page_size: int
    bytes_per_page: int
    states: int  # recurrent layers
    bytes_per_state: int  # of all of them, for one request
    snapshots: int  # states of prefixes, beside one for each request
    drafter: str  # the model or head that drafts; "" = none does
    drafts_by_text: bool
    draft_weights: int
    draft_cache: int  # under the model's pages, of each rank; of one that drafts by text its own
    adapters: int  # places for them
    adapter_rank: int  # the largest
    adapter_bytes: int  # set aside for them
    weights_twice: int  # of weights, those held in a second order for adapters' sake
    engines: int  # of data_parallel_size; all else is of one of them, and on a machine's one memory they share it
    ranks: int  # processes that share the model; pages and cache are of each
    stages: tuple[int, ...]  # layers of each; pages and cache are those of the stage that has most of them
    cache: int
    pages: int
    positions: int  # max_position of the model
    max_model_len: int
    concurrency: dict[int, float]  # length -> requests of that length at once
    fits: bool
    advice: tuple[str, ...]


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
    if plan.graphs:
        lines.append(("CUDA graphs", f"{size(plan.graphs)} kept free (--enforce-eager: none)"))
    lines += _lines_beside(plan)
    for kind, per_token in plan.bytes_per_token.items():
        lines.append(("Cache per token", f"{size(per_token)} in {plan.layers[kind]} layers with {kind}"))
    if plan.states:
        kept = f"one for each of {plan.max_seqs} requests, {plan.snapshots:,} of prefixes"
        lines.append(("State", f"{size(plan.bytes_per_state)} in {plan.states} recurrent layers: {kept}"))
    cache = size(plan.cache)
    if plan.bytes_per_page:
        pages = f"{plan.pages:,} pages of {plan.page_size} tokens, {size(plan.bytes_per_page)} each"
        cache = f"{cache} in {plan.cache_dtype}: {pages}{' beside the states' if plan.states else ''}"
    else:
        cache = f"{cache} for states; there are no keys and values"
    each = [f"{number} {what}" for number, what in ((plan.ranks, "ranks"), (plan.engines, "engines")) if number > 1]
    lines.append(("Cache", ", in each of ".join([cache, " of each of ".join(each)] if each else [cache])))
    if len(plan.stages) > 1:
        lines.append(("Stages", f"{len(plan.stages)}, of {', '.join(map(str, plan.stages))} layers"))
    lines.append(("Context", f"{plan.max_model_len:,} tokens (the model was made for {plan.positions:,})"))
    for length, requests in plan.concurrency.items():
        lines.append(("At once", f"{_requests(requests, plan.max_seqs)} of {length:,} tokens"))
    lines += [("Advice" if plan.fits else "Does not fit", text) for text in plan.advice]
    out, last = [], ""
    for name, text in lines:
        out.append(f"{'' if name == last else name:<16} {text}")
        last = name
    return "\n".join(out)


def _lines_beside(plan: MemoryPlan) -> list[tuple[str, str]]:
    lines = []
    if plan.copies:
        lines.append(("Copies", f"{size(plan.copies)} in {plan.dtype}, for many rows (--no-dequantized-copies: none)"))
    elif plan.no_copies:
        lines.append(("Copies", f"none: {plan.no_copies}"))
    if plan.drafter:
        weights = f"{plan.drafter}, with {size(plan.draft_weights)} of weights" if plan.draft_weights else plan.drafter
        cache = f" and {size(plan.draft_cache)} of cache" if plan.draft_cache else ""
        how = " of its own: it drafts by text" if plan.drafts_by_text else " under the model's pages" if cache else ""
        lines.append(("Drafts", weights + cache + how))
    if plan.adapters:
        room = f"{plan.adapters} at once, of rank {plan.adapter_rank} at most"
        taken = f"{size(plan.adapter_bytes)} set aside" if plan.adapter_bytes else "each takes its own size when it is read"
        lines.append(("Adapters", f"{room}: {taken}"))
    if plan.weights_twice:
        lines.append(("", f"{size(plan.weights_twice)} of the weights are held twice for them"))
    return lines


def _device(plan: MemoryPlan) -> str:
    if plan.device != "cuda":
        return f"{plan.device}, {size(plan.memory)} available"
    usable, reserved = size(plan.memory_usable), size(plan.reserved)
    count = plan.ranks * plan.engines
    which = "GPU" if count == 1 else f"{count} GPUs, each"
    return f"{which} with {size(plan.memory)}, of which {usable} may be used and {reserved} are the driver's"


def _requests(number: float, most: int) -> str:
    shown = f"{number:,.1f}" if number < 10 else f"{number:,.0f}"
    return f"{shown} requests" if number <= most else f"{most} requests (max_num_seqs; the cache would hold {shown})"


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
