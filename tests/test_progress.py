"""Something moves while a person waits, and nothing of it is left."""

import io
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr

import pytest

from patience import wait_for
from quire import progress
from quire.progress import doing, paused, shown


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        """The lines that a person sees at the end."""
        lines = [""]
        for part in self.getvalue().split("\n"):
            lines[-1] += part
            lines.append("")
        return [line.rpartition(progress.ERASE)[2] for line in lines if line.rpartition(progress.ERASE)[2]]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "REDRAW_S", 0.005)
    monkeypatch.setattr(progress, "LINE_INTERVAL_S", 0.005)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    for name in progress.LEVEL_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def terminal() -> Terminal:
    return Terminal()


@contextmanager
def shown_on(stream: io.StringIO, ready: str = "", write_line: Callable[[str], None] | None = None) -> Iterator[None]:
    with redirect_stderr(stream):
        with shown(ready, write_line):
            yield
        assert sys.stderr is stream


def test_a_line_moves_and_is_erased(terminal: Terminal) -> None:
    with shown_on(terminal), doing("loading weights", 98_000_000) as work:
        wait_for(lambda: re.search(r"loading weights: 0 of 98 MB \(0 %\), \d+ s", terminal.getvalue()))
        work.add(49_000_000)
        wait_for(lambda: "49 of 98 MB (50 %)" in terminal.getvalue())
        work.reach(200_000_000)
        wait_for(lambda: "98 of 98 MB (100 %)" in terminal.getvalue())
        with doing("x" * 1000):
            wait_for(lambda: "xxx" in terminal.getvalue())
    assert terminal.screen() == []
    assert max(len(line) for line in terminal.getvalue().split(progress.ERASE)) < 60


def test_what_others_write_stands_above_it(terminal: Terminal) -> None:
    with shown_on(terminal, "m is ready"), doing("loading"):
        wait_for(lambda: "loading" in terminal.getvalue())
        print("a warning", file=sys.stderr)
        logging.lastResort.emit(logging.makeLogRecord({"msg": "another"}))  # type: ignore[union-attr]
        drawn = len(terminal.getvalue())
        wait_for(lambda: "loading" in terminal.getvalue()[drawn:])
    *others, ready = terminal.screen()
    assert others == ["a warning", "another"]
    assert re.match(r"m is ready after \d+\.\d", ready)


def test_it_makes_room_for_bars_of_others(terminal: Terminal) -> None:
    with shown_on(terminal), doing("loading"):
        wait_for(lambda: "loading" in terminal.getvalue())
        with paused():
            drawn = len(terminal.getvalue())
            time.sleep(0.05)
            assert terminal.getvalue()[drawn:] == ""
        wait_for(lambda: "loading" in terminal.getvalue()[drawn:])
    with paused():
        pass


def test_elsewhere_there_are_lines() -> None:
    file = io.StringIO()
    with shown_on(file, "m is ready"), doing("fetching", 20_000_000_000) as work:
        work.add(5_000_000_000)
        wait_for(lambda: len(re.findall(r"fetching: 5 of 20 GB \(25 %\) \(\d+ s\)\n", file.getvalue())) > 1)
    assert "\r" not in file.getvalue() and "ready" not in file.getvalue()


def test_a_dumb_terminal_gets_lines(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    with shown_on(terminal), doing("loading"):
        wait_for(lambda: re.search(r"loading \(\d+ s\)\n", terminal.getvalue()))
    assert "\x1b" not in terminal.getvalue()


def test_lines_may_go_to_a_log(terminal: Terminal) -> None:
    told: list[str] = []
    with shown_on(terminal, write_line=told.append), doing("loading"):
        wait_for(lambda: any(re.fullmatch(r"loading \(\d+ s\)", line) for line in told))
    assert terminal.getvalue() == ""


@pytest.mark.parametrize("name", progress.LEVEL_VARIABLES)
def test_silence_can_be_asked_for(name: str, terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "warning")
    with shown_on(terminal, "ready"), doing("loading"):
        time.sleep(0.05)
    assert terminal.getvalue() == ""


def test_one_display_at_a_time_and_none_is_left_after_an_error(terminal: Terminal) -> None:
    with pytest.raises(KeyboardInterrupt), shown_on(terminal, "ready"), shown("inner"), doing("loading"):
        wait_for(lambda: "loading" in terminal.getvalue())
        raise KeyboardInterrupt
    assert terminal.screen() == []
    assert "quire-progress" not in {thread.name for thread in threading.enumerate()}
    assert not progress._works and progress._display is None
