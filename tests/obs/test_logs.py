import asyncio
import logging

import pytest

from patience import PATIENCE
from quire.obs.logs import OneLine, RequestLog, StatsLog, log_interval, log_periodically, set_http_levels, set_up_logging
from quire.types.errors import ConfigError
from quire.types.outputs import RequestMetrics
from quire.types.sampling import SamplingParams
from quire.types.stats import Arrived, DraftCounts, Finished, OutputNews, Stats


@pytest.fixture(autouse=True)
def loggers_as_they_were():
    names = ("quire", "uvicorn", "uvicorn.error", "uvicorn.access")
    kept = {name: dict(vars(logging.getLogger(name))) for name in names}
    yield
    for name, state in kept.items():
        logger = logging.getLogger(name)
        for key in ("handlers", "filters", "propagate", "disabled"):
            setattr(logger, key, state[key])
        logger.setLevel(state["level"])


def record(message: str, *args: object) -> logging.LogRecord:
    return logging.LogRecord("quire.x", logging.INFO, "x.py", 1, message, args, None)


def test_a_message_is_one_line() -> None:
    line = OneLine().format(record("from %s", "a\nERROR forged\r\x1b[31m\u2028é"))
    assert line.endswith("INFO [quire.x] from a\\nERROR forged\\r\\x1b[31m\\u2028é")
    assert line[4] == "-" and line[19] == "."


def test_both_loggers_have_the_same_form(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_LOGGING_LEVEL", "warning")
    set_up_logging()
    set_http_levels("info", access=True, quiet_paths=("/health",))
    logging.getLogger("quire.a").info("not this")
    logging.getLogger("quire.a").warning("this")
    logging.getLogger("uvicorn.error").info("Started server process")
    logging.getLogger("uvicorn.error").error("bad thing")
    access = '%s - "%s %s HTTP/%s" %d'
    logging.getLogger("uvicorn.access").info(access, "1.2.3.4:5", "GET", "/health?x", "1.1", 200)
    logging.getLogger("uvicorn.access").info(access, "1.2.3.4:5", "GET", "/v1/models", "1.1", 200)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == [
        "WARNING [quire.a] this",
        "ERROR [uvicorn.error] bad thing",
        'INFO [uvicorn.access] 1.2.3.4:5 - "GET /v1/models HTTP/1.1" 200',
    ]
    set_http_levels("info", access=False)
    logging.getLogger("uvicorn.access").info(access, "1.2.3.4:5", "GET", "/v1/models", "1.1", 200)
    assert capsys.readouterr().err == ""


def test_wrong_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "loud")
    with pytest.raises(ConfigError, match="VLLM_LOGGING_LEVEL must be one of DEBUG"):
        set_up_logging()
    assert log_interval() == 10
    for text in ("0", "x", "nan", "inf", "-1"):
        monkeypatch.setenv("VLLM_LOG_STATS_INTERVAL", text)
        with pytest.raises(ConfigError, match="VLLM_LOG_STATS_INTERVAL"):
            log_interval()
    monkeypatch.setenv("QUIRE_LOG_STATS_INTERVAL", "2.5")
    assert log_interval() == 2.5


def test_the_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "quire")
    log = StatsLog(100.0)
    log.on_step(Stats(3, 2, 10, 4, 0, 0, preemptions=2), 5, 0.0)
    log.on_outputs(OutputNews(0.0, tokens=40, prompts=[(100, 25), (100, 0)]))
    log.log(110.0)
    log.on_step(Stats(0, 0, 10, 10, 0, 0, preemptions=2), 5, 0.0)
    log.log(120.0)
    log.log(130.0)
    first, second, third = caplog.records
    assert first.getMessage() == (
        "Engine 000: Avg prompt throughput: 20.0 tokens/s, Avg generation throughput: 4.0 tokens/s, Running: 3 reqs, "
        "Waiting: 2 reqs, Preemptions: 2, GPU KV cache usage: 60.0%, Prefix cache hit rate: 12.5%"
    )
    assert "Avg generation throughput: 0.0 tokens/s, Running: 0 reqs, Waiting: 0 reqs, GPU KV" in second.getMessage()
    assert [r.levelname for r in (first, second, third)] == ["INFO", "INFO", "DEBUG"]


