"""Runs the batches of a server below its other requests: those of a tenant one after the other, those of tenants in turn.

    validating ─► in_progress ─► finalizing ─► completed | expired | cancelled
         └► failed       └────────────┴► failed

Of several API processes, the one that holds the folder's lock runs the batches; if it dies, another takes over. What is done is
known from the output files, so a batch goes on after its last complete line.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

from quire.async_llm import AsyncLLM
from quire.serve.batches.calls import LocalClient
from quire.serve.batches.lines import Done, count_lines, read_lines
from quire.serve.batches.run import Appender, BatchRun, Permits
from quire.serve.batches.store import BatchProblem, Status, Store, StoredBatch, TenantStore
from quire.types.errors import ConfigError, EngineDead

logger = logging.getLogger(__name__)

POLL_S = 1.0  # between two looks at batches of other API processes, at requests to cancel, and between two saved counts
SWEEP_S = 60.0  # between two searches for expired files
QUOTA_S = 10.0  # between two checks of the disk's quota
PAUSE_S = 10.0  # of a batch whose output cannot be written
MAX_FAILURES = 3  # unexpected errors in a row, after which a batch fails


class BatchWorker:
    def __init__(
        self,
        llm: AsyncLLM,
        client: LocalClient,
        store: Store,
        permits: Permits,
        most_lines: int,
        least_priority: int | None,
        alone: bool,
    ) -> None:
        """
        least_priority: of the lines, if the engine schedules by priority
        alone: the server has one API process, so a folder that is locked belongs to another server
        """
        self._llm, self._client, self._store, self._permits = llm, client, store, permits
        self._most_lines, self._least_priority = most_lines, least_priority
        self._alone = alone
        self._news = asyncio.Event()
        self._ended: set[str] = set()  # ids of batches that have ended
        self._failures: dict[str, int] = {}
        self._swept_at = 0.0

    def notify(self) -> None:
        """There is a new batch, or a request to cancel one."""
        self._news.set()

    async def run(self) -> None:
        """Run batches until the task is cancelled."""
        descriptor = os.open(self._store.root / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if not _locked(descriptor):
                if self._alone:
                    logger.warning(
                        "--batch-dir %s is used by another server, which runs its batches until it ends", self._store.root
                    )
                while not _locked(descriptor):
                    await asyncio.sleep(POLL_S)
            await self._run_all()
        finally:
            os.close(descriptor)

    async def _run_all(self) -> None:
        running: dict[str, asyncio.Task[None]] = {}  # by the batch's id
        try:
            while True:
                self._news.clear()
                for store, batch in await asyncio.to_thread(self._next_batches, set(running)):
                    running[batch.id] = asyncio.create_task(self._attend(store, batch))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), POLL_S)
                for name in [name for name, task in running.items() if task.done()]:
                    running.pop(name).result()
        finally:
            for task in running.values():
                task.cancel()
            await asyncio.gather(*running.values(), return_exceptions=True)

    def _next_batches(self, running: set[str]) -> list[tuple[TenantStore, StoredBatch]]:
        """Return batches to begin: the oldest one of each tenant, and those that are cancelled or expired before their turn."""
        found: list[tuple[TenantStore, StoredBatch]] = []
        sweep = time.monotonic() - self._swept_at > SWEEP_S
        for store in self._store.tenants():
            if sweep:
                store.remove_expired()
            waiting = [batch for batch in store.batches(known=self._ended) if not self._has_ended(batch)]
            for batch in waiting:
                over = time.time() >= batch.expires_at or store.cancelling_at(batch) is not None
                if batch.id not in running and (over or batch is waiting[-1]):
                    found.append((store, batch))
        if sweep:
            self._swept_at = time.monotonic()
        return found

    def _has_ended(self, batch: StoredBatch) -> bool:
        if batch.ended:
            self._ended.add(batch.id)
        return batch.ended

    async def _attend(self, store: TenantStore, batch: StoredBatch) -> None:
        """Bring a batch to its end, or as far as possible now."""
        try:
            await self._process(store, batch)
        except OSError as error:
            logger.error("batch %s pauses for %.0f s: %s", batch.id, PAUSE_S, error.strerror or error)
            await asyncio.sleep(PAUSE_S)
        except EngineDead:
            await asyncio.sleep(PAUSE_S)  # the server ends
        except ConfigError as error:
            await self._fail(store, batch, "invalid_output", str(error))
        except Exception as error:
            self._failures[batch.id] = self._failures.get(batch.id, 0) + 1
            logger.exception("batch %s stopped", batch.id)
            if self._failures[batch.id] >= MAX_FAILURES:
                await self._fail(
                    store, batch, "internal_error", f"the batch stopped {MAX_FAILURES} times: {type(error).__name__}"
                )
        self._news.set()

    # ---- the life of a batch ------------------------------------------------------------------------------------------------

    async def _process(self, store: TenantStore, batch: StoredBatch) -> None:
        if batch.status == "validating" and await asyncio.to_thread(store.cancelling_at, batch) is not None:
            batch.status, batch.end, batch.finalizing_at = "finalizing", "cancelled", int(time.time())
        if batch.status == "validating":
            problem = await asyncio.to_thread(self._validate, store, batch)
            if problem is not None:
                await self._fail(store, batch, *problem)
                return
            batch.status, batch.in_progress_at = "in_progress", int(time.time())
            await asyncio.to_thread(store.save, batch)
            logger.info("batch %s begins: %d lines for %s", batch.id, batch.counts.total, batch.endpoint)
        if batch.status == "in_progress":
            batch.end = await self._run_lines(store, batch)
            batch.status, batch.finalizing_at = "finalizing", int(time.time())
            await asyncio.to_thread(store.save, batch)
        if batch.status == "finalizing":
            await asyncio.to_thread(store.publish_outputs, batch)
            batch.status = batch.end
            setattr(batch, f"{batch.end}_at", int(time.time()))
            await asyncio.to_thread(store.save, batch)
            counts = batch.counts
            logger.info("batch %s %s: %d answered, %d failed", batch.id, batch.status, counts.completed, counts.failed)

    def _validate(self, store: TenantStore, batch: StoredBatch) -> tuple[str, str] | None:
        """Count the lines; return code and message of what is wrong with the whole file."""
        try:
            with store.input(batch) as file:
                batch.counts.total = count_lines(file, self._most_lines)
        except FileNotFoundError:
            return "missing_file", f"the input file {batch.input_file_id} does not exist any more"
        if not batch.counts.total:
            return "empty_file", "the input file has no lines"
        if batch.counts.total > self._most_lines:
            return (
                "too_many_lines",
                f"the input file has more than {self._most_lines} lines, the limit of this server; split it",
            )
        return None

    async def _fail(self, store: TenantStore, batch: StoredBatch, code: str, message: str) -> None:
        batch.problems = [BatchProblem(code, message)]
        batch.status, batch.failed_at = "failed", int(time.time())
        logger.warning("batch %s failed: %s", batch.id, message)
        with contextlib.suppress(OSError):
            await asyncio.to_thread(store.save, batch)

    async def _run_lines(self, store: TenantStore, batch: StoredBatch) -> Status:
        """Answer the lines that have no answer yet. Return how the batch ends."""
        async with self._opened(store, batch) as run:
            with await asyncio.to_thread(store.input, batch) as source:
                work = asyncio.create_task(run.run(read_lines(source)))
                try:
                    end = await self._watch(store, batch, work, run)
                finally:
                    work.cancel()
                    await asyncio.wait([work])
        if end != "completed":  # the outputs are counted again: the work was cancelled while it wrote lines
            async with self._opened(store, batch) as run:
                if end == "expired":
                    with await asyncio.to_thread(store.input, batch) as source:
                        why = f"the completion window of {batch.completion_window} has passed"
                        await run.give_up(read_lines(source), "batch_expired", why)
        batch.counts.completed, batch.counts.failed = run.counts.completed, run.counts.failed
        return end

    @contextlib.asynccontextmanager
    async def _opened(self, store: TenantStore, batch: StoredBatch) -> AsyncIterator[BatchRun]:
        """Open the outputs, which are cut after their last complete lines."""
        done = Done()
        outputs = [Appender(await asyncio.to_thread(_reopen, path, done)) for path in store.output_paths(batch)]
        tenant = "batch" if store.tenant is None else f"{store.tenant}/batch"  # shares slots and pages as one more tenant
        try:
            yield BatchRun(
                self._llm, self._client, self._permits, done, *outputs,
                tenant=tenant, endpoint=batch.endpoint, least_priority=self._least_priority,
            )  # fmt: skip
        finally:
            for output in outputs:
                await output.close(sync=True)

    async def _watch(self, store: TenantStore, batch: StoredBatch, work: "asyncio.Task[None]", run: BatchRun) -> Status:
        """Save the counts until the work is done, cancelled, expired, or out of disk space."""
        checked_at = 0.0
        while True:
            done, _ = await asyncio.wait([work], timeout=POLL_S)
            counts = run.counts
            if done:
                work.result()
                return "completed"
            if await asyncio.to_thread(store.cancelling_at, batch) is not None:
                return "cancelled"
            if time.time() >= batch.expires_at:
                return "expired"
            if time.monotonic() - checked_at > QUOTA_S:
                checked_at = time.monotonic()
                if not await asyncio.to_thread(store.room):
                    batch.problems = [BatchProblem("disk_quota", "files and batches take all the disk space of this server")]
                    return "failed"
            if (batch.counts.completed, batch.counts.failed) != (counts.completed, counts.failed):
                batch.counts.completed, batch.counts.failed = counts.completed, counts.failed
                await asyncio.to_thread(store.save, batch)


def _reopen(path: Path, done: Done) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        with path.open("r+b") as written:
            done.read(written, "an output")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _locked(descriptor: int) -> bool:
    """Take the lock; return whether no other process has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
