"""The work of `quire run-batch`: an engine and the server's app without a socket, an input file, and an output file."""

import asyncio
import contextlib
import fcntl
import gc
import logging
import os
import stat
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import uvloop
from tqdm import tqdm

from quire.async_llm import AsyncLLM
from quire.config.args import EngineArgs
from quire.config.server_args import ServerArgs
from quire.obs.logs import set_up_logging
from quire.progress import doing, is_quiet, shown
from quire.serve.adapters import check_adapters, load_modules
from quire.serve.app import build_app
from quire.serve.batches.calls import LocalClient
from quire.serve.batches.lines import Done, count_lines, read_lines
from quire.serve.batches.run import Appender, BatchRun, Counts
from quire.serve.batches.throttle import FixedPermits
from quire.serve.tools import check_parsers
from quire.types.errors import ConfigError, EngineError

logger = logging.getLogger(__name__)

COPY_BYTES = 2**20
TIMEOUT_S = 300.0  # without a byte from the other side of a download or upload
QUEUED_SHARE = 2  # lines in flight for each slot of the engines: a slot that becomes free has the next line at once
UNKNOWN = 1 << 62  # lines
OBJECTS_PER_COLLECTION = 50_000  # new objects, after which the garbage collector looks for cycles


@dataclass(frozen=True)
class BatchFiles:
    """`input` and `output`: paths, or http(s) URLs. `folder`: for the temporary file of an output that is a URL."""

    input: str
    output: str
    resume: bool = False
    folder: str | None = None

    def check(self) -> None:
        """Raise ConfigError before anything is loaded."""
        if is_url(self.output) and self.resume:
            raise ConfigError(f"--resume requires a local output file; got {self.output}. Leave --resume out")
        if not is_url(self.input):
            path = Path(self.input)
            if not path.exists():
                raise ConfigError(f"--input-file {self.input} does not exist. Give a JSONL file")
            if path.is_dir():
                raise ConfigError(f"--input-file {self.input} is a folder. Give a JSONL file")
        if not is_url(self.output):
            self._check_output(Path(self.output))

    def _check_output(self, path: Path) -> None:
        if not is_url(self.input) and path.exists() and path.is_file() and path.samefile(self.input):
            raise ConfigError(f"--output-file {path} is the input file. Give another name")
        if path.is_dir():
            raise ConfigError(f"--output-file {path} is a folder. Give the name of a file")
        if path.is_file() and path.stat().st_size and not self.resume:
            raise ConfigError(f"--output-file {path} exists. Add --resume to go on with it, or give another name")
        if not path.parent.is_dir():
            raise ConfigError(f"--output-file {path}: the folder {path.parent} does not exist. Create it")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ConfigError(f"--output-file {path} cannot be written. Give a file in a folder that you may write to")


