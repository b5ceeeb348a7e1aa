"""The stages of a model, one behind the other in one process, give the whole model's logits, bit for bit."""

from dataclasses import replace

import pytest
import torch

import selection
from more_families import MORE
from oracle import FAMILIES, in_pieces
from quire.config.args import split_layers
from quire.config.layer_patterns import staging_problem
from quire.dist.stages import PipelineRank, Stage
from quire.load.load import load_weights
from quire.models.registry import build_model
from quire.prepare.stage import take_stage
from quire.types.errors import ConfigError

IDS = torch.randint(3, 199, (2, 40), generator=torch.Generator().manual_seed(0)).tolist()


def staged(facts, layers, load_format="auto"):
    models = []
    for index in range(len(layers)):
        model = build_model(facts)
        take_stage(model, Stage(index, layers))
        load_weights(model, facts, device="cpu", dtype="float32", load_format=load_format)
        models.append(model)
    return models


def behind_each_other(models):
    """As one model, which the first of them is made into."""
    first, bodies = models[0], [model.run_blocks for model in models]

    def run(x, batch):
        for body in bodies[:-1]:
            x = body(x, replace(batch, logit_tokens=None))
            assert len(x) == len(batch.ids)
        return bodies[-1](x, batch)

    first.body = run
    first.attentions = [attention for model in models for attention in model.attentions]
    first.recurrents = [recurrence for model in models for recurrence in model.recurrents]
    return first


RECURRENT_KINDS = ("bamba", "falcon-h1", "minimax", "nemotron-h", "olmo-hybrid")


@pytest.mark.parametrize(
    "family", [*sorted({*FAMILIES} - {*MORE}), *selection.select(sorted(MORE), MORE, 6, 4), *RECURRENT_KINDS]
)
def test_stages_are_the_whole(checkpoint, family):
    case = checkpoint(family)
    if reason := staging_problem(case.facts.hf):
        pytest.skip(reason)
    models = staged(case.facts, split_layers(case.facts.depth, min(2, case.facts.depth)))
    held = [sum(weight.numel() for weight in model.parameters()) for model in (*models, case.model)]
    assert sum(held[:-1]) == held[-1]  # a head that is the embedding is there once
    for ours, theirs in zip(in_pieces(behind_each_other(models), *IDS), in_pieces(case.model, *IDS), strict=True):
        assert torch.equal(ours, theirs)


def test_random_weights_are_those_of_the_whole(checkpoint):
    case = checkpoint("llama")
    whole = build_model(case.facts)
    load_weights(whole, case.facts, device="cpu", dtype="float32", load_format="dummy")
    models = staged(case.facts, split_layers(3, 3, "1,1,1"), "dummy")
    assert torch.equal(in_pieces(behind_each_other(models), *IDS)[0], in_pieces(whole, *IDS)[0])


def test_models_of_transformers_have_no_stages(checkpoint):
    model = build_model(checkpoint("llama").facts, "transformers")
    with pytest.raises(ConfigError, match="a model family of Quire's own"):
        take_stage(model, Stage(0, split_layers(3, 2)))


def test_who_hands_on_to_whom():
    ranks = [PipelineRank.of(rank, split_layers(7, 3), 2) for rank in range(6)]
    assert [rank.rank for rank in ranks] == list(range(6))
    assert [rank.next_rank for rank in ranks] == [2, 3, 4, 5, 0, 1] and [rank.previous_rank for rank in ranks] == [
        4,
        5,
        0,
        1,
        2,
        3,
    ]
    assert [list(rank.stage_ranks) for rank in ranks[::2]] == [[0, 1], [2, 3], [4, 5]]
    assert [rank.stage.own for rank in ranks[::2]] == [range(2), range(2, 4), range(4, 7)]
