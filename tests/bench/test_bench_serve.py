import asyncio
import shutil
import ssl
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fake_openai import Answer, FakeOpenAI
from patience import PATIENCE
from quire.bench.arrivals import LoadShape
from quire.bench.client import Client, Origin
from quire.bench.datasets import DatasetOptions
from quire.bench.metrics import summarize
from quire.bench.openai import MeasuredServer
from quire.bench.report import error_lines
from quire.bench.serve import Outcome, ServeSettings, bench_serve
from quire.types.errors import ConfigError, EngineError


def bench(server: FakeOpenAI, count: int = 8, output: int = 4, **settings: object) -> Outcome:
    dataset = DatasetOptions(count=count, random_input_len=6, random_output_len=output)
    settings = {"dataset": dataset, "disable_tqdm": True, **settings}
    return asyncio.run(bench_serve(ServeSettings(Origin.parse(server.url), **settings)))


def test_known_delays_are_measured() -> None:
    with FakeOpenAI(lambda *_: Answer(first=0.05, gap=0.03)) as server:
        outcome = bench(server)
    summary = summarize(outcome.records, outcome.duration)
    assert (summary.completed, summary.failed, outcome.notes) == (8, 0, [])
    assert (summary.total_input_tokens, summary.total_output_tokens, summary.total_cached_tokens) == (48, 32, 0)
    for metric, least in (("ttft", 50), ("tpot", 30), ("itl", 30), ("e2el", 140)):
        spread = summary.spreads[metric]
        assert spread is not None
        assert least - 2 <= spread.median <= 2 * least + 60
    assert (outcome.model, outcome.server_version, outcome.prompts) == ("fake", "1.2.3", "ids")
    assert summary.max_concurrent_requests == 8


def test_chunks_of_several_tokens() -> None:
    with FakeOpenAI(lambda *_: Answer(gap=0.02, tokens=[1, 4, 3])) as server:
        outcome = bench(server, count=2, output=8)
    for record in outcome.records:
        assert (record.output_tokens, len(record.arrivals), record.itls.count(0.0)) == (8, 3, 5)
        assert sum(record.itls) == pytest.approx(record.tpot * 7)


@pytest.mark.parametrize("most", [1, 4])
def test_the_server_never_sees_more_at_once_than_allowed(most: int) -> None:
    with FakeOpenAI(lambda _, index: Answer(first=0.001 * (index % 7))) as server:
        outcome = bench(server, count=60, shape=LoadShape(max_concurrency=most))
    assert server.peak == most
    assert len(outcome.records) == 60
    assert server.connections <= most + 1
    assert summarize(outcome.records, outcome.duration).max_concurrent_requests <= most


def test_connections_are_kept_and_lost_ones_replaced() -> None:
    with FakeOpenAI(idle_close=True) as server:
        outcome = bench(server, count=20, shape=LoadShape(max_concurrency=2))
    assert [record.error for record in outcome.records] == [None] * 20
    assert server.connections >= 20
    assert len(server.generated) == 20
    with FakeOpenAI(lambda *_: Answer(close=True)) as server:
        assert all(record.ok for record in bench(server, count=5, shape=LoadShape(max_concurrency=1)).records)


def test_failures_are_counted_and_told() -> None:
    kinds = [
        Answer(),
        Answer(status=400, error={"error": {"message": "bad temperature", "code": 400}}),
        Answer(status=500, error="Internal Server Error"),
        Answer(cut_after=2),
        Answer(cut_after=-1),
        Answer(error_after=1, error={"error": {"message": "out of memory"}}),
        Answer(done=False),
        Answer(token_ids=True, lost=1),
    ]
    with FakeOpenAI(lambda _, index: kinds[index]) as server:
        outcome = bench(server, count=8, shape=LoadShape(max_concurrency=1))
    summary = summarize(outcome.records, outcome.duration)
    assert (summary.completed, summary.failed) == (2, 6)
    assert [record.error for record in outcome.records] == [
        None,
        "HTTP 400: bad temperature",
        "HTTP 500: Internal Server Error",
        "the stream was cut after 2 tokens: the connection was closed in the middle of the answer",
        "no answer came",
        "error in the stream: out of memory",
        None,
        "the stream had 3 token ids, but usage reports 4",
    ]
    lines = error_lines(outcome.records)
    assert lines[0] == "1 x HTTP 400: bad temperature"
    assert lines[-1] == "and 1 other kinds of errors"


def test_a_wrong_model_fails_every_request() -> None:
    with FakeOpenAI() as server:
        outcome = bench(server, count=3, model="other")
        assert error_lines(outcome.records) == ["3 x HTTP 404: The model `other` does not exist."]
        with pytest.raises(EngineError, match="no warm-up request succeeded: 2 x HTTP 404: The model `other`"):
            bench(server, model="other", warmups=2)


