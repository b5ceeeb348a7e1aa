"""What adapters add inside a program, for rows of any of them: against the layers' own way in torch."""

import pytest
import torch

from quire.device.cpu.graph import Graph, Runtime
from quire.device.cpu.program import LowRankTables
from quire.device.cpu.session import Session
from quire.layers.lora import LinearBank, LinearLoRA, LowRank
from quire.ops.native import adapts

pytestmark = pytest.mark.skipif(not adapts(), reason="there are no C kernels that know adapters")
PARTS = [(0, 37), (37, 5), (42, 64)]


def numbers(ranks, inputs, seed):
    dice = torch.Generator().manual_seed(seed)
    stacked = torch.randn(inputs, sum(ranks), generator=dice)
    parts, at = [], 0
    for (start, width), rank in zip(PARTS, ranks, strict=True):
        if rank:
            parts.append(LowRank(start, stacked[:, at : at + rank], torch.randn(rank, width, generator=dice)))
            at += rank
    return LinearLoRA(tuple(parts), stacked=stacked)


@pytest.mark.parametrize("inputs", [1, 48, 71])
def test_any_rank_and_parts(inputs):
    bank, tables = LinearBank(), LowRankTables()
    table = tables.of(bank, inputs)
    tables.subscribe()
    given = {1: (3, 8, 16), 2: (0, 17, 0), 3: (40, 1, 33), 7: (16, 16, 16)}
    for place, ranks in given.items():
        bank.put(place, numbers(ranks, inputs, place))
    bank.put(4, LinearLoRA(gain=torch.ones(106)))
    assert tables.supported([1, 2, 3, 4, 7, 9]) == [1, 2, 3, 7, 9]
    graph, columns = Graph(Runtime.OWN), 106
    [sum_of] = graph.add("Add", ["base", "more"])
    [out] = graph.add("LowRank", [sum_of, "x", "places"], table=table.address)
    inner = [("x", inputs), ("base", columns), ("more", columns), ("places", 1)]
    session = Session(graph, inner, [(out, columns)])
    asked = torch.tensor([1, 0, 3, 2, 7, 9, 4, 1, 1])
    dice = torch.Generator().manual_seed(0)
    x, base = torch.randn(len(asked), inputs, generator=dice), torch.randn(len(asked), columns, generator=dice)

    def run(rows):
        some = [values[rows].contiguous() for values in (x, base, torch.zeros_like(base), asked.float().unsqueeze(1))]
        return session.run(*some)[0].clone()

    got, expected = run(slice(None)), base.clone()
    for row, place in enumerate(asked.tolist()):
        if place in given:
            for part in bank.slots[place].parts:
                expected[row, part.outputs] += (x[row] @ part.down) @ part.up
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=2e-4)
    assert torch.equal(got[1], base[1]) and torch.equal(got[5:7], base[5:7])
    assert torch.equal(run(slice(2, 5)), got[2:5])  # in other company
    bank.drop(1)
    bank.put(3, numbers((1, 0, 2), inputs, 5))
    assert torch.equal(run(slice(0, 1)), base[:1]) and not torch.equal(run(slice(2, 3)), got[2:3])
