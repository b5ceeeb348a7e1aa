"""The kernels that draw, penalize and score, against what the sampler does on a CPU, stage by stage."""

import numpy as np
import pytest
import torch

from quire.device.registry import open_device
from quire.features.speculation.device.drafter import DraftSampler
from quire.ops.arguments import BROKEN, GOOD, NOTHING_ALLOWED, Factors, SampleColumns, SampleScratch
from quire.ops.sample import reference_penalize, reference_score
from quire.runner.sampler.pipeline import Sampler
from quire.runner.sampler.stage import Rows
from quire.runner.slots import Slots
from quire.types.plan import Admission
from quire.types.sampling import SamplingParams

pytest.importorskip("triton")
from quire.ops.kernels import sample as kernels
from quire.ops.kernels import sample as sample_kernels

INF = float("inf")
CPU = torch.device("cpu")
PARAMS = [
    {"temperature": 0},
    {},
    {"temperature": 0.6},
    {"top_k": 1},
    {"top_k": 3},
    {"top_k": 10_000},
    {"top_k": 300, "temperature": 1.9},
    {"top_p": 0.7, "temperature": 1.4},
    {"top_p": 1e-6},
    {"top_p": 0.999},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.5, "min_p": 0.01},
    {"top_k": 200, "top_p": 0.9, "temperature": 2.0},
]


@pytest.fixture(autouse=True)
def small_tiles(device, monkeypatch):
    """The interpreter pays for every lane, and several tiles a row are to be seen."""
    if device == "cpu":
        monkeypatch.setattr(kernels, "TILE", 512)


def columns(params: list[SamplingParams], seeds: list[int], vocabulary: int, device: str) -> SampleColumns:
    return SampleColumns(
        torch.tensor([p.temperature for p in params], device=device),
        torch.tensor([p.top_k if 0 < p.top_k < vocabulary else vocabulary for p in params], device=device),
        torch.tensor([p.top_p for p in params], device=device),
        torch.tensor([p.min_p for p in params], device=device),
        torch.tensor(seeds, device=device),
    )


def draw_both(logits, params, device, seed=0, fault=None):
    """(ids, faults, tokens written) of the kernels, and the ids and faults of the sampler's stages. Slots in reverse order."""
    rows, vocabulary = logits.shape
    parameters = [SamplingParams(**p) for p in params]
    slots, ends = np.arange(rows)[::-1].copy(), np.arange(3, 3 + rows)
    sampler = Sampler(rows, vocabulary, CPU, "raw_logprobs")
    for row, slot in enumerate(slots.tolist()):
        nothing = np.zeros(3, np.int32)
        sampler.admit(slot, Admission(slot, nothing, 3, 0, parameters[row], seed=seed + row, stop_ids=(), bad_words=()))
    tokens = torch.full((rows, rows + 4), -5, dtype=torch.int32)
    there = [torch.from_numpy(x) for x in (slots, ends, ends)]
    expected = sampler._sample_in_stages(logits.clone(), Rows(slots, ends, ends, *there, tokens.clone()), fault)
    scratch, tokens = SampleScratch(rows, vocabulary, torch.device(device)), tokens.to(device)
    drawer, by_slot = there[0].clone(), [parameters[row] for row in slots.tolist()]
    drawer[0] = -1  # nobody
    held = columns(by_slot, [seed + row for row in slots.tolist()], vocabulary, device)
    there_fault = None if fault is None else fault.to(device)
    kernels.sample_rows(logits.to(device), drawer.to(device), there[1].to(device), held, tokens, scratch, there_fault)
    assert (tokens[slots[0]] == -5).all() and int((tokens != -5).sum()) == rows - 1
    written = tokens.cpu()[there[0], there[1]][1:]
    return scratch.out.cpu()[:, 1:], written, expected[:, 1:]


