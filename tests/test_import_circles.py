"""No two files import each other, at the top or later: whichever is read first, the other one can be left for afterwards."""

import ast
from collections.abc import Iterator
from pathlib import Path

import quire

ROOT = Path(quire.__file__).parent
FILES = {
    ".".join(("quire", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in ROOT.rglob("*.py")
}


def imports(node: ast.AST) -> Iterator[str]:
    """What runs may import, wherever it stands; imports for a type checker alone do not run."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert not child.level, "import files by their full names"
            whole = [f"{child.module}.{alias.name}" for alias in child.names]
            yield from (name if name in FILES else child.module or "" for name in whole)
        elif isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            for other in child.orelse:
                yield from imports(other)
        else:
            yield from imports(child)


def test_no_two_files_import_each_other() -> None:
    needs = {name: set(imports(ast.parse(path.read_text()))) - {name} for name, path in FILES.items()}
    circles = [f"{a} and {b}" for a in sorted(needs) for b in needs[a] & needs.keys() if a < b and a in needs[b]]
    assert not circles, f"import each other: {', '.join(circles)}"
    assert "quire.types.plan" in needs["quire.sched.plan_builder"]  # so that something is seen
