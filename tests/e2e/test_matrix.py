"""Every family in every way to run it: each cell is transformers' greedy tokens, or the same tokens in two ways, or a refusal
by name at the start that docs/models.md lists.

`make test` runs some cells, others with every commit (tests/rotation.py); `make matrix` runs all.
"""

import contextlib
import functools

import pytest

import rotation
from forked import nursery
from matrix_case import Case, Processes
from matrix_cells import ARGUMENTS, CELLS
from matrix_columns import COLUMNS
from more_families import MORE
from oracle import FALLBACK, FAMILIES
from quire.config.conflicts import CONFLICTS
from quire.types.errors import ConfigError
from recomputed_families import RECOMPUTED
from recurrent_families import RECURRENT

ROWS = FAMILIES | FALLBACK | RECURRENT | RECOMPUTED
# how many cells of a column run with every commit, and of the other columns together
IN_CI = {"grammar": 2, "int4": 3, "LoRA": 3, "tp 2": 1, "engine restart": 1}
OTHERS = 28
SAMPLED = [name for name in FAMILIES if name not in MORE]  # of which those are taken
TABLE = [(name, cell) for name in ROWS for cell in CELLS]
if not rotation.ALL:
    TABLE = [
        *rotation.sample([(name, cell) for name in FAMILIES for cell in CELLS if cell not in IN_CI], OTHERS),
        *(pair for cell, count in IN_CI.items() for pair in rotation.sample([(name, cell) for name in SAMPLED], count)),
    ]


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