@pytest.mark.parametrize("vocabulary", [11, 700, 2177])
@pytest.mark.parametrize("levels", [None, 2], ids=["distinct", "ties"])
def test_draws_are_those_of_the_stages(device, vocabulary, levels):
    logits = torch.randn(1 + len(PARAMS), vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * 3
    logits = logits if levels is None else (logits * levels).round() / levels
    got, written, expected = draw_both(logits, [{}, *PARAMS], device, vocabulary)
    assert got.tolist() == expected.tolist()
    assert written.tolist() == expected[0].tolist()


@pytest.mark.parametrize("shape", ["smaller", "larger", "mapped"])
def test_drafts_are_drawn_as_the_target_draws(device, shape):
    """From the draft's logits, by the target's token ids; what the target drew stays where it was."""
    there, rows, vocabulary = torch.device(device), len(PARAMS), 700
    slots = Slots(rows, 8, 1, 4, there, updates=open_device(there.type).updates())
    sampler = Sampler(rows, vocabulary, there, "raw_logprobs", fused=True)
    for slot, params in enumerate(PARAMS):
        nothing = np.zeros(3, np.int32)
        sampler.admit(slot, Admission(slot, nothing, 3, 0, SamplingParams(**params), seed=slot, stop_ids=(), bad_words=()))
    sampler.columns.refresh(slots.updates)
    slots.updates.deliver()
    drafts, slot, end = DraftSampler(sampler, slots), np.arange(rows), np.full(rows, 5)
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(1)).to(there) * 3
    logits[:, 40:130] = logits[:, 650:] = -INF
    drawn = sampler.sample(logits.clone(), drafts.rows(slot, end)).ids[:rows].tolist()
    ids = None
    if shape == "mapped":  # to the target's ids, in another order, without those that it cannot draw
        ids = torch.randperm(650, generator=torch.Generator().manual_seed(2))
        ids = ids[(ids < 40) | (ids >= 130)].to(there)
        logits = logits[:, ids]
    elif shape == "larger":
        logits = torch.cat((logits, torch.full((rows, 20), 50.0, device=there)), 1)
    else:
        logits = logits[:, :650]
    out = sampler.latest.clone()
    assert drafts.guess(logits, drafts.rows(slot, end), ids).tolist() == drawn
    assert slots.tokens[:, 5].tolist() == drawn and (sampler.latest == out).all()


@pytest.mark.parametrize("value", [-0.0, -3.5, 1e30])
def test_rows_of_equals(device, value):
    logits = torch.full((1 + len(PARAMS), 700), value)
    logits[:, ::7] = -INF
    got, _, expected = draw_both(logits, [{}, *PARAMS], device)
    assert got.tolist() == expected.tolist()


def test_a_single_token_left(device):
    logits = torch.full((1 + len(PARAMS), 700), -INF)
    logits[:, 177] = -2.0
    got, _, _ = draw_both(logits, [{}, *PARAMS], device)
    assert got.tolist() == [[177] * len(PARAMS), [GOOD] * len(PARAMS)]


EXTREMES = [
    {"top_p": 1e-46},
    {"top_p": 1e-40, "top_k": 5},
    {"top_p": 5e-324, "min_p": 1e-42},
    {"top_p": 0.5, "temperature": 0.01},
]


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow", "ignore:divide")
@pytest.mark.parametrize("largest", [9.0, 3e30, 3e37], ids=["usual", "large", "infinite after temperature"])
def test_shares_that_are_nearly_nothing_and_logits_that_are_nearly_infinite(device, largest):
    """The likeliest token stays, whatever the numbers are."""
    logits = torch.randn(1 + len(EXTREMES), 700, generator=torch.Generator().manual_seed(1))
    logits[:, 123] = largest
    got, written, _ = draw_both(logits, [{}, *EXTREMES], device)
    assert got[0].tolist() == [123] * 3 + [written[3]] and got[1].tolist() == [GOOD] * 4
    assert (written >= 0).all() and (written < 700).all()


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_k": 2, "top_p": 0.9}, {"min_p": 0.5}])
def test_broken_rows(device, params):
    logits = torch.zeros(5, 700)
    logits[1, 130], logits[2, 130], logits[3] = float("nan"), INF, -INF
    logits[4, 60] = 9e9
    got, _, _ = draw_both(logits, [{}, *[params] * 4], device)
    assert got[1].tolist() == [BROKEN, BROKEN, BROKEN, GOOD]
    assert ((got[0] >= 0) & (got[0] < 700)).all() and got[0, 3] == 60


def test_faults_of_edited_logits(device):
    logits = torch.zeros(4, 700)
    logits[1:3] = -INF
    fault = torch.tensor([GOOD, GOOD, BROKEN, GOOD], dtype=torch.int32)
    got, _, expected = draw_both(logits, [{}, {}, {}, {"top_k": 3}], device, fault=fault)
    assert got[1].tolist() == expected[1].tolist() == [NOTHING_ALLOWED, BROKEN, GOOD]


