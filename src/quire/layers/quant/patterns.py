"""Regular expressions of a checkpoint's configuration, matched in a child process.

Python's matching can take exponential time and cannot be interrupted; the child process is killed after a time limit.
"""

import json
import re
import subprocess
import sys
import warnings
import weakref
from collections.abc import Iterable, Sequence
from threading import Timer
from time import monotonic

from quire.files.reading import error_summary, shown
from quire.types.errors import ModelError

MAX_PATTERN_CHARS = 2000
MATCH_LIMIT_S = 20.0  # for all names of a model, which take milliseconds
# stdin: a line per name; stdout: 0 or 1 per pattern as soon as it is matched; the program ends when stdin closes
_PROGRAM = f"""
import json, re, sys
try:
    import resource
    resource.setrlimit(resource.RLIMIT_CPU, ({int(MATCH_LIMIT_S) + 1},) * 2)
except (ImportError, OSError, ValueError):
    pass
patterns = [re.compile(pattern) for pattern in json.loads(sys.stdin.readline())]
print(flush=True)
for line in sys.stdin:
    name = json.loads(line)
    for pattern in patterns:
        print(int(pattern.match(name) is not None), end="", flush=True)
    print(flush=True)
"""


class Patterns:
    """Match names against patterns. `field`: the configuration field that has the patterns, for error messages."""

    def __init__(self, field: str, patterns: Sequence[str]) -> None:
        for pattern in patterns:
            _check(field, pattern)
        self._field, self._patterns, self._left = field, list(patterns), MATCH_LIMIT_S
        self._process: subprocess.Popen[str] | None = None
        self._known: dict[str, list[bool]] = {}

    def match(self, name: str) -> list[bool]:
        """Return for each pattern whether it matches the beginning of a name."""
        if not self._patterns:
            return []
        if name not in self._known:
            self._known[name] = self._ask(name)
        return self._known[name]

    def _ask(self, name: str) -> list[bool]:
        process = self._start() if self._process is None else self._process
        assert process.stdin is not None and process.stdout is not None
        began, timer = monotonic(), Timer(max(self._left, 0.0), process.kill)
        timer.start()
        try:
            process.stdin.write(json.dumps(name) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            timer.cancel()
        self._left -= monotonic() - began
        if not answer.endswith("\n"):
            slow = self._patterns[len(answer)]
            raise ModelError(
                f"quantization_config: {self._field}: pattern {shown(slow)} takes longer than {MATCH_LIMIT_S:g} s for {name}"
            )
        return [found == "1" for found in answer.strip()]

    def _start(self) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-W", "ignore", "-c", _PROGRAM],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, encoding="utf-8",
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        self._process = process
        weakref.finalize(self, _end, process)
        process.stdin.write(json.dumps(self._patterns) + "\n")
        process.stdin.flush()
        if not process.stdout.readline():
            raise ModelError(f"quantization_config: {self._field}: the process that matches patterns did not start")
        return process


class Paths:
    """Module names: exact ones, and regular expressions after `re:`."""

    def __init__(self, field: str, items: Sequence[str]) -> None:
        self._whole = {item for item in items if not item.startswith("re:")}
        self._patterns = Patterns(field, [item.removeprefix("re:") for item in items if item.startswith("re:")])

    def match(self, names: Iterable[str]) -> bool:
        return any(name in self._whole or any(self._patterns.match(name)) for name in names)

    def __contains__(self, item: str) -> bool:
        return item in self._whole


def _check(field: str, pattern: str) -> None:
    if len(pattern) > MAX_PATTERN_CHARS:
        raise ModelError(f"quantization_config: {field}: {shown(pattern)} must have at most {MAX_PATTERN_CHARS:,} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ModelError(
            f"quantization_config: {field}: {shown(pattern)} is not a regular expression ({error_summary(error)})"
        ) from error


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.communicate()