def test_a_cpu_has_no_gpu_cache(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "quire")
    StatsLog(0.0, "cpu").log(10.0)
    assert "reqs, KV cache usage: 0.0%" in caplog.text


def test_the_line_comes_again_and_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "quire")

    async def some_time() -> None:
        task = asyncio.create_task(log_periodically(StatsLog(0.0), 0.01))
        while len(caplog.records) < 3:
            await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(asyncio.wait_for(some_time(), PATIENCE))


def test_the_hit_rate_is_of_recent_requests() -> None:
    log = StatsLog(0.0)
    log.on_outputs(OutputNews(0.0, prompts=[(10, 0)] * 1000))
    log.on_outputs(OutputNews(0.0, prompts=[(10, 10)] * 500))
    assert log._hit_rate() == 0.5


def test_requests(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "quire")
    times = RequestMetrics(0.0, queued_ts=1.0, finished_ts=2.5)
    arrived = Arrived("r1", "a long prompt", (1, 2, 3), SamplingParams(max_tokens=7))
    done = Finished("r1", 3, 0, arrived.params, times, ("stop", "length"), (4, 7), ("one answer", "two\nanswers"))
    log = RequestLog(outputs=False, most=None)
    log.on_arrival(arrived)
    log.on_outputs(OutputNews(0.0, finished=[done]))
    lines = [r.getMessage() for r in caplog.records]
    assert lines[0].startswith("Received request r1: params: SamplingParams(")
    assert "max_tokens=7" in lines[0]
    assert lines[1:] == [
        "Finished request r1 choice 0: stop, 4 tokens in 1.500 s.",
        "Finished request r1 choice 1: length, 7 tokens in 1.500 s.",
    ]
    assert "long prompt" not in caplog.text
    caplog.clear()
    caplog.set_level(logging.DEBUG, "quire")
    log = RequestLog(outputs=True, most=2)
    log.on_arrival(arrived)
    log.on_outputs(OutputNews(0.0, finished=[done]))
    assert "prompt: 'a ', prompt_token_ids: [1, 2]." in caplog.text
    assert "Generated response r1 choice 1: output: 'tw'." in caplog.text


def test_drafts_have_a_line_of_their_own(caplog: pytest.LogCaptureFixture) -> None:
    """Also when rows become longer, and when another engine counts from zero."""
    caplog.set_level(logging.INFO, "quire")
    log = StatsLog(100.0)
    for number, drafts in enumerate(
        (DraftCounts(10, 20, 15, (10, 5)), DraftCounts(14, 40, 23, (14, 7, 2)), DraftCounts(2, 4, 0, (0,)))
    ):
        log.on_step(Stats(1, 0, 10, 4, 0, 0, 0, drafts=drafts), 5, 0.0)
        log.log(110.0 + 10 * number)
        log.log(110.0 + 10 * number)
    told = [record.getMessage() for record in caplog.records if "SpecDecoding" in record.getMessage()]
    assert len(told) == 3
    assert (
        "Engine 000: SpecDecoding metrics: Mean acceptance length: 2.50" in told[0]
        and "Per-position acceptance rate: 1.000, 0.500," in told[0]
    )
    assert (
        "Mean acceptance length: 3.00" in told[1] and "rate: 1.000, 0.500, 0.500, Avg Draft acceptance rate: 40.0%" in told[1]
    )
    assert "Mean acceptance length: 1.00" in told[2] and "Drafted: 4 tokens" in told[2]


def test_drafts_are_told_by_one_process(caplog: pytest.LogCaptureFixture) -> None:
    """All API processes know what an engine has counted."""
    caplog.set_level(logging.INFO, "quire")
    for log in (StatsLog(0.0, engine=1, of="API process 1, "), StatsLog(0.0, engine=1, of="API process 2, ", drafts=False)):
        log.on_step(Stats(1, 0, 10, 4, 0, 0, 0, drafts=DraftCounts(10, 20, 15, (10, 5)), engine=1), 5, 0.0)
        log.log(10.0)
    told = [record.getMessage().partition(": ")[0] for record in caplog.records]
    assert told == ["API process 1, Engine 001", "Engine 001", "API process 2, Engine 001"]
