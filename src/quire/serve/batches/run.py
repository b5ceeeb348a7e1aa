"""Runs the lines of a batch: a bounded number at a time, and every answer is appended to a file when it is complete."""

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

from quire.async_llm import AsyncLLM
from quire.serve.batches.calls import LocalClient
from quire.serve.batches.lines import BatchLine, Done, IdSet, LineError, answer_line, error_line, new_id, read_line
from quire.types.errors import EngineDead


class Appender:
    """Appends whole lines to a file, from a thread. Lines that come while it writes are written together after that.

    After an error, such as a full disk, the file is cut after its last complete line.
    """

    def __init__(self, descriptor: int) -> None:
        """descriptor: of a file that is open for writing, at its end. `close` closes it."""
        self._descriptor = descriptor
        self._waiting: list[tuple[bytes, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None
        self.bytes = 0  # written

    async def write(self, line: bytes) -> None:
        """Return when the line is in the file. Raise OSError if it cannot be written."""
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((line, written))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_all())
        await written

    async def close(self, sync: bool = False) -> None:
        """Wait for lines that are being written, then close. sync: only when the file is on the disk"""
        writing = self._writing
        if writing is not None:
            await asyncio.wait([writing])
        try:
            if sync:
                await asyncio.to_thread(os.fsync, self._descriptor)
        finally:
            os.close(self._descriptor)

    async def _write_all(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            error, before = OSError("nothing was written"), self.bytes
            try:
                await asyncio.to_thread(self._append, b"".join(line for line, _ in batch))
            except OSError as found:
                error = found
            room = self.bytes - before
            for line, written in batch:
                room -= len(line)
                if written.done():
                    continue
                if room >= 0:
                    written.set_result(None)
                else:
                    written.set_exception(error)
        self._writing = None

    def _append(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            written = len(data) - len(rest)
            kept = data.rfind(b"\n", 0, written) + 1
            if kept != written:
                self._take_back(written - kept)
            self.bytes += kept
            raise
        self.bytes += len(data)

    def _take_back(self, count: int) -> None:
        with contextlib.suppress(OSError):  # a pipe or a device
            os.ftruncate(self._descriptor, os.lseek(self._descriptor, 0, os.SEEK_END) - count)


class Permits(Protocol):
    """How many lines may be in flight."""

    async def acquire(self) -> None: ...

    def release(self) -> None: ...


@dataclass
class Counts:
    completed: int = 0  # answered with 200
    failed: int = 0
    skipped: int = 0  # answered by an earlier run


class BatchRun:
    def __init__(
        self,
        llm: AsyncLLM,
        client: LocalClient,
        permits: Permits,
        done: Done,
        output: Appender,
        errors: Appender,
        *,
        tenant: str | None = None,
        endpoint: str | None = None,
        least_priority: int | None = None,
        progress: Callable[[Counts], None] = lambda _: None,
    ) -> None:
        """
        done: lines that earlier runs have answered
        output, errors: for answers with status 200, and for all others; they may be the same
        endpoint, least_priority: see `read_line`
        """
        self._llm, self._client, self._permits, self._done = llm, client, permits, done
        self._output, self._errors = output, errors
        self._tenant, self._endpoint, self._least_priority, self._progress = tenant, endpoint, least_priority, progress
        self._seen = IdSet()
        self.counts = Counts(done.completed, done.failed)

    async def run(self, lines: AsyncIterator[tuple[int, bytes | None]]) -> None:
        """Answer every line. Raise OSError if an answer cannot be written, and EngineDead if the engine is lost for good."""
        try:
            async with asyncio.TaskGroup() as group:
                async for number, raw in lines:
                    line = self._check(number, raw)
                    if line is None:
                        self.counts.skipped += 1
                        self._progress(self.counts)
                        continue
                    await self._permits.acquire()
                    group.create_task(self._answer(number, line)).add_done_callback(lambda _: self._permits.release())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def give_up(self, lines: AsyncIterator[tuple[int, bytes | None]], code: str, message: str) -> None:
        """Write an error for every line that has no answer."""
        async for number, raw in lines:
            line = self._check(number, raw)
            if isinstance(line, BatchLine):
                line = LineError(code, message, line.custom_id)
            if line is not None:
                await self._answer(number, line)

    def _check(self, number: int, raw: bytes | None) -> BatchLine | LineError | None:
        """Return the line, or what is wrong with it; None if an earlier run has answered it."""
        try:
            line = read_line(raw, self._endpoint, self._least_priority)
        except LineError as error:
            if error.custom_id is not None:
                self._seen.add(error.custom_id)
            return None if self._done.covers(number, None) else error
        if not self._seen.add(line.custom_id):
            message = "custom_id was used by an earlier line; every line needs its own"
            return None if self._done.covers(number, None) else LineError("duplicate_custom_id", message, line.custom_id)
        return None if self._done.covers(number, line.custom_id) else line

    async def _answer(self, number: int, line: BatchLine | LineError) -> None:
        if isinstance(line, LineError):
            await self._errors.write(error_line(number, line))
            self.counts.failed += 1
        else:
            line_id, request_id = new_id(), secrets.token_hex(16)
            answer = await self._client.post(line.url, line.body, request_id, self._tenant)
            if self._llm.state == "dead":  # it did not end this request by itself
                raise EngineDead("the engine is gone")
            good = answer.status == 200
            data = answer_line(line_id, line.custom_id, answer.status, request_id, answer.body)
            await (self._output if good else self._errors).write(data)
            self.counts.completed += good
            self.counts.failed += not good
        self._progress(self.counts)
