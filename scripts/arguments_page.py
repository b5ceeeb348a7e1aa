"""Write docs/arguments.md: every argument, and those of vLLM that do nothing here.

python scripts/arguments_page.py > docs/arguments.md
"""

import dataclasses
import json
from typing import Any

from quire.config.args import EngineArgs
from quire.config.fields import ordered_fields, spec_of
from quire.config.server_args import ServerArgs
from quire.config.vllm_arguments import HINTS, REFUSED, REPLACED_VALUES, SERVER_HINTS, SERVER_REFUSED

_HEAD = """# Arguments

Made from the tables in `src/quire/config/`. The names are vLLM's: fields of `LLM(...)`, `AsyncLLM` and `EngineArgs`, and
flags of the commands, where `-` and `_` are the same and `--no-...` turns a flag off (`quire serve --help=all`). Anything
else is an error that names what is near.

- [Engine](#engine): every command and `LLM(...)`
- [Server](#server): `quire serve`
- [Hints](#hints): vLLM's arguments that change no answer here; they are taken, with a line in the log
- [Refused](#refused): vLLM's arguments that ask for what is not there, with the reason; a value that asks for nothing is
  taken

A number may have a unit: 1k is 1,000, 1K is 1,024. A flag whose value is a JSON object also takes its keys one by one,
`--compilation-config.mode 3`, and `--config FILE.yaml` reads flags from a file (`model: smollm2`, `port: 8080`,
`hf-overrides: {...}`); the command line wins over the file. Where the default is –, the engine decides by the model and the
device.
"""
_IN_A_ROW = 6
SERVED = {field.name for field in dataclasses.fields(ServerArgs)}  # what only the server has


def table() -> str:
    lines = [
        _HEAD,
        *_fields("Engine", EngineArgs),
        *_fields("Server", ServerArgs),
        "## Hints",
        "",
        "| arguments | why they change nothing |",
        "|---|---|",
    ]
    reasons: dict[str, list[str]] = {}
    for name, (reason, _) in {**HINTS, **SERVER_HINTS}.items():
        reasons.setdefault(reason, []).append(name)
    lines += [
        f"| {', '.join(f'`{name}`' for name in names[i : i + _IN_A_ROW])} | {reason} |"
        for reason, names in reasons.items()
        for i in range(0, len(names), _IN_A_ROW)
    ]
    lines += [
        f"| {', '.join(f'`{name}={value}`' for value in values)} | the same as `{', '.join(sorted(set(values.values())))}` |"
        for name, values in REPLACED_VALUES.items()
    ]
    lines.append("| `structured_outputs_config.backend=outlines`, `=lm-format-enforcer` | the same as `guidance` |")
    lines += ["", "## Refused", "", "| argument | unless it is | why |", "|---|---|---|"]
    for name, (reason, harmless) in [*REFUSED.items(), *SERVER_REFUSED.items()]:
        if name not in SERVED:
            lines.append(f"| `{name}` | {', '.join(f'`{value!r}`' for value in harmless) or 'left out'} | {reason} |")
    return "\n".join(lines) + "\n"


def _fields(title: str, owner: Any) -> list[str]:
    """A table for every group of fields, in their order."""
    lines, group = [f"## {title}"], None
    for field in ordered_fields(owner):
        spec = spec_of(field)
        if spec.group != group:
            group = spec.group
            lines += ["", f"**{group[0].upper()}{group[1:]}**", "", "| argument | default | what |", "|---|---|---|"]
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        shown = "–" if default is None else f"`{json.dumps(default)}`"
        choices = f" ({', '.join(spec.choices)})" if spec.choices else ""
        lines.append(f"| `{field.name}` | {shown} | {spec.help}{choices} |")
    return [*lines, ""]


if __name__ == "__main__":
    print(table(), end="")