@pytest.mark.parametrize("spread", [0.0, 0.05, 8.0])
def test_many_groups_and_tiles(device, spread):
    """Flat rows look at everything, again and again; steep ones at a few groups."""
    logits = torch.randn(6, 2177, generator=torch.Generator().manual_seed(5)) * spread
    params = [{}, {"top_p": 0.3}, {"top_k": 20, "top_p": 0.3}, {"top_k": 1000, "top_p": 0.95}, {"top_k": 20}, {"min_p": 0.9}]
    got, _, expected = draw_both(logits, params, device)
    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("block", [4, 1024])
def test_penalties(device, monkeypatch, block):
    monkeypatch.setattr(sample_kernels, "BLOCK", block)
    generator = torch.Generator().manual_seed(1)
    slots, length, vocabulary = 5, 30, 12
    tokens = torch.randint(0, vocabulary, (slots, length), generator=generator, dtype=torch.int32)
    slot, end, prompt = torch.tensor([3, 0, 4, 1]), torch.tensor([30, 1, 17, 9]), torch.tensor([11, 1, 4, 9])
    factors = Factors(
        torch.tensor([1.0, 1.3, 0.7, 2.0, 1.0]), torch.tensor([0.5, 0.0, 0, -1.0, 0.25]), torch.tensor([0, 0.5, 0, 0.75, -2.0])
    )
    logits = torch.randn(6, vocabulary, generator=generator)
    row = torch.tensor([5, 1, 2, 0])
    expected = logits.clone()
    reference_penalize(expected, row, slot, end, prompt, tokens, factors, 30)
    counts = torch.zeros(4, vocabulary, dtype=torch.int32, device=device)
    got = logits.to(device, copy=True)
    moved = [x.to(device) for x in (row, slot, end, prompt, tokens)]
    sample_kernels.penalize(got, *moved, Factors(*(factor.to(device) for factor in factors)), counts)
    torch.testing.assert_close(got.cpu(), expected)
    assert not counts.any()


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("repetition", [1.2e-38, 1e-20, 1.0, 1e20, 3.4e38])
def test_penalties_leave_numbers_that_can_be_divided(device, repetition):
    logits = torch.tensor([[3.0, -3.0, 0.0, -INF, 1e30, -1e30, 2.0, 1.0]]).repeat(2, 1)
    tokens = torch.arange(7, dtype=torch.int32).repeat(2, 1)
    there = [torch.tensor(x) for x in ([0, 1], [0, 1], [7, 7], [7, 3])]
    factors = Factors(torch.full((2,), repetition), torch.tensor([0.0, 2.0]), torch.tensor([0.0, -2.0]))
    expected = logits.clone()
    reference_penalize(expected, *there, tokens, factors, 7)
    counts = torch.zeros(2, 8, dtype=torch.int32, device=device)
    got = logits.to(device)
    sample_kernels.penalize(
        got, *(x.to(device) for x in there), tokens.to(device), Factors(*(f.to(device) for f in factors)), counts
    )
    assert torch.equal(got.cpu(), expected)
    assert (expected[:, 3] == -INF).all() and expected[:, 7].tolist() == [1.0, 1.0]
    rest = expected[:, [0, 1, 2, 4, 5, 6]]
    assert rest.isfinite().all() and (rest / 0.01).isfinite().all()


@pytest.mark.parametrize("vocabulary", [7, 4096, 9001])
def test_scores(device, vocabulary):
    logits = torch.randn(4, vocabulary, generator=torch.Generator().manual_seed(2)) * 5 - 40
    logits[1] = 2.5
    logits[2, 1:] = -INF
    chosen = torch.tensor([3, 5, 0, vocabulary - 1])
    for got, expected in zip(
        sample_kernels.score(logits.to(device), chosen.to(device)), reference_score(logits, chosen), strict=True
    ):
        torch.testing.assert_close(got.cpu(), expected)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("bad", [float("nan"), INF])
def test_broken_scores(device, bad):
    logits = torch.zeros(1, 5000)
    logits[0, 4500] = bad
    chosen = torch.tensor([3])
    peak, spread, _ = sample_kernels.score(logits.to(device), chosen.to(device))
    assert (logits[0, 3].to(device) - peak - spread).isnan()
    peak, spread, _ = reference_score(logits, chosen)
    assert (logits[0, 3] - peak - spread).isnan()


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_scores_of_a_row_do_not_depend_on_the_rows_beside_it():
    logits = torch.randn(16, 49153, generator=torch.Generator().manual_seed(5))
    chosen = torch.arange(16)
    together = reference_score(logits, chosen)
    for row in range(16):
        alone = reference_score(logits[row : row + 1], chosen[row : row + 1])
        assert all(torch.equal(one[0], many[row]) for one, many in zip(alone, together, strict=True))
