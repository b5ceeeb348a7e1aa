"""The fixed order of recurrent layers: a token has the same bits as decode, in a prompt, in any chunk and in any batch."""

import pytest
import torch
from kernel_support import DTYPES

from quire.ops import order
from quire.ops.arguments import StateRows, TimeSteps

pytest.importorskip("triton")
from quire.ops.kernels import recurrent, scan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPU = DEVICE == "cuda"
TOKENS = 300 if ON_GPU else 11
ENTRIES = 8
# tokens of the steps that run one prompt
STEPS = {
    "decode": [1] * TOKENS,
    "chunks": [4, 1, TOKENS - 7, 2],
    "chunks of other lengths": [TOKENS - 5, 5],
    "draft rows": [TOKENS - 9, 1, 4, 4],
}
# tokens of the other rows in each step
OTHERS = {"alone": [], "with decode rows": [1, 1], "with prompts": [7, 1, 70]} if ON_GPU else {"with others": [3, 1]}
# heads or channels, and sizes of states: tiles are full in the first, and strides are no multiples of 16 in the second
SIZES = {"full": (8, 64, 128, 2), "odd": (3, 20, 24, 1)} if ON_GPU else {"odd": (3, 20, 12, 1)}


@pytest.fixture(autouse=True)
def fixed(monkeypatch):
    monkeypatch.setattr(order, "_fixed", True)


class Operator:
    """An operator with its weights, on rows of the values that `random` returns."""

    def __init__(self, name, sizes, dtype):
        self.name, self.sizes, self.dtype = name, sizes, dtype
        heads, size, width, groups = sizes
        self.parts = (heads * size, groups * width, groups * width, heads, heads, heads * width)
        shapes = {"convolve": (heads * size, 3), "delta": (heads, width, size), "delta by key": (heads, width, size),
                  "ssd": (heads, size, width), "scan": (heads * size, width)}  # fmt: skip
        self.state_shape = shapes[name]
        self.state_dtype = dtype if name == "convolve" else torch.float32
        generator = torch.Generator().manual_seed(5)
        self.bias, self.rate, self.skip = torch.randn(3, heads, generator=generator).to(DEVICE).unbind()
        self.taps = torch.randn(heads * size, 4, generator=generator).to(DEVICE, dtype)
        self.decay = -torch.rand(heads * size, width, generator=generator).to(DEVICE)
        self.by_channel = torch.randn(heads * size, generator=generator).to(DEVICE)
        self.by_key = torch.randn(heads, width, generator=generator).to(DEVICE)

    def values(self, tokens, seed):
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(tokens, sum(self.parts) + 3, generator=generator).to(DEVICE, self.dtype)

    def states(self):
        generator = torch.Generator().manual_seed(9)  # entries of rows that begin must not be read
        return torch.randn(ENTRIES, *self.state_shape, generator=generator).to(DEVICE, self.state_dtype)

    def __call__(self, values, state, rows):
        heads, size, width, groups = self.sizes
        x, key, query, dt, beta, raw, _ = torch.split(values, [*self.parts, 3], -1)
        count = len(values)
        if self.name == "convolve":
            return recurrent.convolve(x, self.taps, None, state, rows, True)
        if self.name == "scan":
            step = torch.nn.functional.softplus(x.float())
            return scan.selective_scan(
                x.float().contiguous(), step, self.decay, key[:, :width].float().contiguous(),
                query[:, :width].float().contiguous(), self.by_channel, state, rows,
            )  # fmt: skip
        x, key, query = x.view(count, heads, size), key.view(count, groups, width), query.view(count, groups, width)
        if self.name == "ssd":
            return recurrent.ssd(x, TimeSteps(dt, self.bias, self.rate, 0.001, 3.0), key, query, self.skip, state, rows)
        steps = TimeSteps(dt, self.bias, self.rate)
        if self.name == "delta by key":
            steps = TimeSteps(raw.view(count, heads, width), self.by_key, self.rate)
        return recurrent.delta_rule(query, key, x, steps, beta, state, rows)


def rows_of(shapes):
    """shapes: token count, first position and entry of each row."""
    counts = [count for count, _, _ in shapes]
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    return StateRows(
        torch.tensor([entry for _, _, entry in shapes], device=DEVICE),
        torch.tensor(starts, dtype=torch.int32, device=DEVICE),
        torch.tensor([count + first for count, first, _ in shapes], dtype=torch.int32, device=DEVICE),
        tuple((starts[i], *shape) for i, shape in enumerate(shapes)),
        all(count == 1 for count in counts),
    )


def run(operator, counts, others, entry):
    """Return outputs and final state of one prompt that runs in steps of `counts` tokens, with `others` in each step."""
    prompt, state, outputs, first = operator.values(TOKENS, 1), operator.states(), [], 0
    for count in counts:
        shapes = [(other, 5, 1 + i) for i, other in enumerate(others)]
        at = len(shapes) // 2  # rows before it and after it
        before = sum(others[:at])
        shapes.insert(at, (count, first, entry))
        noise = operator.values(sum(others), first + 2)
        values = torch.cat((noise[:before], prompt[first : first + count], noise[before:]))
        outputs.append(operator(values, state, rows_of(shapes))[before : before + count])
        first += count
    return torch.cat(outputs), state[entry]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", ["convolve", "delta", "delta by key", "ssd", "scan"])
def test_bits_do_not_depend_on_chunks_or_other_rows(name, sizes, dtype):
    operator = Operator(name, SIZES[sizes], dtype)
    outputs, state = run(operator, [TOKENS], [], 0)
    assert outputs.isfinite().all()
    for steps, counts in STEPS.items():
        for batch, others in OTHERS.items():
            found, after = run(operator, counts, others, 7)
            assert torch.equal(found, outputs), (steps, batch)
            assert torch.equal(after, state), (steps, batch)


def test_the_usual_order_of_ssd_would_be_noticed(monkeypatch):
    monkeypatch.setattr(order, "_fixed", False)
    operator = Operator("ssd", SIZES["odd"], torch.float32)
    outputs, _ = run(operator, [TOKENS], [], 0)
    assert not torch.equal(run(operator, STEPS["decode"], [], 0)[0], outputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("groups", "size"), [(1, 1000), (4, 128)] if ON_GPU else [(3, 20)])
def test_bits_of_gated_norms_do_not_depend_on_the_number_of_tokens(groups, size, dtype):
    generator = torch.Generator().manual_seed(2)
    both = torch.randn(40, 2 * groups * size + 3, generator=generator).to(DEVICE, dtype)
    weight = torch.randn(size, generator=generator).to(DEVICE, dtype)

    def run(part):
        x, gate, _ = torch.split(part, [groups * size, groups * size, 3], -1)
        return recurrent.gated_norm(x.float().contiguous(), gate, weight, 1e-5, groups, True)

    together = run(both)
    assert torch.equal(torch.cat([run(one) for one in torch.split(both, 1)]), together)
    assert torch.equal(run(both[3:20].clone()), together[3:20])
