"""`pip install` with one moving line instead of silence or hundreds of lines; on no terminal, a line every few seconds.

    python scripts/install.py -e '.[serve]'

Needs nothing but Python and pip, for it runs before anything is installed. What pip said is shown if it fails.
"""

import re
import shutil
import subprocess
import sys
import threading
import time

PIP = (sys.executable, "-m", "pip")
REDRAW, LINE_EVERY = 0.2, 10.0  # seconds: on a terminal, and elsewhere
LAST_LINES = 40  # of pip's, shown after a failure
ERASE = "\r\x1b[2K"
STEPS = (
    (re.compile(r"Collecting (\S+)"), "looking for {}"),
    (re.compile(r"Downloading (\S+?-[\d.]+\w*)\S*\.(?:whl|tar\.gz)\S*(?: \(([^)]+)\))?"), "downloading {} ({})"),
    (re.compile(r"Processing \S*?([^/\s]+?)-[^/\s]*\.whl"), "taking {} from this machine"),
    (re.compile(r"Using cached (\S+?)-"), "taking {} from pip's cache"),
    (re.compile(r"(?:Building|Preparing|Getting|Installing build)"), "building Quire and its kernels"),
    (re.compile(r"Installing collected packages: (.*)"), "unpacking {} packages"),
)
PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


class Watch:
    """What pip is at, as far as its lines tell."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._doing, self._share, self._seen = "starting pip", "", 0

    def read(self, line: str) -> None:
        line = line.strip()
        if found := PROGRESS.match(line):
            done, total = int(found[1]), int(found[2])
            self._share = f": {100 * done // total} %" if total else f": {done // 10**6} MB"
            return
        self.lines.append(line)
        for pattern, words in STEPS:
            if found := pattern.match(line):
                if words.startswith("looking"):
                    self._seen += 1
                values = [value or "?" for value in found.groups()]
                if words.startswith("unpacking"):
                    values = [str(len(values[0].split(",")))]
                self._doing, self._share = words.format(*values).replace(" (?)", ""), ""
                return

    def __str__(self) -> str:
        return f"{self._doing}{self._share}" + (f" ({self._seen} packages so far)" if self._seen else "")


def main(arguments: list[str]) -> int:
    command = [*PIP, "install", "--disable-pip-version-check", "--no-input", "--no-color"]
    command += ["--no-compile"]  # Python compiles what is imported, when it is: a small part of what is installed
    command += ["--progress-bar", "raw" if _reports_progress() else "off", *arguments]
    watch, began = Watch(), time.monotonic()
    quire = any(argument.startswith("-e") for argument in arguments)
    what = "Quire and what it needs" if quire else ", ".join(arguments)
    print(f"installing {what} into {sys.prefix}{' (torch is large: minutes, once)' * quire}", flush=True)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    over = threading.Event()
    display = threading.Thread(target=_show, args=(watch, began, over), daemon=True)
    display.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            watch.read(line)
        code = process.wait()
    except KeyboardInterrupt:
        process.terminate()
        code = 130
    finally:
        over.set()
        display.join()
    if code and code != 130:
        print("\n".join(watch.lines[-LAST_LINES:]), file=sys.stderr)
        print(f"pip failed (exit code {code}); its last lines are above", file=sys.stderr)
    elif not code:
        print(f"installed after {time.monotonic() - began:.0f} s", flush=True)
    return code


def _show(watch: Watch, began: float, over: threading.Event) -> None:
    moves = sys.stdout.isatty()
    while not over.wait(REDRAW if moves else LINE_EVERY):
        line = f"{watch}, {time.monotonic() - began:.0f} s"
        if moves:
            line = ERASE + line[: shutil.get_terminal_size().columns - 1]
        print(line, end="" if moves else "\n", flush=True)
    if moves:
        print(ERASE, end="", flush=True)


def _reports_progress() -> bool:
    """pip has told its progress in lines since 24.1."""
    said = subprocess.run([*PIP, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.match(r"pip (\d+)\.(\d+)", said)
    return found is not None and (int(found[1]), int(found[2])) >= (24, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
