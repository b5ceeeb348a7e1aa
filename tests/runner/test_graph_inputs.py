"""Which graph a step would take, and the numbers it would be given. Recording and replaying need a GPU (test_graphs_gpu)."""

import numpy as np
import pytest
from runner_support import ints

from quire.attn.backend import Room
from quire.attn.triton import FixedCuts
from quire.attn.work_split import SPLIT, SharedPrefix, nothing_shared
from quire.device.cuda.capture import MAX_GRAPH_BYTES, taken_between
from quire.runner.buckets import (
    MAX_GRAPH_ROWS,
    MAX_GRAPH_TOKENS,
    MAX_ROOM,
    Bucket,
    draft_buckets,
    drafter_buckets,
    final_room,
    idle_buckets,
    prompt_bucket,
    room_bucket,
    row_bucket,
    substitute,
    usual_room,
)
from quire.runner.graph_inputs import pack, row_starts
from quire.runner.graphs import allowance, fixed_plans
from quire.runner.slots import Prefixes


@pytest.mark.parametrize(
    ("rows", "max_seqs", "size"),
    [(1, 512, 1), (3, 512, 4), (17, 512, 32), (65, 512, 96), (257, 512, 320), (512, 512, 512), (513, 1024, None), (5, 6, 6)],
)
def test_the_least_bucket_that_takes_the_rows(rows, max_seqs, size):
    assert row_bucket(rows, max_seqs) == size


def test_buckets_are_few():
    assert len({row_bucket(rows, MAX_GRAPH_ROWS) for rows in range(1, MAX_GRAPH_ROWS + 1)}) <= 20
    assert len({room_bucket(Room(need, 0), 1) for need in range(MAX_ROOM.splits)}) <= 12
    assert len({room_bucket(Room(70, shared), 1) for shared in range(MAX_ROOM.shared + 1)}) == 5
    assert room_bucket(Room(2048, 0), 32) == Room(3072, 0) and room_bucket(Room(1023, 0), 1) == Room(1024, 0)
    assert room_bucket(Room(64, 0), 1) == Room(128, 0) and room_bucket(Room(9, 65), 7) == Room(64, 256)
    assert room_bucket(Room(MAX_ROOM.splits - 1, 0), 1) == Room(MAX_ROOM.splits, 0)
    assert room_bucket(Room(MAX_ROOM.splits, 0), 1) is None and room_bucket(Room(9, MAX_ROOM.shared + 1), 1) is None


def test_a_somewhat_larger_graph_can_be_borrowed():
    def others(*sizes):
        return [Bucket(rows, Room(splits, shared)) for rows, splits, shared in sizes]

    own = Bucket(8, Room(128, 0))
    assert substitute(own, Room(60, 0), others((4, 128, 0), (32, 128, 0), (16, 512, 0), (8, 64, 0), (8, 128, 256))) is None
    assert substitute(own, Room(60, 0), others((16, 256, 0), (16, 128, 0), (8, 256, 0))) == Bucket(8, Room(256, 0))
    assert substitute(own, Room(60, 0), others((16, 128, 64))) == Bucket(16, Room(128, 64))
    # unused rows need room as well
    assert substitute(own, Room(120, 0), others((16, 128, 0), (16, 256, 0))) == Bucket(16, Room(256, 0))
    sharing = Bucket(8, Room(128, 64))
    assert substitute(sharing, Room(60, 9), others((8, 128, 0), (8, 128, 256))) == Bucket(8, Room(128, 256))


@pytest.mark.parametrize("max_seqs", [1, 6, 256, 512])
def test_what_is_recorded_in_idle_time_serves_usual_traffic(max_seqs):
    buckets = idle_buckets(max_seqs, 2048)
    assert buckets[0].rows == 1 and len(buckets) == len(set(buckets)) <= 100
    for rows in range(1, max_seqs + 1):
        own = Bucket(row_bucket(rows, max_seqs), usual_room(row_bucket(rows, max_seqs), 4))
        assert own in buckets


def test_what_a_graph_takes_is_not_what_others_do():
    """Bytes that torch has, and those that are free on a device that other processes use."""
    grown = 3 << 20
    assert taken_between((0, 100 << 20), (grown, 95 << 20)) == 5 << 20
    assert taken_between((0, 100 << 20), (grown, 100 << 20)) == grown  # somebody went meanwhile
    assert taken_between((0, 100 << 30), (grown, 20 << 30)) == grown + MAX_GRAPH_BYTES  # somebody came
    assert taken_between((grown, 100 << 20), (0, 100 << 20)) == 0


