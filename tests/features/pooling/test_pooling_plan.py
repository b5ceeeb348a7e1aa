"""What `quire plan` says of a pooling model."""

from pathlib import Path

import pytest

from quire.cli.memory_plan import make_plan
from quire.cli.plan import render
from quire.config.args import EngineArgs
from sentence_models import save_text_encoder
from tiny_model import make_model


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    save_text_encoder(folder)
    return folder


def test_the_memory_of_an_encoder(encoder: Path) -> None:
    plan = make_plan(EngineArgs(model=str(encoder), device="cpu", max_num_batched_tokens=1000, max_num_seqs=6), 8 << 30)
    lines = dict(line.split(maxsplit=1) for line in render(plan).splitlines() if not line.startswith("In one step"))
    assert plan.fits and plan.cache == 0 and plan.pooling > 0
    assert lines["Tasks"] == "embed, token_embed, score"
    assert lines["Cache"] == "none: an encoder reads each prompt whole in one step and keeps no keys and values"
    assert "In one step      6 prompts of 96 tokens" in render(plan)  # max_num_seqs; the token budget has room for 10
    assert lines["Pooling"].endswith("reserved for hidden states and results")


def test_a_decoder_that_pools_has_a_cache(tmp_path: Path) -> None:
    make_model(tmp_path)
    text = render(make_plan(EngineArgs(model=str(tmp_path), device="cpu", runner="pooling"), 8 << 30))
    assert "Tasks            embed, token_embed, score" in text and "pages of" in text and "At once" in text
    assert "Tasks" not in render(make_plan(EngineArgs(model=str(tmp_path), device="cpu"), 8 << 30))
