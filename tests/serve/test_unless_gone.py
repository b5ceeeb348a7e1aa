"""Work ends when its client hangs up, and only then."""

import asyncio

import pytest

from quire.serve.body import ClientGone, UnlessGone


class Client:
    """Hangs up when told to."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.asked = 0

    async def receive(self) -> dict[str, str]:
        self.asked += 1
        await self.left.wait()
        return {"type": "http.disconnect"}


async def work(client: Client, seconds: float, ended: list[str]) -> str:
    try:
        async with UnlessGone(client.receive):
            await asyncio.sleep(seconds)
            return "done"
    finally:
        ended.append("ended")


def test_work_that_ends_in_time_is_left_alone():
    async def scene():
        client = Client()
        assert await work(client, 0.01, []) == "done"
        client.left.set()
        await asyncio.sleep(0.01)  # whoever watched has stopped
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(scene())


def test_work_that_never_waits_is_not_watched():
    async def scene():
        client = Client()
        async with UnlessGone(client.receive):
            pass
        await asyncio.sleep(0.01)
        assert client.asked == 0

    asyncio.run(scene())


def test_a_client_that_leaves_ends_the_work():
    async def scene():
        client, ended = Client(), list[str]()
        asyncio.get_running_loop().call_later(0.01, client.left.set)
        with pytest.raises(ClientGone):
            await work(client, 10, ended)
        assert ended == ["ended"]
        task = asyncio.current_task()
        assert task is not None and not task.cancelling()
        await asyncio.sleep(0)  # and whoever did it for the client goes on

    asyncio.run(scene())


def test_being_cancelled_by_others_is_not_the_clients_leaving():
    async def scene():
        client = Client()
        task = asyncio.create_task(work(client, 10, []))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        both = asyncio.create_task(work(client, 10, []))
        await asyncio.sleep(0.01)
        both.cancel()
        client.left.set()
        with pytest.raises(asyncio.CancelledError):
            await both

    asyncio.run(scene())


def test_errors_of_the_work_are_its_own():
    async def scene():
        async with UnlessGone(Client().receive):
            await asyncio.sleep(0)
            raise KeyError("mine")

    with pytest.raises(KeyError):
        asyncio.run(scene())
