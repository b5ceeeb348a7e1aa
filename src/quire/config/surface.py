"""docs/arguments.md: vLLM's arguments that are no fields here. `python -m quire.config.surface` writes it."""

import dataclasses

from quire.config.hints import HINTS, TAKEN_FOR
from quire.config.refused import REFUSED
from quire.config.server_args import ServerArgs
from quire.config.server_refused import SERVER_HINTS, SERVER_REFUSED

_HEAD = """# vLLM's arguments

`quire serve --help=all` lists the arguments that do something, with vLLM's names. This page, which is made from the tables in
`src/quire/config/`, lists vLLM's other ones: hints, which change no answer and are taken with a line in the log, and what
asks for something that is not there, which is refused with its reason unless its value asks for nothing. Any other name is
an error. The names are those of `LLM(...)` and `EngineArgs`; on the command line `-` and `_` are the same.

A flag whose value is a JSON object also takes its keys one by one, `--compilation-config.mode 3`, and `--config FILE.yaml`
reads flags from a file (`model: smollm2`, `port: 8080`, `hf-overrides: {...}`); the command line wins over the file.
"""
_IN_A_ROW = 6
SERVED = {field.name for field in dataclasses.fields(ServerArgs)}  # what only the server has


def table() -> str:
    lines = [_HEAD, "## Hints", "", "| arguments | why they change nothing |", "|---|---|"]
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
        for name, values in TAKEN_FOR.items()
    ]
    lines.append("| `structured_outputs_config.backend` | grammars are followed by llguidance, whatever the name |")
    lines += ["", "## Refused", "", "| argument | unless it is | why |", "|---|---|---|"]
    for name, (reason, harmless) in [*REFUSED.items(), *SERVER_REFUSED.items()]:
        if name not in SERVED:
            lines.append(f"| `{name}` | {', '.join(f'`{value!r}`' for value in harmless) or 'left out'} | {reason} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
