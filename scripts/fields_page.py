"""Write docs/fields.md: what every field of every protocol does.

python scripts/fields_page.py > docs/fields.md
"""

from quire.serve.field_table import HINTS, INSTEAD, PATHS, REFUSED, is_known, refusal
from quire.serve.protocol import RequestBody, ResponsesRequest

# answers repeat them, or they do more
WORK_SOMEWHERE: dict[type[RequestBody], tuple[str, ...]] = {ResponsesRequest: ("metadata", "store", "user", "include")}
HINTS_OF: dict[type[RequestBody], dict[str, str]] = {ResponsesRequest: {"stream_options": "events are never padded"}}

_INNER_HINTS = [
    "| `reasoning.summary` in /v1/responses | there are no summaries: the reasoning is returned whole |",
    "| `text.verbosity` in /v1/responses | models here do not know it |",
    "| `cache_control` of blocks and tools in /v1/messages | prompts are cached by their content, always |",
    "| `eager_input_streaming` of tools in /v1/messages | arguments are streamed as they come |",
    "| `thinking.budget_tokens` in /v1/messages, where no reasoning is parsed | there is nothing to bound |",
]

_HEAD = """# Fields of requests

Every field of every protocol, made from `src/quire/serve/field_table.py`: it works, it is a hint that changes no answer, or
it is refused by name with what to send instead. A refused field may be sent with a value that asks for nothing: null, false, 0,
something empty, or its default; of those that begin with `guided_`, null or false. Fields that no protocol has
(`max_tokns`) are ignored, as in vLLM; the server's log warns of each name once, of 64 names at most, with the nearest field.
vLLM's sampling fields (`seed`, `min_p`, `structured_outputs` ...) mean the same in all four protocols that generate.
Ollama's API has [its own fields and options](ollama.md#fields).
"""


def handling(model: type[RequestBody], name: str) -> str:
    """works, hint, refused, or nothing where it would mean nothing."""
    if (name in HINTS and name not in WORK_SOMEWHERE.get(model, ())) or name in HINTS_OF.get(model, {}):
        return "hint"
    if name in model.model_fields:
        return "works"
    if refusal(model, name) is not None:
        return "refused"
    return "hint" if is_known(name) else ""


def all_names() -> list[str]:
    models = dict.fromkeys(name for model in PATHS for name in model.model_fields)
    return sorted({*models, *HINTS, *REFUSED, *(name for names in INSTEAD.values() for name in names)})


def table() -> str:
    lines = [_HEAD, f"| field | {' | '.join(PATHS.values())} |", f"|---|{'---|' * len(PATHS)}"]
    for name in all_names():
        lines.append(f"| `{name}` | {' | '.join(handling(model, name) for model in PATHS)} |")
    lines += ["", "## Why hints change nothing", "", "| field | why |", "|---|---|"]
    lines += [f"| `{name}` | {why} |" for name, why in HINTS.items()]
    lines += [f"| `{name}` in {PATHS[model]} | {why} |" for model, names in HINTS_OF.items() for name, why in names.items()]
    lines += _INNER_HINTS
    lines += ["", "## Why fields are refused", "", "| field | why |", "|---|---|"]
    lines += [f"| `{name}` | {why} |" for name, why in REFUSED.items()]
    lines += [f"| `{name}` in {PATHS[model]} | {why} |" for model, names in INSTEAD.items() for name, why in names.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
