import asyncio
import io
import json
from pathlib import Path

import pytest

from quire.bench import load as bars
from quire.bench.load import Load, Outgoing
from quire.bench.metrics import Record, summarize
from quire.bench.report import comparison, error_lines, read_result, save, table
from quire.types.errors import ConfigError


def test_a_table() -> None:
    records = [
        Record(sent=0.0, arrivals=[0.25, 0.5, 1.0], end=1.0, output_tokens=3, prompt_tokens=1000, cached_tokens=900),
        Record(sent=0.0, arrivals=[0.5], end=1.0, error="HTTP 500: oops"),
    ]
    shown = table(summarize(records, 2.0, percentiles=[50, 90]), "Title", {"Model": "m"})
    for line in (
        "Model:                                   m",
        "Successful requests:                     1",
        "Failed requests:                         1",
        "Total input tokens:                      1,000",
        "Cached input tokens:                     900",
        "Output token throughput (tok/s):         1.50",
        "                        mean     median        std        P90",
        "TTFT (ms)             250.00     250.00       0.00     250.00",
        "ITL (ms)              375.00     375.00     125.00     475.00",
    ):
        assert line in shown.splitlines()
    assert "goodput" not in shown
    assert max(len(line) for line in shown.splitlines()) == 72


def test_errors_are_told_once_each_the_most_frequent_first() -> None:
    texts = ["a", "b", "b", None, "c", "d", "e", "f"]
    assert error_lines([Record(error=text) for text in texts])[:2] == ["2 x b", "1 x a"]
    assert error_lines([Record(error=text) for text in texts])[-1] == "and 1 other kinds of errors"
    assert error_lines([Record()]) == []


NOW = {
    "duration": 2.0, "completed": 4, "max_concurrent_requests": 3, "mean_ttft_ms": 10.0, "p99_ttft_ms": 30.0,
    "std_ttft_ms": 1.0, "model_id": "m", "num_prompts": 4, "request_rate": "inf", "max_concurrency": None,
    "flags": {"seed": 0, "port": 1},
}  # fmt: skip


def test_ratios() -> None:
    then = {**NOW, "duration": 4.0, "mean_ttft_ms": 0.0, "p99_ttft_ms": 20.0, "flags": {"seed": 1, "port": 2, "old": 5}}
    rows = [line.split() for line in comparison(NOW, then, "then.json").splitlines()]
    assert ["duration", "2.00", "4.00", "0.500"] in rows
    assert ["p99_ttft_ms", "30.00", "20.00", "1.500"] in rows
    assert ["mean_ttft_ms", "10.00", "0.00", "-"] in rows
    assert ["max_concurrent_requests", "3", "3", "1.000"] in rows
    assert [row for row in rows if row[0] in ("std_ttft_ms", "completed")] == []
    assert [" ".join(row) for row in rows if row[0] == "differs:"] == [
        "differs: seed is 0, was 1",
        "differs: old is None, was 5",
    ]


def test_a_result_of_another_program_is_compared_by_what_it_says() -> None:
    then = {"duration": 1.0, "model_id": "other", "num_prompts": 4, "request_rate": "inf", "mean_ttft_ms": 5.0}
    shown = comparison(NOW, then, "vllm.json")
    assert "differs: model_id is m, was other" in shown
    assert shown.count("differs") == 1


def test_files(tmp_path: Path) -> None:
    save(NOW, tmp_path / "a" / "b.json")
    assert read_result(tmp_path / "a" / "b.json", "serve") == NOW
    (tmp_path / "list.json").write_text(json.dumps([1]))
    for name in ("list.json", "nothing.json"):
        with pytest.raises(ConfigError):
            read_result(tmp_path / name, "serve")
    with pytest.raises(ConfigError, match="cannot write"):
        save(NOW, tmp_path / "list.json" / "x.json")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("terminal", "disable", "shown"), [(Terminal, False, True), (Terminal, True, False), (io.StringIO, False, False)]
)
def test_a_bar_for_terminals(terminal: type[io.StringIO], disable: bool, shown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal()
    plain = bars.tqdm
    monkeypatch.setattr(bars, "tqdm", lambda **options: plain(file=screen, **{**options, "dynamic_ncols": False, "ncols": 100}))
    monkeypatch.setattr(bars, "PROGRESS_INTERVAL_S", 0.01)

    async def send(request: Outgoing, record: Record) -> None:
        record.arrivals = [0.0, 1.0]
        await asyncio.sleep(0.05 * int(request.name))

    async def main() -> None:
        load = Load(send)
        async with bars.progress(load, 4, disable=disable):
            await load.run([Outgoing(str(index), b"", 0.0) for index in range(4)])

    asyncio.run(main())
    assert ("4/4" in screen.getvalue()) == shown
    assert ("running" in screen.getvalue()) == shown