def test_a_server_that_hangs_is_given_up() -> None:
    with FakeOpenAI(lambda *_: Answer(hang_after=1)) as server:
        outcome = bench(server, count=2, timeout=2.0)
    assert {record.error for record in outcome.records} == {"the stream was cut after 1 tokens: no answer in time"}


def test_nobody_there() -> None:
    with FakeOpenAI() as server:
        pass
    with pytest.raises(EngineError, match=f"no server answers at http://127.0.0.1:{server.port}: connection refused"):
        bench(server)
    with pytest.raises(EngineError, match="cannot find the server"):
        asyncio.run(bench_serve(ServeSettings(Origin.parse("http://no-such-host.invalid"))))


def test_waiting_for_a_server() -> None:
    """A server that comes later is waited for, if that was asked."""
    with FakeOpenAI() as early:
        port = early.port
    late = FakeOpenAI(port=port, loading=1)
    starter = threading.Timer(0.3, late.__enter__)
    starter.start()
    try:
        origin = Origin.parse(f"http://127.0.0.1:{port}")
        settings = ServeSettings(
            origin, ready_timeout=PATIENCE, dataset=DatasetOptions(count=2, random_input_len=2), disable_tqdm=True
        )
        assert len(asyncio.run(bench_serve(settings)).records) == 2
    finally:
        starter.join()
        late.__exit__()


def test_a_server_that_is_still_loading() -> None:
    with FakeOpenAI(loading=99) as server:
        with pytest.raises(EngineError, match="HTTP 503: the model is still loading"):
            bench(server)
        with pytest.raises(EngineError, match=r"is not ready after 0\.01 s"):
            bench(server, ready_timeout=0.01)


def test_keys_and_headers() -> None:
    with FakeOpenAI(key="secret") as server:
        for model in (None, "fake"):
            with pytest.raises(EngineError, match="HTTP 401: Unauthorized; give its key with --api-key or QUIRE_API_KEY"):
                bench(server, model=model)
        assert len(server.requests) == 2, "nothing is offered to a server that lets nobody in"
        headers = {"authorization": "Bearer secret", "x-team": "blue"}
        outcome = bench(server, headers=headers, request_id_prefix="run7-")
    assert all(record.ok for record in outcome.records)
    assert {seen.headers["x-team"] for seen in server.generated} == {"blue"}
    assert {seen.headers["x-request-id"] for seen in server.generated} == {f"run7-{index}" for index in range(8)}
    with pytest.raises(ConfigError, match="header"):
        bench(server, headers={"x": "a\r\nb: c"})


def test_bytes_may_come_in_any_pieces() -> None:
    with FakeOpenAI(lambda *_: Answer(pieces=3, token_ids=True)) as server:
        outcome = bench(server, count=3, keep_text=True)
    assert [(record.error, record.output_tokens, record.text) for record in outcome.records] == [(None, 4, " la" * 4)] * 3


def test_chat() -> None:
    with FakeOpenAI(lambda *_: Answer(first=0.02, separate_finish=True)) as server:
        outcome = bench(server, count=3, kind="chat", endpoint="/v1/chat/completions", fields={"temperature": 0.5})
    assert outcome.prompts == "text"
    assert "random words" in outcome.notes[0]
    assert [(record.error, record.output_tokens, len(record.arrivals)) for record in outcome.records] == [(None, 4, 4)] * 3
    assert {seen.body["temperature"] for seen in server.generated} == {0.5}
    assert all(record.ttft > 0.018 for record in outcome.records)


def test_prompts_without_a_vocabulary_are_words() -> None:
    with FakeOpenAI(vocab_size=None) as server:
        outcome = bench(server, count=2)
        assert outcome.prompts == "text"
        assert len(server.generated[0].body["prompt"].split()) == 6
        with pytest.raises(ConfigError, match="--vocab-size"):
            bench(server, prompt_format="ids")
        bench(server, count=2, vocab_size=50)
    assert max(max(seen.body["prompt"]) for seen in server.generated[2:]) < 50


def test_the_vocabulary_is_asked_for() -> None:
    with FakeOpenAI(vocab_size=3000) as server:
        bench(server, count=20)
    ids = [token for seen in server.generated for token in seen.body["prompt"]]
    assert (min(ids) >= 100, max(ids) < 2900, max(ids) > 2000) == (True, True, True)


def test_texts_are_counted_by_the_server_or_estimated() -> None:
    async def count(server: FakeOpenAI) -> tuple[int, bool]:
        client = Client(Origin.parse(server.url), {})
        asked = MeasuredServer(client, "fake")
        try:
            return await asked.count("one two three"), asked.estimated
        finally:
            await client.close()

    with FakeOpenAI() as server:
        assert asyncio.run(count(server)) == (3, False)
    with FakeOpenAI(vocab_size=None) as server:
        assert asyncio.run(count(server)) == (4, True)


