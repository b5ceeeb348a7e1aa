"""Engines that are lost in the middle of many embedding requests: no request is lost, and every vector is the same."""

import concurrent.futures
import os
import signal
from pathlib import Path

import httpx
import numpy as np
from server_process import engines, serving, wait_for

from encoder_families import ENCODERS, save_encoder
from serving import Running

REQUESTS, INPUTS = 12, 24
BODIES = [
    {"model": "tiny", "input": [[5 + (number * 31 + each * 7 + at) % 90 for at in range(20 + each)] for each in range(INPUTS)]}
    for number in range(REQUESTS)
]


def embed(http: httpx.Client, number: int) -> np.ndarray:
    answer = http.post("/v1/embeddings", json=BODIES[number])
    assert answer.status_code == 200, answer.text
    return np.array([one["embedding"] for one in answer.json()["data"]])


def test_an_encoders_engine(tmp_path: Path, quick: None) -> None:
    save_encoder(ENCODERS["BERT"], tmp_path)
    running = Running(tmp_path, skip_tokenizer_init=True, max_num_batched_tokens=96, kv_cache_memory_bytes=None)
    try:
        alone = [embed(running.http, number) for number in range(REQUESTS)]
        lost = running.llm.engine_pid
        with concurrent.futures.ThreadPoolExecutor(REQUESTS) as pool:
            asked = [pool.submit(embed, running.http, number) for number in range(REQUESTS)]
            concurrent.futures.wait(asked, return_when=concurrent.futures.FIRST_COMPLETED)
            os.kill(lost, signal.SIGKILL)
            found = [one.result() for one in asked]
        wait_for(lambda: running.llm.engine_pid not in (None, lost))
    finally:
        running.close()
    for one, other in zip(alone, found, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_an_engine_below_two_api_processes(serve_model: Path) -> None:
    flags = ("--runner", "pooling", "--api-server-count", "2", "--data-parallel-size", "2", "--device", "cpu",
             "--distributed-executor-backend", "uni", "--kv-cache-memory-bytes", str(4 << 20))  # fmt: skip
    with serving(serve_model, *flags) as server:
        server.url()

        def ask(number: int) -> np.ndarray:
            with server.client() as client:  # a connection of its own, so that any process may get it
                return embed(client, number)

        alone = [ask(number) for number in range(REQUESTS)]
        [lost, other] = engines(server.process.pid)
        with concurrent.futures.ThreadPoolExecutor(REQUESTS) as pool:
            asked = [pool.submit(ask, number) for number in range(REQUESTS)]
            concurrent.futures.wait(asked, return_when=concurrent.futures.FIRST_COMPLETED)
            os.kill(lost, signal.SIGKILL)
            found = [one.result() for one in asked]
        for one, again in zip(alone, found, strict=True):
            np.testing.assert_allclose(one, again, atol=1e-5)
        wait_for(lambda: len({*engines(server.process.pid)} - {lost, other}) == 1)
        np.testing.assert_allclose(ask(0), alone[0], atol=1e-5)