def test_the_allowance_grows_with_the_logits():
    assert allowance(2, 1000) - allowance(1, 1000) == 12000
    assert allowance(10**6, 1000) == allowance(MAX_GRAPH_ROWS, 1000)


def numbers_of(lengths, window, bucket, find=nothing_shared):
    fixed = FixedCuts(8, 16)
    cut, need = fixed.cut(ints(*[1] * len(lengths)), ints(*lengths), window, find)
    numbers = fixed.numbers(cut, bucket.rows, bucket.room)
    assert len(numbers) == fixed.size(bucket.rows, bucket.room)
    return numbers, need


def test_numbers_of_a_step():
    """Two rows in a bucket of four, a group that sees all and one with a window."""
    bucket, lengths = Bucket(4, Room(8, 0)), [3 * SPLIT, 5]
    full, need = numbers_of(lengths, None, bucket)
    window, less = numbers_of(lengths, SPLIT, bucket)
    assert (need, less) == (Room(4, 0), Room(2, 0))
    numbers = np.full(32 + len(full) + len(window), 99, np.int32)
    given = [np.array(x, np.int64) for x in ([7, 2], [3 * SPLIT, 5], [9, 4], [7, -1])]
    pack(given, bucket, [full, window], numbers)
    rows = numbers[:32].view(np.int64).reshape(4, 4).tolist()
    assert rows == [[7, 2, -1, -1], [3 * SPLIT, 5, 1, 1], [9, 4, 0, 0], [7, -1, -1, -1]]
    assert numbers[32:].tolist() == [*full, *window]
    nothing = [-1, -1, -1, -1]
    alone = [[1, 0, -1, 5], [2, 0, -1, 1], [3, 0, -1, 1]]  # the padding attends to itself
    long = [[0, split, split, 3 * SPLIT] for split in range(3)]
    assert full[:32].reshape(8, 4).tolist() == [*long, *alone, nothing, nothing]
    assert full[32:].reshape(4, 3).tolist() == [[0, 0, 3], *[nothing[:3]] * 3]
    assert window[:32].reshape(8, 4).tolist() == [[0, 2, -1, 3 * SPLIT], *alone, *[nothing] * 4]
    assert (window[32:] == -1).all()


def test_numbers_of_rows_that_begin_alike():
    bucket = Bucket(6, Room(8, 3))
    alike = SharedPrefix(ints(5, 1, 3, 4), ints(2, 1, 1))
    numbers, need = numbers_of([9, 700, 9, 600, 300, 800], None, bucket, lambda keys: alike)
    assert need == Room(2 + 2 + 2 + 1 + 3, 1) and (numbers[-12:-8].tolist(), need.shared) == ([5, 8, 1, 0], 1)


def test_pairs_that_begin_alike_are_too_few():
    bucket, lengths = Bucket(4, Room(64, 0)), [700, 700, 600, 600]
    alone, _ = numbers_of(lengths, None, bucket)
    numbers, need = numbers_of(lengths, None, bucket, lambda keys: SharedPrefix(ints(0, 1, 2, 3), ints(2, 0, 2)))
    assert need == Room(12, 0) and (numbers == alone).all()


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("order", [None, (0, 1, 2, 3)])
def test_rows_that_have_grown_are_cut_anew_when_they_need_another_split(window, order):
    bucket, fixed, dice = Bucket(8, Room(64, 64)), FixedCuts(8, 16), np.random.default_rng(0)
    alike = nothing_shared if order is None else lambda keys: SharedPrefix(ints(*order), ints(1, 1, 1))
    one, again, anew = ints(*[1] * 5), 0, 0
    for _ in range(60):
        before = dice.integers(SPLIT + 1, 4 * SPLIT, 5, np.int32)
        after = np.maximum(before + dice.integers(-4, 6, 5, np.int32), SPLIT + 1)
        (cut, _), (other, _) = fixed.cut(one, before, window, alike), fixed.cut(one, after, window, alike)
        numbers, expected = (fixed.numbers(each, bucket.rows, bucket.room) for each in (cut, other))
        if fixed.renew(cut, after, numbers):
            again += 1
            assert (numbers == expected).all()
        else:
            anew += 1
            splits = (
                numbers[: 4 * bucket.room.splits].reshape(-1, 4)[:, :3],
                expected[: 4 * bucket.room.splits].reshape(-1, 4)[:, :3],
            )
            assert (splits[0] != splits[1]).any()
    assert again > 20 and anew > 0


