"""Pages lead where they say, are all in the site, name files that exist, and those made from the code are as the code is."""

import argparse
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from quire.cli.main import make_parser

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
CODE = re.compile(r"^( *)```.*?^\1```$|`[^`\n]*`", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+?) *#*$", re.MULTILINE)
FILE = re.compile(r"`((?:[\w-]+/)+[\w-]+\.(?:py|c|h))`")
PAST = {ROOT / "CHANGELOG.md", *(DOCS / "notes").iterdir()}  # these speak of files as they were
# page -> the script that writes it
GENERATED = {
    "arguments.md": "arguments_page",
    "fields.md": "fields_page",
    "metrics.md": "metrics_page",
}


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in HEADING.findall(text)}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    text = CODE.sub("", page.read_text(encoding="utf-8"))
    lost = []
    for link in LINK.findall(text):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.is_relative_to(ROOT) or not target.exists() or (anchor and anchor not in anchors(target)):
            lost.append(link)
        elif page.is_relative_to(DOCS) and not target.is_relative_to(DOCS):
            lost.append(f"{link}, which the site does not have")
    assert not lost


def test_the_site_has_every_page_once() -> None:
    def pages(entry: object) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        elif isinstance(entry, dict):
            for inner in entry.values():
                yield from pages(inner)
        elif isinstance(entry, list):
            for inner in entry:
                yield from pages(inner)

    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert sorted(pages(nav)) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


@pytest.mark.parametrize("page", [page for page in PAGES if page not in PAST], ids=name)
def test_files_that_are_named_exist(page: Path) -> None:
    named = set(FILE.findall(page.read_text(encoding="utf-8")))
    assert not {file for file in named if not any((ROOT / room / file).exists() for room in ("", "src", "src/quire"))}


@pytest.mark.parametrize(("page", "module"), GENERATED.items())
def test_pages_made_from_the_code_are_current(page: str, module: str) -> None:
    current = importlib.import_module(module).table()
    assert (DOCS / page).read_text(encoding="utf-8") == current, f"write docs/{page} again with {module}"


def test_the_tables_of_the_page_of_models_are_current() -> None:
    page = importlib.import_module("models_page")
    current = page.PAGE.read_text(encoding="utf-8")
    assert page.render(current) == current, "run: python scripts/models_page.py"
    assert all(f"<!-- generated: {block} -->" in current for block in page.BLOCKS)


def test_metrics_that_are_named_exist() -> None:
    known = set(re.findall(r"`(quire:\w+)", (DOCS / "metrics.md").read_text(encoding="utf-8")))
    named = {metric for page in PAGES for metric in re.findall(r"quire:[a-z]\w+", page.read_text(encoding="utf-8"))}
    assert len(known) > 30 and not named - known


def test_flags_that_are_named_exist() -> None:
    known, parsers = set(), [make_parser()]
    while parsers:
        for action in parsers.pop()._actions:
            known |= set(action.option_strings)
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
    unknown = {}
    others = {DOCS / page for page in ("benchmarking.md", "performance.md", "contributing.md", "models.md", *GENERATED)}
    for page in set(PAGES) - PAST - others:
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+\b", page.read_text(encoding="utf-8")))
        if named - known:
            unknown[page.name] = named - known
    assert not unknown


def test_the_page_of_the_python_api_names_what_there_is() -> None:
    """`make docs` reads docstrings from the sources; this is what would stop it."""
    named = re.findall(r"^::: (\S+)$((?:\n    .*)*)", (DOCS / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(named) > 15
    for path, options in named:
        home, _, attribute = path.rpartition(".")
        found = importlib.import_module(path) if path.islower() else getattr(importlib.import_module(home), attribute)
        for members in re.findall(r"members: \[(.*)\]", options):
            assert all(hasattr(found, member) for member in members.split(", "))
