"""A client that hangs up while its picture is fetched, decoded or encoded leaves nothing in the server."""

import base64
import io
import json
import os
import signal
import socket

import numpy as np
import pytest
from PIL import Image

from patience import wait_for


def data_url(side, seed):
    """A picture of noise: decoding it takes a while."""
    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8)).save(out, "PNG", compress_level=0)
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def asked(url):
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}]
    return {"messages": [{"role": "user", "content": content}], "temperature": 0}


def raw(http, url):
    body = json.dumps({**asked(url), "max_tokens": 200, "ignore_eos": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {http.base_url.host}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def files_of(media):
    files = media._files
    return [] if files is None else [path for path in files.directory.iterdir() if path.name not in ("owner", "source")]


def stop_fetchers(http, media, url):
    """Let the next file be fetched by a process that stands still."""
    assert http.post("/v1/chat/completions", json={**asked(url), "max_tokens": 1}).status_code == 200
    for pid in media._fetchers.pids:
        os.kill(pid, signal.SIGSTOP)


@pytest.mark.parametrize("stage", ["fetched", "decoded", "answered"])
def test_a_client_hangs_up(reader_server, stage):
    http, llm = reader_server.http, reader_server.llm
    media, file = llm.media, (reader_server.root / "0.png").as_uri()
    if stage == "fetched":
        stop_fetchers(http, media, file)
    reader_server.call(llm.reset_mm_cache())
    url = {"fetched": file, "decoded": data_url(2000, 1), "answered": data_url(40, 1)}[stage]
    begun = {"fetched": lambda: files_of(media), "decoded": lambda: media._running, "answered": lambda: llm.num_open == 1}
    with socket.create_connection((http.base_url.host, http.base_url.port)) as connection:
        connection.sendall(raw(http, url))
        wait_for(begun[stage])
    reader_server.wait_idle()
    wait_for(lambda: not media._running)
    text = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 2}  # nothing of the one before is kept after it
    assert http.post("/v1/chat/completions", json=text).status_code == 200
    reader_server.call(llm.reset_mm_cache())
    wait_for(lambda: not files_of(media))
