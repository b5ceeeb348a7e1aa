"""`quire serve` as a user runs it: a process of its own, here with the executor that needs no model."""

import contextlib
import json
import os
import re
import resource
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from patience import PATIENCE, wait_for

READY = re.compile(r"ready: serving \S+ on (\S+) after \d+\.\d s")
MODULE = "quire.cli.main"
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # for clients of plain HTTP, which would each read all certificates


class ServerProcess:
    def __init__(
        self, model: Path, *flags: str, latency: float = 0.01, descriptors: int | None = None, **environment: str
    ) -> None:
        line = [sys.executable, "-m", MODULE, "serve", str(model), "--served-model-name", "tiny", "--port", "0"]
        line += ["--distributed-executor-backend", "fake", *flags]
        self.process = subprocess.Popen(
            line,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "QUIRE_FAKE_LATENCY": str(latency), "OMP_NUM_THREADS": "1", **environment},
        )
        if descriptors is not None:  # long before it opens anything
            resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE, (descriptors, descriptors))
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stderr:
            self.lines.extend(stderr)

    def log(self) -> str:
        return "".join(self.lines)

    def url(self) -> str:
        wait_for(lambda: READY.search(self.log()) or self.process.poll() is not None)
        found = READY.search(self.log())
        assert found, self.log()
        return found[1]

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(**{"base_url": self.url(), "timeout": PATIENCE, "verify": NO_TLS} | options)

    def engine_pid(self) -> int:
        [engine] = engines(self.process.pid)
        return engine

    def grammar_pid(self) -> int:
        return only_child(self.engine_pid(), "quire.features.structured.grammar.worker")

    def text_pids(self) -> list[int]:
        return children(self.process.pid, "quire.text.workers.worker")

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float = PATIENCE) -> int:
        code = self.process.wait(seconds)
        self._reader.join(PATIENCE)
        return code


@contextlib.contextmanager
def serving(model: Path, *flags: str, **options: Any) -> Iterator[ServerProcess]:
    server = ServerProcess(model, *flags, **options)
    try:
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            server.process.kill()
        server.wait()


def children(pid: int, module: str) -> list[int]:
    found = {int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()}
    return [child for child in found if module in Path(f"/proc/{child}/cmdline").read_text()]


def engines(pid: int) -> list[int]:
    """Return the engines of a server, which its fork server forked or it started itself."""
    servers = children(pid, "quire.proc.fork_server")
    found = [*children(pid, ""), *(forked for server in servers for forked in children(server, ""))]
    return [child for child in found if name_of(child) == "quire-engine"]


def name_of(pid: int) -> str:
    with contextlib.suppress(OSError):  # it has ended
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def only_child(pid: int, module: str) -> int:
    found = children(pid, module)
    assert len(found) == 1, found
    return found[0]


def body(tokens: int, stream: bool, prompt: str = "the quick brown fox") -> dict[str, Any]:
    return {
        "model": "tiny", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": stream,
        "stream_options": {"include_usage": True} if stream else None, "return_token_ids": True,
    }  # fmt: skip


def read_stream(client: httpx.Client, request: dict[str, Any], begun: Callable[[], object] = lambda: None) -> list[Any]:
    """Every event of a stream, the last one as "[DONE]". `begun` is called after the first."""
    events: list[Any] = []
    with client.stream("POST", "/v1/completions", json=request) as response:
        if response.status_code != 200:
            response.read()
            return [response.status_code, response.json()]
        rest = b""
        for chunk in response.iter_bytes():  # iter_lines would also split at the exotic line ends of random text
            *complete, rest = (rest + chunk).split(b"\n\n")
            for event in complete:
                data = event.removeprefix(b"data: ")
                events.append("[DONE]" if data == b"[DONE]" else json.loads(data))
                if len(events) == 1:
                    begun()
        assert not rest
    return events