def test_warm_up_requests_are_others_and_are_not_measured() -> None:
    with FakeOpenAI() as server:
        outcome = bench(server, count=5, warmups=3)
    assert len(outcome.records) == 5
    prompts = [tuple(seen.body["prompt"]) for seen in server.generated]
    assert len(set(prompts)) == 8
    assert [seen.headers["x-request-id"] for seen in server.generated[:3]] == [f"bench-warmup-{index}" for index in range(3)]


def test_missing_usage_and_short_answers_are_noted() -> None:
    with FakeOpenAI(lambda *_: Answer(usage=False, tokens=[1, 1])) as server:
        outcome = bench(server, count=2, fields={"ignore_eos": True})
    assert outcome.notes == [
        "2 answers came without usage: their chunks are counted as tokens",
        "2 answers are shorter than requested, in spite of --ignore-eos",
    ]
    assert outcome.records[0].prompt_tokens == 6


def test_prompts_that_were_cached_are_noted() -> None:
    with FakeOpenAI(lambda *_: Answer(cached=3)) as server:
        outcome = bench(server, count=2)
        assert outcome.notes == ["50% of the input was in the server's prefix cache; another --seed sends other prompts"]
        shared = DatasetOptions(count=2, random_input_len=3, random_output_len=2, random_prefix_len=3)
        assert bench(server, dataset=shared).notes == []


def test_poisson_arrivals_reach_the_server() -> None:
    with FakeOpenAI() as server:
        outcome = bench(server, count=60, shape=LoadShape(request_rate=300.0))
    dues = [record.due for record in outcome.records]
    assert len(server.generated) == 60 and 0.1 < max(dues) - min(dues) < 0.5
    assert all(record.wait >= 0 for record in outcome.records) and outcome.duration >= max(dues) - min(dues)


def test_a_trace_says_when(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(f'{{"timestamp": {at}, "input_length": 3, "output_length": 2}}\n' for at in (0, 0, 150, 300)))
    dataset = DatasetOptions("timed_trace", str(path))
    with FakeOpenAI() as server:
        outcome = bench(server, dataset=dataset)
        dues = sorted(record.due for record in outcome.records)
        assert [round(due - dues[0], 6) for due in dues] == [0.0, 0.0, 0.15, 0.3]
        assert all(record.wait >= 0 for record in outcome.records)
        assert outcome.duration >= 0.3
        fast = bench(server, dataset=dataset, self_timed=False, shape=LoadShape(max_concurrency=4))
        assert len({record.due for record in fast.records}) == 1


def test_interrupting() -> None:
    async def main(server: FakeOpenAI) -> Outcome:
        dataset = DatasetOptions(count=6, random_input_len=2, random_output_len=2)
        task = asyncio.create_task(bench_serve(ServeSettings(Origin.parse(server.url), dataset=dataset, disable_tqdm=True)))
        deadline = time.monotonic() + PATIENCE
        while (len(server.generated) < 6 or server.running > 3) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        task.cancel()
        return await task

    with FakeOpenAI(lambda _, index: Answer(hang_after=1 if index % 2 else None)) as server:
        outcome = asyncio.run(main(server))
    assert outcome.interrupted
    assert len(outcome.records) == 3
    assert outcome.notes[0] == "interrupted: 3 of 6 requests had not ended and are not counted"


def test_settings_that_are_wrong() -> None:
    plain = ServeSettings(Origin.parse("http://h"))
    for wrong, told in (
        ({"warmups": -1}, "num-warmups"),
        ({"endpoint": "v1"}, "slash"),
        ({"kind": "chat", "prompt_format": "ids"}, "messages are text"),
        ({"dataset": DatasetOptions("custom", "x"), "vocab_size": 5}, "random prompts"),
        ({"prompt_format": "text", "vocab_size": 5}, "vocab-size"),
        ({"fields": {"n": 2}}, "one completion"),
        ({"fields": {"stream": False}}, "one completion"),
        ({"dataset": DatasetOptions("timed_trace", "x"), "shape": LoadShape(request_rate=1)}, "no-self-timed"),
    ):
        with pytest.raises(ConfigError, match=told):
            replace(plain, **wrong)
    with FakeOpenAI() as server, pytest.raises(ConfigError, match="data set with times"):
        bench(server, self_timed=True)


def test_https(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run([*make, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with FakeOpenAI(tls=context) as server:
        outcome = bench(server, count=5, insecure=True)
        assert all(record.ok for record in outcome.records)
        with pytest.raises(EngineError, match="certificate verify failed"):
            bench(server)


def test_many_streams_at_once() -> None:
    """More than the usual limit of open files would not be possible; this stays below it, in one process with the server."""
    with FakeOpenAI(lambda *_: Answer(first=0.3, gap=0.02, token_ids=True)) as server:
        outcome = bench(server, count=200, output=5)
    assert server.peak == 200
    assert [record.error for record in outcome.records] == [None] * 200
    assert sum(record.output_tokens for record in outcome.records) == 1000
