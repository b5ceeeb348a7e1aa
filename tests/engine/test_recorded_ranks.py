"""Ranks whose steps are recorded make the same collectives in the same order, whatever each of them records or replays."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("recorded_ranks.py")


@pytest.fixture(scope="module")
def said(tiny_model):
    settings = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, str(SCRIPT), str(tiny_model)]
    ran = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def test_ranks_and_stages_record_the_same_and_give_the_tokens_of_one(said):
    assert said["tp 2 x pp 2"]["tokens"] == said["one"]["tokens"]
    ranks = said["tp 2 x pp 2"]["ranks"]
    assert len(ranks) == 4
    for first, second in zip(ranks[::2], ranks[1::2], strict=True):  # of one stage
        assert first == second
        captures, replays = first["counts"]
        assert captures > 2 and replays > 20 and first["calls"] > 100


def test_if_one_rank_cannot_record_no_rank_does(said):
    assert said["tp 2, one fails"]["tokens"] == said["one"]["tokens"]
    first, second = said["tp 2, one fails"]["ranks"]
    captures, replays = first["counts"]
    assert first == second and captures == 3 < said["one"]["ranks"][0]["counts"][0] and replays > 20


def test_ranks_record_the_same_beside_the_graphs_of_a_draft_model(said):
    """A draft model is whole on every rank: its graphs contain no collectives."""
    assert said["tp 2, drafts"]["tokens"] == said["one"]["tokens"]
    first, second = said["tp 2, drafts"]["ranks"]
    assert first == second and first["counts"][1] > 20 and first["drafts"][0] > 2