class Layer:
    def __init__(self, group, fixed, window):
        self.group = group
        self.backend = type("Backend", (), {"fixed": staticmethod(lambda spec, dtype: fixed)})
        self.spec, self.dtype = type("Spec", (), {"window": window}), None


@pytest.mark.parametrize("recordable", [True, False])
def test_a_model_may_refuse(recordable):
    fixed = FixedCuts(8, 16)
    model = type("Model", (), {"attentions": [Layer(1, fixed, 4), Layer(0, fixed, None)], "recordable": recordable})
    assert fixed_plans(model, 2) == ([(fixed, None), (fixed, 4)] if recordable else None)


def test_a_backend_may_refuse():
    model = type("Model", (), {"attentions": [Layer(0, FixedCuts(8, 16), None), Layer(0, None, None)], "recordable": True})
    assert fixed_plans(model, 1) is None


def test_numbers_of_no_rows_at_all():
    """What idle time records a graph with: every row is padding."""
    bucket = Bucket(2, Room(4, 0))
    plan, need = numbers_of([], None, bucket)
    assert need == Room(0, 0)
    numbers = np.full(16 + len(plan), 99, np.int32)
    pack([np.empty(0, np.int32)] * 4, bucket, [plan], numbers)
    assert numbers[:16].view(np.int64).reshape(4, 2).tolist() == [[-1, -1], [1, 1], [0, 0], [-1, -1]]
    assert plan[:16].reshape(4, 4).tolist() == [[0, 0, -1, 1], [1, 0, -1, 1], *[[-1] * 4] * 2]


