"""Rewrite the tables of docs/models.md, between `<!-- generated: NAME -->` and `<!-- end -->`.

    python scripts/models_page.py

The tables come from the registry of model families, the tables of file types, `scripts/served.json` (what
`scripts/sweep.py --keep` found) and `tests/matrix_columns.py`.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from textwrap import fill, shorten
from typing import Any

from quire.config.conflicts import CONFLICTS
from quire.config.families import architectures, cards
from quire.config.families.card import Card
from quire.config.families.composites import COMPOSITES
from quire.config.quantization import quantization_table
from quire.features.media.families import BY_ENCODER, family_class
from quire.features.media.families import FAMILIES as MEDIA
from quire.files.gguf import GGML_TYPES, READABLE_TYPES

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests"))
from matrix_columns import COLUMNS  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
LINE_WIDTH, MAX_REASON_CHARACTERS = 128, 220
_SERVED = {"native": "families of our own", "fallback": "over our cache", "recomputed": "without keys and values"}
_NOT_SERVED = {"refused": "refused", "not built": "not tried, no tiny checkpoint of it was made"}
_BLOCK = re.compile(r"(?<=<!-- generated: )(\w+) -->\n.*?(?=<!-- end -->)", re.DOTALL)


def render(page: str) -> str:
    """Return the page with every generated block made anew."""
    return _BLOCK.sub(lambda block: f"{block[1]} -->\n{BLOCKS[block[1]]()}", page)


def models() -> str:
    rows: dict[str, tuple[dict[str, None], list[str]]] = {}
    for card in cards():
        kinds, names = rows.setdefault(card.title, ({}, []))
        kinds |= dict.fromkeys(card.kind.split(", "))
        names += card.architectures
    named = sorted(rows.items(), key=lambda row: row[0].casefold())
    return _table(
        "model | kind | architectures", ((title, ", ".join(kinds), _listed(names)) for title, (kinds, names) in named)
    )


def families() -> str:
    return _table(
        "architecture | code | in a GGUF file | text model of composites",
        (
            (f"`{name}`", f"`models/{card.model.partition(':')[0]}.py`", *_once(name, card))
            for name, card in sorted(architectures().items())
        ),
    )


def _once(name: str, card: Card) -> tuple[str, str]:
    """Return the card's GGUF architectures and text types, which stand beside its first architecture only."""
    first = name == card.architectures[0]
    return _listed(dict.fromkeys(row.name for row in card.gguf if first)), _listed(card.text if first else ())


def composites() -> str:
    """Return the multimodal architectures with the media that they read in any of their configurations."""
    found = {name: family for (name, _), family in BY_ENCODER.items()} | dict(MEDIA)
    read = {name: " and ".join(f"{kind}s" for kind in family_class(family).modalities) for name, family in found.items()}
    return "".join(f"- `{name}`{f': {read[name]}' if name in read else ''}\n" for name in sorted(COMPOSITES))


def sweep() -> str:
    found = _swept()
    by: dict[str, list[str]] = {}
    for kind, entry in found["types"].items():
        verdict = entry["verdict"]
        why = f": {shorten(entry['why'], MAX_REASON_CHARACTERS)}" if "why" in entry and verdict not in _SERVED else ""
        by.setdefault(verdict, []).append(f"`{kind}`{why}")
    count = sum(len(by.get(verdict, ())) for verdict in _SERVED)
    lines = [f"Of the {len(found['types'])} causal types of transformers {found['transformers']}, {count} are served:\n"]
    for verdict, title in (_SERVED | _NOT_SERVED).items():
        if not (names := by.get(verdict)):
            continue
        if verdict in _SERVED:
            text = f"- {title} ({len(names)}): {', '.join(names)}."
            lines.append(fill(text, LINE_WIDTH, subsequent_indent="  ", break_on_hyphens=False))
        else:
            lines += [f"- {title} ({len(names)}):", *(f"    - {name}" for name in names)]
    return "\n".join(lines) + "\n"


def columns() -> str:
    """The columns of the family matrix, and which models are refused which of them."""
    kinds = {
        "shared blocks": "`Zamba2ForCausalLM`",
        "by transformers": "models that `transformers` runs",
    }
    rows = []
    for column in COLUMNS:
        refused = [kinds[row.of] for row in CONFLICTS if row.of and row.what == column.argument]
        rows.append((column.name, column.holds, f"`{column.argument}`: {', '.join(refused)}" if refused else "–"))
    recurrent = sorted(name for name, card in architectures().items() if card.layers is not None)
    last = fill(f"Recurrent families: {_listed(recurrent)}.", LINE_WIDTH, break_on_hyphens=False)
    return _table("column | what holds | refused", rows) + f"\n{last}\n"


def quantization() -> str:
    return _table(
        "method | other names | a CPU | a CUDA GPU",
        (
            (name, _listed(entry["names"]), _kept(entry, "cpu"), _kept(entry, "cuda"))
            for name, entry in quantization_table().items()
        ),
    )


def types() -> str:
    sizes = {name: 8 * nbytes / elements for name, elements, nbytes in GGML_TYPES.values()}
    unreadable = [name for name in sizes if name not in READABLE_TYPES]
    table = _table("type | bits per weight", ((f"`{name}`", f"{sizes[name]:g}") for name in READABLE_TYPES))
    return table + f"\nNot read, and refused by name: {_listed(unreadable)}.\n"


BLOCKS: Mapping[str, Callable[[], str]] = {
    made.__name__: made for made in (models, families, composites, sweep, columns, quantization, types)
}


def _swept() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "scripts" / "served.json").read_text())
    return found


def _table(head: str, rows: Iterable[tuple[str, ...]]) -> str:
    body = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    return f"| {head} |\n|{'---|' * (head.count('|') + 1)}\n{body}"


def _kept(entry: Mapping[str, Any], device: str) -> str:
    return ", ".join(entry["kept"][device]) or "floats"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "–"


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
