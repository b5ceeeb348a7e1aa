"""Steps of a server that is being loaded, as its clients see them; here it only sleeps between the parts of its answers."""

import sys

import pytest

from quire.bench import served
from quire.bench.served import measure_served
from quire.types.errors import EngineError

STREAMS = """
import asyncio, json, sys

async def answer(reader, writer):
    head = await reader.readuntil(b"\\r\\n\\r\\n")
    length = int(head.lower().split(b"content-length:")[1].split()[0])
    writer.write(b"HTTP/1.1 200 OK\\r\\n\\r\\n")
    if length:
        asked = json.loads(await reader.readexactly(length))
        assert len(asked["prompt"]) == 32 and max(asked["prompt"]) < 100
        for _ in range(asked["max_tokens"]):
            writer.write(b"data: {}\\n\\n")
            await writer.drain()
            await asyncio.sleep(0.002)
        writer.write(b"data: [DONE]\\n\\n")
    writer.close()

async def main():
    port = int(sys.argv[sys.argv.index("--port") + 1])
    async with await asyncio.start_server(answer, "127.0.0.1", port) as server:
        await server.serve_forever()

asyncio.run(main())
"""


def test_one_stream_and_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "ROUNDS", 1)
    found = measure_served([sys.executable, "-c", STREAMS], 8, 64, 100, {})
    assert [(turn.rows, turn.keys) for turn in found] == [(1, 48), (4, 48)]
    assert all(turn.seconds > 0 for turn in found)


def test_a_server_that_does_not_start() -> None:
    with pytest.raises(EngineError, match="the server that was to be measured did not start: too little memory"):
        measure_served([sys.executable, "-c", "exit('too little memory')"], 8, 64, 100, {})
