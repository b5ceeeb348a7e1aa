"""A fork server that is late costs the processes that it has forked nothing."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from patience import PATIENCE
from quire.proc import fork_server

SLEEPER = "import time\n\ndef main(argv):\n    time.sleep(600)\n"


def test_a_server_that_is_late_keeps_its_forks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    paths = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    server = fork_server.ForkServerProcess((), {"PYTHONPATH": paths})
    try:
        deadline = time.monotonic() + PATIENCE
        while not server.usable:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        first = server.fork("sleeper", [], [], 2)
        os.kill(server._process.pid, signal.SIGSTOP)
        with monkeypatch.context() as short:
            short.setattr(fork_server, "FORK_TIMEOUT_S", 0.05)
            with pytest.raises(TimeoutError):
                server.fork("sleeper", [], [], 2)
        os.kill(server._process.pid, signal.SIGCONT)
        second = server.fork("sleeper", [], [], 2)
        with pytest.raises(subprocess.TimeoutExpired):
            first.wait(0.1)
        children = Path(f"/proc/{server._process.pid}/task/{server._process.pid}/children")
        while set(map(int, children.read_text().split())) != {first.pid, second.pid}:  # the late one ends
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        server.close()
    assert first.wait(PATIENCE) == second.wait(PATIENCE) == -signal.SIGKILL
