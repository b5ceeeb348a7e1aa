"""Send the test pictures of Pillow's source archive, more than 1,000 with crashers and bombs among them, to a server.

    python benchmarks/hostile_pictures.py [--archive FILE] [--clients 1] [--seconds 2] [--url URL]

Without --archive, pip downloads the archive. Without --url, a server is started with the model in tests/fixtures/reader-llava.
Another client streams text meanwhile. Prints statuses, the slowest answers, the longest pause of the stream, and the memory of
the server's processes before and after. Exits with 1 if an answer is neither 200, 400 nor 422, comes later than --seconds,
names a path, or if a picture ended a process of the server.
"""

import argparse
import asyncio
import base64
import contextlib
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests"
MODEL = TESTS / "fixtures" / "reader-llava"
sys.path[:0] = [str(TESTS), str(TESTS / "serve")]

from server_process import ServerProcess  # noqa: E402

GOOD = (MODEL / "pictures" / "00.png").read_bytes()
PATH = re.compile(r"(?<![\w.])/(?:tmp|dev|proc|root|home|usr|work|var)\b|https?://|site-packages")
EXPECTED = (200, 400, 422)
SHOWN = 10  # slowest answers
SETTLE_S = 3.0  # after which the processes have returned memory


@dataclass
class Answer:
    name: str
    status: int
    seconds: float
    message: str


@dataclass
class Neighbour:
    """A client that streams text."""

    pauses: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    async def run(self, client: httpx.AsyncClient, model: str) -> None:
        body = {"model": model, "prompt": "1", "max_tokens": 32, "ignore_eos": True, "stream": True}
        while True:
            async with client.stream("POST", "/v1/completions", json=body) as response:
                last = time.monotonic()
                if response.status_code != 200:
                    self.failures.append((await response.aread()).decode())
                    return
                async for _ in response.aiter_bytes():
                    self.pauses.append(time.monotonic() - last)
                    last = time.monotonic()
            await asyncio.sleep(0.01)


def pictures(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of every file in Tests/images."""
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.isfile() and "/Tests/images/" in member.name and (file := tar.extractfile(member)) is not None:
                yield member.name.partition("/Tests/images/")[2], file.read()


def download(directory: str) -> Path:
    """Return Pillow's source archive, which pip downloads by name."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "pillow", "pillow"]
    subprocess.run(command, cwd=directory, check=True)
    [archive] = Path(directory).glob("*.tar.gz")
    return archive


async def send(client: httpx.AsyncClient, model: str, name: str, data: bytes) -> Answer:
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}]
    body = {"model": model, "messages": [{"role": "user", "content": parts}], "max_tokens": 2, "temperature": 0}
    begun = time.monotonic()
    response = await client.post("/v1/chat/completions", json=body)
    seconds = time.monotonic() - begun
    message = "" if response.status_code == 200 else response.json()["error"]["message"]
    return Answer(name, response.status_code, seconds, message)


async def send_all(url: str, files: list[tuple[str, bytes]], clients: int) -> tuple[list[Answer], Neighbour]:
    neighbour, answers, waiting = Neighbour(), list[Answer](), iter(files)
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        first = await send(client, model, "a good picture", GOOD)
        if first.status != 200:
            raise SystemExit(f"a good picture must be answered with 200; got {first}")

        async def work() -> None:
            for name, data in waiting:
                answers.append(await send(client, model, name, data))

        streaming = asyncio.create_task(neighbour.run(client, model))
        await asyncio.gather(*(work() for _ in range(clients)))
        answers.append(await send(client, model, "a good picture, after all", GOOD))
        streaming.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await streaming
    return answers, neighbour


def family(pid: int) -> list[int]:
    """Return a process and all below it."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            with contextlib.suppress(OSError):
                found += family(int(child))
    return found


def megabytes(pid: int) -> dict[str, float]:
    """Return the memory of a server's processes by module; what several share is counted once."""
    found = Counter[str]()
    for each in family(pid):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{each}/cmdline").read_text().split("\0")
            module = words[words.index("-m") + 1] if "-m" in words else words[0]
            [line] = [row for row in Path(f"/proc/{each}/smaps_rollup").read_text().splitlines() if row.startswith("Pss:")]
            found[module] += int(line.split()[1])
    return {module: size / 1024 for module, size in sorted(found.items())}


def report(answers: list[Answer], neighbour: Neighbour, limit: float) -> list[str]:
    """Print what was answered; return what is wrong with it."""
    statuses = Counter(answer.status for answer in answers)
    print(f"{len(answers)} pictures: " + ", ".join(f"{count} x {status}" for status, count in sorted(statuses.items())))
    for reason, count in Counter(re.sub(r"\d+", "N", answer.message) for answer in answers if answer.message).most_common():
        print(f"{count:6}  {reason[:150]}")
    print("slowest:")
    for answer in sorted(answers, key=lambda one: -one.seconds)[:SHOWN]:
        print(f"{answer.seconds:6.2f} s  {answer.status}  {answer.name}  {answer.message[:90]}")
    print(f"stream beside them: {len(neighbour.pauses)} chunks, longest pause {max(neighbour.pauses, default=0):.2f} s")
    wrong = [f"{one.name}: {one.status} {one.message}" for one in answers if one.status not in EXPECTED]
    wrong += [f"{one.name}: answered after {one.seconds:.2f} s" for one in answers if one.seconds > limit]
    wrong += [f"{one.name}: {one.message}" for one in answers if PATH.search(one.message)]
    wrong += [
        f"{one.name}: {one.message}" for one in answers if one.status != 200 and "messages[0].content[0]" not in one.message
    ]
    return wrong + [f"stream: {failure}" for failure in neighbour.failures]


@contextlib.contextmanager
def server_of(url: str | None) -> Iterator[tuple[str, int | None]]:
    """Yield a server's URL and its process, if it was started here."""
    if url is not None:
        yield url, None
        return
    server = ServerProcess(MODEL, "--device", "cpu", "--distributed-executor-backend", "uni", "--kv-cache-memory-bytes", "16M")
    try:
        yield server.url(), server.process.pid
    finally:
        server.signal()
        server.wait(30)
        lost = [line for line in server.lines if "died" in line or "lost" in line or "Traceback" in line]
        print("".join(lost), end="")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archive", type=Path, help="a source archive of Pillow")
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=2.0, help="that an answer may take")
    parser.add_argument("--url", help="of a running server whose model sees")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, server_of(options.url) as (url, pid):
        files = list(pictures(options.archive or download(directory)))
        asyncio.run(send_all(url, [("a good picture", GOOD)], 1))
        before, memory = ([], {}) if pid is None else (family(pid), megabytes(pid))
        answers, neighbour = asyncio.run(send_all(url, files, options.clients))
        wrong = report(answers, neighbour, options.seconds)
        if pid is not None:
            time.sleep(SETTLE_S)
            after = family(pid)
            print(f"processes: {len(before)} before, {len(after)} after, {len(set(before) - set(after))} of them replaced")
            print("memory in MB, before and after:")
            for module, size in megabytes(pid).items():
                print(f"{memory.get(module, 0):8.0f}{size:8.0f}  {module}")
    print(*(f"WRONG: {one}" for one in wrong), sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
