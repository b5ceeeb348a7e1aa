"""Every family in every way to run it: each cell is transformers' greedy tokens, or the same tokens in two ways, or a refusal
by name at the start that docs/models.md lists.

`make test` runs CORE and cells of what changed (tests/selection.py); `make matrix` runs all.
"""

import contextlib
import functools

import pytest

import selection
from forked import nursery
from matrix_case import Case, Processes
from matrix_cells import ARGUMENTS, CELLS
from matrix_columns import COLUMNS
from oracle import FALLBACK, FAMILIES
from quire.config.conflicts import CONFLICTS
from quire.types.errors import ConfigError
from recomputed_families import RECOMPUTED
from recurrent_families import RECURRENT

ROWS = FAMILIES | FALLBACK | RECURRENT | RECOMPUTED
# every column once, over kinds of layers: windows, experts, latent attention, ALiBi, recurrent state, layers of transformers
CORE = {
    "alone": "deepseek-v3", "batched": "gemma3", "chunks of 1": "mixtral", "chunks of 7": "qwen3-next", "chunks of 16": "bloom",
    "prefix hit": "gpt-oss", "preemption": "llama", "n > 1": "phi3-longrope", "seeded sampling": "gemma2", "grammar": "qwen3",
    "int4": "qwen3-moe", "LoRA": "mixtral", "tp 2": "llama", "speculation": "qwen2-some-windows", "engine restart": "llama",
    "pooling": "gemma3",
}  # fmt: skip
BESIDE = ("llama", "gemma3", "mixtral", "deepseek-v2", "bamba", "lfm2")  # families in which a changed column runs
MAX_CHANGED = 8  # cells of what changed


def cells_of(paths):
    """Return the cells that these changed files concern, at most MAX_CHANGED."""
    columns, architectures = selection.changed_columns(paths), selection.changed_architectures(paths)
    families = [name for name in ROWS if ROWS[name].architecture in architectures]
    both = [(name, cell) for name in families for cell in CELLS if cell in columns]
    either = [(name, cell) for name in families for cell in ("alone", "chunks of 7", "LoRA")]
    either += [(name, cell) for name in BESIDE for cell in CELLS if cell in columns]
    first = selection.spread([*dict.fromkeys(both)], MAX_CHANGED // 2)
    return first + selection.spread([pair for pair in dict.fromkeys(either) if pair not in first], MAX_CHANGED - len(first))


TABLE = [(name, cell) for name in ROWS for cell in CELLS]
if not selection.ALL:
    chosen = {*((name, cell) for cell, name in CORE.items()), *cells_of(sorted(selection.changed_files()))}
    TABLE = [pair for pair in TABLE if pair in chosen]


def test_the_core_has_every_column():
    assert {*CORE} == {*CELLS} and {*CORE.values()} <= {*ROWS}


@pytest.mark.parametrize(
    ("path", "name", "cell"),
    [
        ("sched/policy.py", "llama", "preemption"),
        ("features/lora/packing.py", "mixtral", "LoRA"),
        ("grammar/worker.py", "llama", "grammar"),
        ("models/gpt_oss.py", "gpt-oss", "alone"),
        ("models/llama.py", None, None),
        ("runner/step.py", "gemma3", "chunks of 7"),
        ("serve/app.py", None, None),
    ],
)
def test_cells_follow_from_the_files_that_changed(path, name, cell):
    found = cells_of([path])
    assert len(found) == len({*found}) <= MAX_CHANGED and found == cells_of([path])
    assert name is None or (name, cell) in found
    assert bool(found) == (not path.startswith("serve/"))


def test_the_document_has_all_columns():
    """Who of them is refused it says by itself: `scripts/models_page.py` reads the same conflicts as `test_cell`."""
    assert [column.name for column in COLUMNS] == [*CELLS]
    assert {conflict.what for conflict in CONFLICTS if conflict.of} <= {*ARGUMENTS.values()}


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """Started by the first cell that needs them."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def start() -> Processes:
            return Processes(
                *(stack.enter_context(nursery(tmp_path_factory.mktemp(kind), kind)) for kind in ("engine", "rank"))
            )

        yield start


@pytest.fixture(scope="module")
def case(checkpoint, processes, tmp_path_factory):
    room = tmp_path_factory.mktemp("matrix")
    return functools.cache(lambda name: Case(name, ROWS[name], checkpoint(name), room, processes))


@pytest.mark.parametrize(("name", "cell"), sorted(TABLE, key=lambda pair: list(ROWS).index(pair[0])))
def test_cell(case, name, cell):
    row = case(name)
    refused = [conflict for conflict in CONFLICTS if conflict.of in row.kinds and conflict.what == ARGUMENTS.get(cell)]
    if not refused:
        CELLS[cell](row)
        return
    with pytest.raises(ConfigError) as refusal:
        CELLS[cell](row)
    assert row.facts.architecture in str(refusal.value) and ARGUMENTS[cell] in str(refusal.value)