@pytest.mark.parametrize("max_seqs", [1, 6, 256])
def test_steps_with_prompts_find_a_graph_after_idle_time(max_seqs):
    buckets = idle_buckets(max_seqs, 2048)
    for rows in {1, min(3, max_seqs), min(50, max_seqs), min(64, max_seqs)}:
        for tokens in (rows + 1, 100, 512, 540, 1000, 1024, 2048):
            need = Room(3 * (rows - 1) - 1, 0, tokens // 32 + rows)
            own = prompt_bucket(need, rows, max(tokens, rows + 1), max_seqs)
            assert own.rows > rows and own.tokens >= tokens
            assert own in buckets or substitute(own, need, buckets) is not None


def test_steps_with_prompts_are_coarse():
    assert prompt_bucket(Room(100, 0, 140), 3, 500, 256) == Bucket(16, Room(256, 0, 256), 512)
    assert prompt_bucket(Room(0, 3, 1), 5, 17, 256) == Bucket(16, Room(64, 64, 128), 32)
    assert prompt_bucket(Room(0, 0, 1), 256, 1100, 512) == Bucket(288, Room(1024, 0, 128), 1280)
    assert prompt_bucket(Room(0, 0, 1), 300, 1100, 512) == Bucket(513, Room(1024, 0, 128), 1280)
    assert prompt_bucket(Room(0, 0, 1), 5, MAX_GRAPH_TOKENS + 1, 256) is None
    assert prompt_bucket(Room(0, 0, 1), 513, 700, 512) is None
    assert prompt_bucket(Room(MAX_ROOM.splits, 0, 1), 3, 500, 256) is None


def test_graphs_of_prompts_are_borrowed_by_prompts_alone():
    own, need = Bucket(4, Room(64, 0, 32), 512), Room(10, 0, 20)
    larger, enough = Bucket(16, Room(256, 0, 32), 640), Bucket(16, Room(64, 0, 32), 576)
    assert substitute(own, need, [Bucket(4, Room(64, 0)), Bucket(4, Room(64, 0, 32), 1024), larger, enough]) == enough
    assert substitute(own, need, [Bucket(4, Room(64, 0, 16), 512), Bucket(64, Room(64, 0, 32), 512)]) is None
    assert substitute(Bucket(4, Room(64, 0)), Room(0, 0), [own]) is None


def test_numbers_of_a_ragged_step():
    """A row of one token and a prompt: the tokens that are left belong to the row behind them, and nobody attends for it."""
    bucket = Bucket(4, Room(4, 0, 8), 64)
    fixed = FixedCuts(8, 16)
    cut, need = fixed.cut(ints(1, 40), ints(SPLIT + 5, 50), None, nothing_shared)
    assert need == Room(2, 0, 3)
    numbers = fixed.numbers(cut, bucket.rows, bucket.room)
    nothing = [-1] * 4
    assert numbers[:16].reshape(4, 4).tolist() == [[0, 0, 0, SPLIT + 5], [0, 1, 1, SPLIT + 5], nothing, nothing]
    assert numbers[16:28].reshape(4, 3).tolist() == [[0, 0, 2], *[nothing[:3]] * 3]
    assert numbers[28:].reshape(8, 3).tolist() == [[1, 32, 0], [1, 16, 0], [1, 0, 0], *[nothing[:3]] * 5]
    assert row_starts(ints(1, 40), bucket).tolist() == [0, 1, 41, 64, 64, 64, 64, 64]
    assert row_starts(ints(), bucket).tolist() == [0, 64, 64, 64, 64, 64, 64, 64]


def test_long_prompts_behind_many_keys_have_no_plan_that_stays():
    """A copy of their keys is worth more than a launch saved."""
    fixed = FixedCuts(8, 16)
    assert fixed.cut(ints(1, 600), ints(5000, 5000), None, nothing_shared) is None
    assert fixed.cut(ints(1, 600), ints(5000, 5000), 64, nothing_shared) is not None
    assert fixed.cut(ints(1, 600), ints(5000, 3000), None, nothing_shared) is not None
    assert fixed.cut(ints(1, 200), ints(5000, 5000), None, nothing_shared) is not None


def test_last_tokens_of_a_ragged_step_have_room():
    """Single tokens, some of which begin alike, and prompts: as many pieces more as the prompts' keys have."""
    counts, lengths = ints(1, 1, 1, 1, 300, 40), ints(700, 700, 600, 600, 700, 5000)
    fixed, alike = FixedCuts(8, 16), SharedPrefix(ints(0, 1, 2, 3), ints(2, 2, 2))
    _, need = fixed.cut(counts, lengths, None, lambda keys: alike)
    cut, more = fixed.cut(np.ones_like(counts), lengths, None, lambda keys: alike)
    assert (more.splits - need.splits, more.shared, more.tiles) == (3 + 20, need.shared, 0)
    bucket = prompt_bucket(Room(need.splits - 6, need.shared, need.tiles), 6, 344, 256)
    numbers = fixed.numbers(cut, bucket.rows, final_room(bucket.room))
    splits = numbers[: 4 * final_room(bucket.room).splits].reshape(-1, 4)
    assert sorted(set(splits[:, 0].tolist())) == [-1, *range(bucket.rows)]  # rows of no slot attend to themselves


@pytest.mark.parametrize("context", [130, 300, 900])
@pytest.mark.parametrize("drafts", [1, 2, 4])
@pytest.mark.parametrize("requests", [1, 4, 16, 50])
def test_what_is_recorded_at_the_start_serves_rows_with_drafts(requests, drafts, context):
    """Also of several requests: else their first steps would tell what recording costs, and not what drafts do."""
    slot = np.repeat(np.arange(requests, dtype=np.int32), 1 + drafts)
    end = context + np.tile(np.arange(1 + drafts, dtype=np.int32), requests)
    prefixes = Prefixes(1, requests, 64, 16)
    prefixes.pages[0] = 1 + np.arange(requests * prefixes.pages.shape[2]).reshape(requests, -1)
    one = np.ones_like(slot)
    _, need = FixedCuts(8, 16).cut(one, end, None, prefixes.finder(0, slot, one, end))
    need = Room(need.splits - len(slot), need.shared)
    size = row_bucket(len(slot), MAX_GRAPH_ROWS)
    own = Bucket(size, room_bucket(need, size))
    recorded = draft_buckets(8, MAX_GRAPH_ROWS)
    assert own in recorded or substitute(own, need, recorded) is not None
    assert len(recorded) == len(set(recorded)) < 25
    guesses, need, size = drafter_buckets(256, 8192), Room(requests * ((context - 1) // SPLIT), 0), row_bucket(requests, 256)
    own = Bucket(size, room_bucket(need, size))
    assert own in guesses or substitute(own, need, guesses) is not None
