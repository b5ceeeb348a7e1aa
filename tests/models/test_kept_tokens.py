"""Behind the last attention only the tokens that are kept go on, and they come out as transformers has them."""

import pytest
import torch

from oracle import FAMILIES, Sequences, make_checkpoint, open_checkpoint

IDS = torch.randint(3, 199, (2, 40), generator=torch.Generator().manual_seed(1)).tolist()
STEPS = (  # (sequence, first token, token after the last, how many of them are kept) of each row
    [(0, 0, 13, 1)],
    [(0, 13, 21, 0), (1, 0, 30, 1)],
    [(1, 30, 31, 1), (0, 21, 22, 0)],
    [(0, 22, 23, 1), (1, 31, 37, 6)],
    [(0, 23, 40, 5), (1, 37, 38, 1)],
)


def check(case):
    run = Sequences(case.model, 2, 40)
    expected = [case.expected(ids) for ids in IDS]
    for rows in STEPS:
        found = run.step([(row, IDS[row][begin:end]) for row, begin, end, _ in rows], [kept for *_, kept in rows])
        for logits, (row, _, end, kept) in zip(found, rows, strict=True):
            torch.testing.assert_close(logits, expected[row][end - kept : end], atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(checkpoint, family):
    check(checkpoint(family))


def test_a_model_of_transformers(tmp_path):
    make_checkpoint(FAMILIES["gemma2"], tmp_path)
    check(open_checkpoint(tmp_path, "transformers"))


def test_the_others_do_no_work_in_the_last_layer(checkpoint):
    model = checkpoint("llama").model
    seen = []
    hooks = [block.mlp.register_forward_hook(lambda _, inputs, __: seen.append(len(inputs[0]))) for block in model.layers]
    Sequences(model, 2, 40).step([(0, IDS[0][:13]), (1, IDS[1][:30])], [1, 0])
    for hook in hooks:
        hook.remove()
    assert seen == [43] * (len(model.layers) - 1) + [1]
