"""Media processes and engines that are killed or stand still, callers that go, and what is left: nothing."""

import asyncio
import contextlib
import functools
import gc
import os
import signal

import pytest
from media_files import READER, encoded, picture, reading

from patience import PATIENCE
from quire.features.media.inputs import NO_OPTIONS, MediaRef
from quire.features.media.reader import WORKERS_VARIABLE, _Content
from quire.text.workers import pool
from quire.types.errors import InvalidParameter


@functools.cache
def slow():
    """A picture that takes a media process about a second."""
    return encoded(picture(2500, 2500))


@pytest.fixture(scope="module")
def media():
    with reading(allowed_local_media_path=str(READER)) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_left(media):
    yield
    media.reader.reset()
    gc.collect()  # errors refer to frames of the tests
    media.run(asyncio.wait_for(until(lambda: not files_of(media) and not media.reader._running), PATIENCE))


def files_of(media):
    return {path.name for path in media.reader._files.directory.iterdir()} - {"owner", "source"}


def process(media, *contents):
    refs = [MediaRef("image", f"messages[0].content[{i}]", content) for i, content in enumerate(contents)]
    return asyncio.ensure_future(media.reader.process(refs, NO_OPTIONS))


async def until(condition):
    while not condition():
        await asyncio.sleep(0.01)


async def at_work(workers):
    """Wait until a process has a job, after it has started; return the processes that have one."""
    await until(lambda: not workers._starting and any(worker.asked for worker in workers._workers))
    return [worker for worker in workers._workers if worker.asked]


def small(*seeds):
    return [encoded(picture(seed=seed)) for seed in seeds]


async def leave(tasks):
    """Cancel the only task, and forget it, for its exception holds all that it had."""
    tasks[0].cancel()
    await asyncio.wait(tasks)
    tasks.clear()


def test_a_caller_who_goes_leaves_no_file(media):
    async def scene():
        await process(media, *small(1))
        media.reader.reset()
        tasks = [process(media, slow())]
        await at_work(media.reader._processes())
        await leave(tasks)
        await until(lambda: not any(worker.asked for worker in media.reader._pool._workers))
        assert not files_of(media)

    media.run(scene())


def test_a_caller_who_goes_while_its_picture_is_fetched(media):
    url = (READER / "pictures" / "00.png").as_uri()

    async def scene():
        await process(media, url)
        media.reader.reset()
        tasks = [process(media, url)]
        await until(lambda: files_of(media))
        await leave(tasks)
        await until(lambda: not any(worker.asked for worker in media.reader._fetchers._workers))
        await asyncio.sleep(0.05)
        assert not files_of(media)

    media.run(scene())


def test_refused_pictures_are_forgotten_at_once(media):
    """Without a collection of garbage, which may come late."""

    async def scene():
        with contextlib.suppress(InvalidParameter):
            await process(media, b"nothing", slow())
        media.reader.reset()
        await until(lambda: not any(worker.asked for worker in media.reader._pool._workers))

    gc.disable()
    try:
        media.run(scene())
        assert not [each for each in gc.get_objects() if isinstance(each, _Content)]
    finally:
        gc.enable()


def test_a_process_that_is_killed_while_it_fetches(media):
    async def scene():
        url = (READER / "pictures" / "00.png").as_uri()
        await process(media, url)
        task = process(media, url)
        for worker in media.reader._fetchers._workers:  # as if it had written a part
            os.kill(worker.pid, signal.SIGKILL)
        assert len(await task) == 1

    media.run(scene())


def test_a_job_that_loses_two_processes_is_refused_and_others_go_on(media):
    async def scene():
        task = process(media, slow())
        for _ in range(2):
            [worker] = await at_work(media.reader._processes())
            worker.kill()
            await until(lambda worker=worker: worker not in media.reader._pool._workers)
        others = [process(media, data) for data in small(20, 21)]
        with pytest.raises(InvalidParameter, match=r"content\[0\]: reading the image cannot be done: two processes were lost"):
            await task
        assert [len(each) for each in await asyncio.gather(*others)] == [1, 1]

    media.run(scene())


@pytest.mark.parametrize(("most", "readers", "each"), [(None, 1, 8), (None, 4, 2), (None, 20, 1), (3, 2, 1), (40, 1, 40)])
def test_all_api_processes_together_have_a_bounded_number(monkeypatch, most, readers, each):
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    if most is not None:
        monkeypatch.setenv(WORKERS_VARIABLE, f"{most}")
    with reading() as one:
        one.reader.readers = readers
        assert one.reader._processes()._most == each


def test_a_process_that_stands_still_is_replaced(media, monkeypatch):
    async def scene():
        await process(media, *small(30))
        monkeypatch.setattr(pool, "HANG_TIMEOUT_S", 0.2)
        task = process(media, slow())
        [worker] = await at_work(media.reader._processes())
        os.kill(worker.pid, signal.SIGSTOP)
        [item] = await task
        assert item.tokens == (12,) * 16 and not worker.runs

    media.run(scene())


def test_all_processes_and_their_server_are_killed_at_work(media):
    async def scene():
        tasks = [process(media, slow()), *(process(media, data) for data in small(*range(10, 16)))]
        workers = await at_work(media.reader._processes())
        os.kill(media.reader._server._process._process.pid, signal.SIGKILL)
        for worker in workers:
            os.kill(worker.pid, signal.SIGKILL)
        for [item] in await asyncio.gather(*tasks):
            assert item.tokens == (12,) * 16

    media.run(scene())
