"""What a viewer says that cannot connect."""

import socket
import threading

import pytest

from patience import PATIENCE
from quire.cli.top import TopFeed


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (None, "no connection: Connection refused; trying again"),
        (b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n", "the server answers 503; trying again"),
        (b"nonsense\r\n\r\n", "the answer cannot be read; trying again"),
    ],
)
def test_trouble_in_plain_words(answer: bytes | None, told: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        feed = TopFeed(f"http://127.0.0.1:{server.getsockname()[1]}", None)
        if answer is None:
            server.close()
        else:
            threading.Thread(target=_answer, args=(server, answer), daemon=True).start()
        feed.start()
        assert feed.wake.wait(PATIENCE)
        assert feed.problem == told
        feed.refused = "the test is over"


def _answer(server: socket.socket, answer: bytes) -> None:
    connection, _ = server.accept()
    with connection:
        connection.recv(65536)
        connection.sendall(answer)
