"""Stat loggers of users, and a scheduler class of the user's."""

import asyncio

import pytest

from patience import PATIENCE
from quire import LLM, AsyncLLM, EngineArgs, LLMEngine, SamplingParams
from quire.sched.queue import Order
from quire.sched.scheduler import Scheduler
from quire.stat_loggers import AggregateStatLoggerBase, StatLoggerBase
from quire.types.errors import ConfigError

SMALL = {"device": "cpu", "kv_cache_memory_bytes": 4 << 20, "block_size": 4, "max_num_seqs": 2}
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPTS = [[5, 6, 7, 8, 9], [5, 6, 7, 8, 10], [11, 12]]


class Notes(StatLoggerBase):
    made: "list[Notes]" = []  # noqa: RUF012

    def __init__(self, vllm_config, engine_index=0):
        self.length, self.engine, self.events = vllm_config.model_config.max_model_len, engine_index, []
        self.scheduler, self.iterations = [], []
        type(self).made.append(self)

    def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0):
        assert engine_idx == self.engine
        self.scheduler.append(scheduler_stats)
        if iteration_stats is not None:
            self.iterations.append(iteration_stats)

    def log_engine_initialized(self):
        self.events.append("ready")

    def log(self):
        self.events.append("log")


@pytest.fixture(autouse=True)
def _forget():
    Notes.made.clear()


def check(notes: Notes) -> None:
    finished = [each for one in notes.iterations for each in one.finished_requests]
    assert sorted(each.num_prompt_tokens for each in finished) == [2, 5, 5]
    assert [(each.num_generation_tokens, each.finish_reason, each.max_tokens_param) for each in finished] == [
        (6, "length", 6)
    ] * 3
    assert all(0 < each.inference_time <= each.e2e_latency for each in finished)
    assert sum(one.num_generation_tokens for one in notes.iterations) == 18
    assert sum(one.num_prompt_tokens for one in notes.iterations) == 12
    assert sum(len(one.time_to_first_tokens_iter) for one in notes.iterations) == 3
    assert sum(len(one.inter_token_latencies_iter) for one in notes.iterations) == 15
    assert max(one.num_running_reqs for one in notes.scheduler) == 2
    assert sum(one.prefix_cache_stats.queries for one in notes.scheduler) >= 12
    assert all(0 <= one.kv_cache_usage <= 1 for one in notes.scheduler)


def run(engine: LLMEngine) -> list[str]:
    """Return the requests in the order in which they finish."""
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, PARAMS)
    done = []
    while engine.has_unfinished_requests():
        done += [output.request_id for output in engine.step() if output.finished]
    return done


def test_an_engine_in_this_process(tiny_model):
    engine = LLMEngine.from_engine_args(EngineArgs(str(tiny_model), **SMALL), stat_loggers=[Notes, lambda c, e: Notes(c, e)])
    run(engine)
    engine.do_log_stats()
    engine.shutdown()
    for notes in Notes.made:
        check(notes)
        assert notes.events == ["ready", "log"] and notes.length == engine.max_model_len
    assert len(Notes.made) == 2


def test_an_engine_process_and_a_logger_that_fails(tiny_model, caplog):
    class Breaks(Notes):
        made: "list[Notes]" = []  # noqa: RUF012

        def record(self, *_, **__):
            self.events.append("record")
            raise KeyError("of the logger")

    llm = AsyncLLM.from_engine_args(EngineArgs(str(tiny_model), **SMALL), stat_loggers=[Breaks, Notes])

    async def scene() -> None:
        async def one(number: int) -> None:
            async for _ in llm.generate({"prompt_token_ids": PROMPTS[number]}, PARAMS, str(number)):
                pass

        await llm.wait_ready()
        await asyncio.gather(*[one(number) for number in range(3)])
        await llm.do_log_stats()
        llm.shutdown()

    asyncio.run(asyncio.wait_for(scene(), PATIENCE))
    [notes], [broken] = Notes.made, Breaks.made
    check(notes)
    assert notes.events == ["ready", "log"] and broken.events == ["ready", "record"]
    assert len([record for record in caplog.records if "failed in record" in record.getMessage()]) == 1


def test_one_object_for_several_engines(tiny_model):
    class Together(AggregateStatLoggerBase):
        def __init__(self, vllm_config, engine_indexes):
            self.engines, self.seen = engine_indexes, set()
            made.append(self)

        def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0):
            self.seen.add(engine_idx)

        def log_engine_initialized(self):
            self.seen.add("ready")

    made: list[Together] = []
    args = EngineArgs(str(tiny_model), data_parallel_size=2, distributed_executor_backend="fake", max_num_seqs=2)
    engine = LLMEngine.from_engine_args(args, stat_loggers=[Together, Notes])
    run(engine)
    engine.shutdown()
    assert made[0].engines == [0, 1] and {notes.engine for notes in Notes.made} == {0, 1}
    assert "ready" in made[0].seen and made[0].seen <= {"ready", 0, 1}
    assert sum(one.num_generation_tokens for notes in Notes.made for one in notes.iterations) == 18


@pytest.mark.parametrize(
    "given, message",
    [
        (Notes, "stat_loggers must be a list of factories; got ABCMeta"),
        ([3], "stat_loggers must be classes or functions; got 3"),
        ([lambda config, engine: 5], "made a int without record and log and log_engine_initialized"),
        ([lambda config: None], "cannot be made: TypeError"),
    ],
)
def test_what_is_no_factory(tiny_model, given, message):
    for kind in (LLMEngine, AsyncLLM):
        with pytest.raises(ConfigError, match=message):
            kind.from_engine_args(EngineArgs(str(tiny_model), **SMALL), stat_loggers=given)


# ---- a scheduler of the user's


class ByLength(Order):
    def rank(self, request):
        return (len(request.spec.prompt), request.order)


class ShortestFirst(Scheduler):
    order_class = ByLength


def test_a_scheduler_class(tiny_model):
    orders, outputs = [], []
    for scheduler in (None, ShortestFirst):
        args = {"model": str(tiny_model), **SMALL, "max_num_seqs": 1, "scheduler_cls": scheduler}
        engine = LLMEngine.from_engine_args(EngineArgs(**args))
        orders.append(run(engine))
        engine.shutdown()
        with LLM(**args) as llm:
            prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
            outputs.append([output.outputs[0].token_ids for output in llm.generate(prompts, PARAMS, use_tqdm=False)])
    assert orders == [["0", "1", "2"], ["2", "0", "1"]] and outputs[0] == outputs[1]


@pytest.mark.parametrize(
    "name, message",
    [
        ("nothing", "scheduler_cls must be module:Class; got 'nothing'"),
        ("quire.absent:Scheduler", "scheduler_cls: quire.absent:Scheduler cannot be used: ModuleNotFoundError"),
        (Notes, "it is not a subclass of Scheduler"),
        (7, "scheduler_cls must be a class or module:Class"),
    ],
)
def test_what_is_no_scheduler(tiny_model, name, message):
    with pytest.raises(ConfigError, match=message):
        LLM(str(tiny_model), scheduler_cls=name, **SMALL)
