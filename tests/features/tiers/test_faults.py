"""Faults in host memory, files and system calls: answers have the bits of an engine without tiers, and nothing is left."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "tier_faults.py"
FAULTS = int(os.environ.get("QUIRE_FAULTS", "2000"))


@pytest.fixture(scope="module")
def tier_faults():
    spec = importlib.util.spec_from_file_location("tier_faults", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = sys.modules["tier_faults"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("kind", "share"), [("pages of 1", 0.5), ("some windows", 0.25), ("tenants", 0.25)])
def test_no_fault_changes_a_bit_or_leaves_anything(tier_faults, tmp_path: Path, kind: str, share: float):
    with tier_faults.exact_attention():
        trial = tier_faults.Trial(kind, tmp_path, seed=0)
        trial.run(int(FAULTS * share))
    assert trial.counts.total() >= FAULTS * share and trial.answers > 20
    host, disk = (sum(count for name, count in trial.counts.items() if name.startswith(place)) for place in ("host", "disk"))
    assert host > 50 and disk > 5