def is_url(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def _lock(descriptor: int, name: str) -> None:
    """Hold the output file for this run: two runs at a time would answer lines twice."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        message = f"--output-file {name} is being written by another run. Wait until that run ends, or give another name"
        raise ConfigError(message) from None
    except OSError:
        logger.debug("no lock of %s: its file system has none", name)


class BatchStopped(EngineError):
    """The run ended before its last line; the output file can be resumed."""


def run_offline(args: EngineArgs, settings: ServerArgs, files: BatchFiles, concurrency: int | None) -> Counts:
    """Answer the lines of the input file and return how many were answered."""
    set_up_logging()
    files.check()
    check_parsers(settings, args.require_plugins)
    check_adapters(settings, args)
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(_fetched(files.input))
        target = stack.enter_context(_target(files))
        done = Done()
        descriptor = os.open(target, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            _lock(descriptor, files.output)
            if files.resume:
                with target.open("r+b") as written:
                    done.read(written, str(target))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            counts = runner.run(_run(args, settings, source, Appender(descriptor), done, concurrency))
        if is_url(files.output):
            _put(files.output, target)
    return counts


async def _run(
    args: EngineArgs, settings: ServerArgs, source: BinaryIO, output: Appender, done: Done, concurrency: int | None
) -> Counts:
    total = await asyncio.to_thread(_count, source)
    with shown(), doing(f"loading {args.model}"):
        llm = await asyncio.to_thread(AsyncLLM.from_engine_args, args)
        llm.offload.start()
        llm.media.start()
        try:
            await llm.wait_ready()
            await load_modules(llm, settings)
        except BaseException:
            llm.shutdown(0.0)
            raise
    most = concurrency or QUEUED_SHARE * llm.config.max_seqs * len(llm.engines)
    bar = tqdm(
        total=total, desc="lines", unit="", file=sys.stderr, disable=is_quiet(), initial=0,
        mininterval=0.2 if sys.stderr.isatty() else 10.0,
    )  # fmt: skip

    def progress(counts: Counts) -> None:
        bar.n = counts.completed + counts.failed
        bar.update(0)

    client = LocalClient(build_app(llm, settings))
    _collect_rarely()
    run = BatchRun(llm, client, FixedPermits(most), done, output, output, progress=progress)
    try:
        await run.run(read_lines(source))
    except OSError as error:
        why = error.strerror or error
        raise BatchStopped(f"the output file cannot be written: {why}. {_kept(run.counts)}") from None
    except EngineError as error:
        raise BatchStopped(f"{error}. {_kept(run.counts)}") from None
    except asyncio.CancelledError:
        bar.close()
        print(f"quire run-batch: interrupted. {_kept(run.counts)}", file=sys.stderr)
        raise
    finally:
        bar.close()
        await output.close()
        llm.shutdown()
    return run.counts


def _collect_rarely() -> None:
    """Make the garbage collector's work small: lines in flight have many objects, and leave no cycles when they are done."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(OBJECTS_PER_COLLECTION)


def _kept(counts: Counts) -> str:
    return f"{counts.completed + counts.failed} lines are in the output file; --resume goes on after them"


def _count(source: BinaryIO) -> int | None:
    """Return the number of lines; None for a pipe."""
    if not source.seekable():
        return None
    count = count_lines(source, UNKNOWN)
    source.seek(0)
    return count


# ---- input and output over HTTP


@contextlib.contextmanager
def _fetched(name: str) -> Iterator[BinaryIO]:
    """Open the input; that of a URL is copied to a temporary file first."""
    if not is_url(name):
        try:
            with open(name, "rb", buffering=0) as opened:  # noqa: PTH123 - /dev/stdin is no regular file
                yield opened
        except PermissionError as error:
            raise ConfigError(f"--input-file {name}: {error.strerror}") from None
        return
    with tempfile.TemporaryFile() as copy:
        try:
            with urllib.request.urlopen(name, timeout=TIMEOUT_S) as response:
                while chunk := response.read(COPY_BYTES):
                    copy.write(chunk)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--input-file {name} cannot be fetched: {error}") from None
        copy.seek(0)
        yield copy


@contextlib.contextmanager
def _target(files: BatchFiles) -> Iterator[Path]:
    if not is_url(files.output):
        yield Path(files.output)
        return
    with tempfile.TemporaryDirectory(prefix="quire-batch-", dir=files.folder) as folder:
        yield Path(folder) / "output.jsonl"


def _put(url: str, path: Path) -> None:
    """Upload the output with PUT. If that fails, the file is kept and its name is in the error."""
    headers = {"Content-Type": "application/jsonl", "Content-Length": str(path.stat().st_size)}
    try:
        with path.open("rb") as content:
            request = urllib.request.Request(url, content, headers, method="PUT")
            urllib.request.urlopen(request, timeout=TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        kept = path.parent.with_name(f"{path.parent.name}.jsonl")
        path.rename(kept)
        raise BatchStopped(f"--output-file {url} cannot be written: {error}. The answers are in {kept}") from None
