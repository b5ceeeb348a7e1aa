"""Traces: what each format says, and what is told of lines that are wrong."""

import asyncio
import json

import pytest

from quire.bench.arrivals import LoadShape
from quire.sim.trace import Arrival, Characters, Generated, Trace, format_of, read_trace, sharegpt_trace, workload_trace
from quire.types.errors import ConfigError

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319569,3180,8

2023-11-16 18:18:03.9799600,110,0
"""
MOONCAKE = """{"timestamp": 27482, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 2353]}
{"timestamp": 30535, "input_length": 1500, "output_length": 26, "hash_ids": [46, 47]}
{"timestamp": 30535, "input_length": 5, "output_length": 3}
"""


def test_azure(tmp_path) -> None:
    path = tmp_path / "conv.csv"
    path.write_text(AZURE)
    found = read_trace(path, format_of(path, "auto"), None)
    assert [arrival.at for arrival in found.arrivals] == pytest.approx([0.0, 0.0519969, 60.0], abs=1e-5)
    assert [(arrival.length, arrival.output) for arrival in found.arrivals] == [(4808, 10), (3180, 8), (110, 1)]
    assert len({arrival.blocks[0][0] for arrival in found.arrivals}) == 3  # nothing is shared
    assert len(read_trace(path, "azure", 2).arrivals) == 2
    rows = ["ContextTokens,Model,TIMESTAMP,GeneratedTokens", *(f"7,m,2024-05-10 00:00:0{i}.009930+00:00,5" for i in range(2))]
    path.write_text("\r\n".join(rows))
    assert [arrival.at for arrival in read_trace(path, "azure", None).arrivals] == pytest.approx([0.0, 1.0])


def test_mooncake(tmp_path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(MOONCAKE)
    first, second, third = read_trace(path, format_of(path, "auto"), None).arrivals
    assert (first.at, second.at, third.at) == pytest.approx((0.0, 3.053, 3.053))
    assert [tokens for _, tokens in first.blocks] == [512, 512, 76]
    assert [tokens for _, tokens in second.blocks] == [512, 512, 476]
    assert first.blocks[:2] == second.blocks[:2] and first.blocks[2][0] != second.blocks[2][0]
    assert first.prompt()[:1024] == second.prompt()[:1024] and len(second.prompt()) == 1500
    assert third.prompt()[0] not in (*first.prompt(), *second.prompt())


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.csv", "", "line 1: the column TIMESTAMP is missing"),
        ("a.csv", "TIMESTAMP,ContextTokens\n", "line 1: the column GeneratedTokens is missing"),
        ("a.csv", AZURE.replace("3180", "many"), "line 3: ContextTokens must be an integer of at least 1, got 'many'"),
        ("a.csv", AZURE.replace("3180", "0"), "line 3: ContextTokens must be an integer of at least 1, got 0"),
        ("a.csv", AZURE.replace("3180,8", "3180,-8"), "line 3: GeneratedTokens must be an integer of at least 0, got -8"),
        ("a.csv", AZURE.replace("3180,8", "3180"), "line 3 has 2 columns instead of 3"),
        ("a.csv", AZURE.replace("3180", "99999999"), "line 3: ContextTokens is 99999999; no request has more than"),
        ("a.csv", AZURE.replace("18:17:04", "soon"), "line 3: TIMESTAMP '2023-11-16 soon.0319569' is neither a date"),
        ("a.csv", AZURE.replace("18:17:04", "18:16:04"), "line 3: its timestamp is before that of the request above it"),
        (
            "a.csv",
            AZURE.replace("04.0319569", "04.0319569+00:00"),
            "line 3: TIMESTAMP '2023-11-16 18:17:04.0319569+00:00' has",
        ),
        ("a.csv", AZURE.splitlines()[0], "a.csv has no requests"),
        ("a.jsonl", MOONCAKE + "{", "line 4 is not JSON"),
        ("a.jsonl", "[1]", "line 1 is not a JSON object"),
        ("a.jsonl", MOONCAKE.replace("1500", '"x"'), "line 2: input_length must be an integer of at least 1, got 'x'"),
        ("a.jsonl", MOONCAKE.replace("26", "2.5"), "line 2: output_length must be an integer of at least 0, got 2.5"),
        (
            "a.jsonl",
            MOONCAKE.replace("27482", "null"),
            "line 1: timestamp must be milliseconds of at least 0, got",
        ),
        ("a.jsonl", MOONCAKE.replace("27482", "1" + 400 * "0"), "line 1: timestamp must be milliseconds"),
        ("a.jsonl", MOONCAKE.replace("27482", "Infinity"), "line 1: timestamp must be milliseconds"),
        ("a.jsonl", MOONCAKE.replace("[46, 47]", '"46"'), "line 2: hash_ids must be a list of integers, got 46"),
        ("a.jsonl", MOONCAKE.replace("1500", "600"), None),
        (
            "a.jsonl",
            MOONCAKE.replace("1500", "500"),
            "line 2: hash_ids has 2 blocks of 512 tokens, too many for input_length 500",
        ),
    ],
)
def test_wrong_lines_are_told(name: str, text: str, told: str | None, tmp_path) -> None:
    path = tmp_path / name
    path.write_text(text)
    if told is None:
        assert read_trace(path, format_of(path, "auto"), None).arrivals
        return
    with pytest.raises(ConfigError) as raised:
        read_trace(path, format_of(path, "auto"), None)
    assert told in str(raised.value)


def test_files_that_cannot_be_read(tmp_path) -> None:
    with pytest.raises(ConfigError, match="cannot read --trace"):
        read_trace(tmp_path / "nothing.csv", "azure", None)
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot read --trace"):
        read_trace(tmp_path / "bytes.jsonl", "mooncake", None)
    with pytest.raises(ConfigError, match=r"its format is unknown .* add --trace-format azure\|mooncake\|sharegpt"):
        format_of(tmp_path / "trace.txt", "auto")
    assert format_of(tmp_path / "trace.txt", "mooncake") == "mooncake"


def test_sharegpt(tmp_path) -> None:
    path = tmp_path / "s.json"
    path.write_text(json.dumps([{"conversations": [{"value": "q" * 40}, {"value": "a" * 22}]}] * 3))
    found = asyncio.run(sharegpt_trace(path, 2, LoadShape(request_rate=1.0), 0, Characters(4)))
    assert [(arrival.length, arrival.output) for arrival in found.arrivals] == [(10, 6)] * 2
    assert found.arrivals[0].blocks != found.arrivals[1].blocks and found.arrivals[1].at > 0
    with pytest.raises(ConfigError, match="--chars-per-token must be above 0, got 0"):
        Characters(0)


def test_generated() -> None:
    made = Generated(requests=50, input_len=100, output_len=20, range_ratio=0.5, prefix_len=30, num_prefixes=2)
    found = made.trace(LoadShape(request_rate=2.0))
    assert found == made.trace(LoadShape(request_rate=2.0)) != Generated(requests=50, seed=1).trace(LoadShape(request_rate=2.0))
    assert len(found.arrivals) == 50 and found.arrivals[-1].at == pytest.approx(25, rel=0.5)
    assert {arrival.blocks[0] for arrival in found.arrivals} == {(1, 30), (2, 30)}
    lengths = [arrival.length - 30 for arrival in found.arrivals]
    assert 50 <= min(lengths) < max(lengths) <= 150
    talks = Generated(requests=5, input_len=10, output_len=4, turns=3, think_time=1.0).trace(LoadShape(request_rate=100.0))
    assert len(talks.arrivals) == 5 and [arrival.at for arrival in talks.arrivals] == sorted(a.at for a in talks.arrivals)
    assert sorted(arrival.length for arrival in talks.arrivals) == [10, 10, 24, 24, 38]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"requests": 0}, "--num-prompts must be at least 1, got 0"),
        ({"input_len": 0}, "--input-len must be at least 1, got 0"),
        ({"range_ratio": 1.0}, "--range-ratio must be from 0 to below 1, got 1.0"),
        ({"turns": 0}, "--turns must be at least 1, got 0"),
        ({"think_time": -1.0}, "--think-time must be 0 or more seconds, got -1.0"),
    ],
)
def test_numbers_that_make_no_traffic(wrong, told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Generated(**wrong)
    assert str(raised.value) == told


def test_workloads_share_what_they_share() -> None:
    shared = workload_trace("shared", 1000, 5)
    assert [[tokens for _, tokens in arrival.blocks] for arrival in shared.arrivals] == [[2048, 64]] * 5
    assert len({arrival.blocks[0] for arrival in shared.arrivals}) == 1
    assert [arrival.blocks[0][1] for arrival in workload_trace("cpu16", 1000, None).arrivals] == [128] * 16


def test_faster() -> None:
    once = Trace("t", [Arrival(0.0, ((1, 2),), 3), Arrival(8.0, ((2, 2),), 3)])
    assert [arrival.at for arrival in once.faster(4.0).arrivals] == [0.0, 2.0]
    with pytest.raises(ConfigError, match="--speedup must be above 0, got 0"):
        once.faster(0.0)
