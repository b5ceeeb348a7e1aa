"""Rows of two sequences, of which some tokens are kept: those behind the last attention are as transformers has them."""

import torch

from oracle import Sequences

IDS = torch.randint(3, 199, (2, 40), generator=torch.Generator().manual_seed(1)).tolist()
STEPS = (  # (sequence, first token, token after the last, how many of them are kept) of each row
    [(0, 0, 13, 1)],
    [(0, 13, 21, 0), (1, 0, 30, 1)],
    [(1, 30, 31, 1), (0, 21, 22, 0)],
    [(0, 22, 23, 1), (1, 31, 37, 6)],
    [(0, 23, 40, 5), (1, 37, 38, 1)],
)


def check_kept_tokens(case):
    run = Sequences(case.model, 2, 40)
    expected = [case.expected(ids) for ids in IDS]
    for rows in STEPS:
        found = run.step([(row, IDS[row][begin:end]) for row, begin, end, _ in rows], [kept for *_, kept in rows])
        for logits, (row, _, end, kept) in zip(found, rows, strict=True):
            torch.testing.assert_close(logits, expected[row][end - kept : end], atol=5e-5, rtol=1e-4)
