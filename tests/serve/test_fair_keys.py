"""One key asks for very much; another one hardly notices."""

import contextlib
import threading

import httpx
from server_process import body, serving, wait_for

KEYS = ("first-key", "second-key")


def test_a_key_that_asks_for_a_thousand_answers_does_not_make_another_wait(serve_model):
    flags = [flag for key in KEYS for flag in ("--api-key", key)]
    with serving(serve_model, *flags, "--max-num-seqs", "16", latency=0.01) as server, server.client() as client:
        loud, quiet = ({"headers": {"Authorization": f"Bearer {key}"}} for key in KEYS)
        finished, asked = [], body(200, False) | {"n": 256, "temperature": 1.0}

        def flood() -> None:
            with contextlib.suppress(httpx.HTTPError):  # the server is gone before that is done
                finished.append(client.post("/v1/completions", json=asked, **loud, timeout=300))

        floods = [threading.Thread(target=flood) for _ in range(4)]
        for each in floods:
            each.start()

        def running() -> float:
            lines = client.get("/metrics", **quiet).text.splitlines()
            return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("quire:num_requests_running"))

        wait_for(lambda: running() >= 16)
        for _ in range(3):
            answer = client.post("/v1/completions", json=body(8, False), **quiet)
            assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 8
        assert not finished, "they take two minutes at least, on any machine"
        log = server.log()
        assert not any(key in log for key in KEYS)
        server.process.kill()
        for each in floods:
            each.join()
