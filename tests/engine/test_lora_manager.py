"""LoRAManager in an engine without a model, whose tokens tell which version a row really ran with."""

import importlib.util
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from adapter_files import write_adapter
from patience import PATIENCE
from quire import LoRARequest
from quire.cache.layout import make_layout
from quire.config.features import cache_salt
from quire.engine.core import EngineCore
from quire.engine.executor.fake import FakeExecutor
from quire.engine.executor.fake_model import FakeModel
from quire.features.lora.client import AdapterNames
from quire.features.lora.manager import PASSES
from quire.files.adapter import stamp
from quire.sched.scheduler import Scheduler
from quire.types.adapter import AdapterRef
from quire.types.cache import LayerCache
from quire.types.errors import AdapterChanged, AdapterError, EngineError, InvalidParameter, NotSupported, RequestError
from quire.types.prompts import NO_EXTRAS, Extras
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams

LAYOUT = make_layout([LayerCache(1, 8)], 4, 2)
MODEL = FakeModel.of(LAYOUT)
PAGES, SEATS, LENGTH = 80, 4, 64
PROMPT = (5, 6, 7, 8, 9, 10)


class Engine:
    """A core, the names that requests ask for, and what it said."""

    def __init__(self, folder: Path, slots: int = 1, host: int = 1, depth: int = 1) -> None:
        scheduler = Scheduler(LAYOUT, pages=PAGES, max_model_len=LENGTH, max_batched_tokens=64, max_seqs=SEATS)
        self.executor = FakeExecutor(LAYOUT, MODEL, pages=PAGES, max_seqs=SEATS, max_model_len=LENGTH)
        self.core = EngineCore(scheduler, self.executor, depth, adapters=(slots, host))
        self.core.constraints.on_refused = lambda name, error: self.refused.update({name: error})
        self.folder, self.names = folder, AdapterNames(enabled=True)
        self.refused: dict[str, RequestError] = {}
        self.said: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}
        self.expected: dict[str, list[int]] = {}

    def adapter(self, name: str, content: str | None = None, inplace: bool = False, rank: int = 4) -> Extras:
        if content is not None:
            write_adapter(self.folder / name, content, rank)
        key = sum(map(ord, name))
        lora = self.names.check(LoRARequest(name, key, str(self.folder / name), load_inplace=inplace))
        found = self.names.known(lora)
        if found is None:
            found = self.names.resolve(lora)
            if (gone := self.names.put(found)) is not None:
                self.core.retire_adapter(gone)
        return found.extras

    def add(self, name: str, extras: Extras = NO_EXTRAS, max_tokens: int = 5, priority: int = 0) -> None:
        version = "" if extras.lora is None else extras.lora.version
        self.expected[name] = MODEL.generate(PROMPT, seed=0, max_tokens=max_tokens, adapter=version)
        params = SamplingParams(max_tokens=max_tokens, temperature=0)
        self.core.add(
            EngineRequest(
                name,
                PROMPT,
                params,
                0,
                frozenset(),
                frozenset(),
                0.0,
                salt=cache_salt(extras),
                extras=extras,
                priority=priority,
            )
        )

    def step(self) -> None:
        for delta in self.core.step():
            self.said.setdefault(delta.request_id, []).extend(delta.token_ids)
            if delta.finish_reason is not None:
                self.ended[delta.request_id] = delta.finish_reason

    def run(self, *names: str) -> None:
        """Until these have ended, or nothing is left to do."""
        for _ in range(2000):
            if not self.core.has_unfinished or (names and self.ended.keys() >= set(names)):
                break
            self.step()
        else:
            raise AssertionError("it does not come to an end")

    def check(self) -> None:
        """All that ended has said what its own version says, and nobody holds anything."""
        self.run()
        for name, reason in self.ended.items():
            expected = self.expected[name]
            assert self.said[name] == (expected if reason == "length" else expected[: len(self.said[name])]), name
        self.core.adapters.check()
        self.core.scheduler.roster.check()
        assert all(not kept.holders and not kept.waiting for kept in self.core.adapters._states.values())
        stats = self.core.stats
        assert (stats.running, stats.waiting, stats.free_pages) == (0, 0, stats.pages)
        self.core.stop()

    @property
    def on_device(self) -> list[str]:
        names = {adapter.ref.version: adapter.name for adapter in self.names.all}
        return sorted(names.get(version, "?") for version in self.executor.adapters.values())


@pytest.fixture
def engine(tmp_path):
    return Engine(tmp_path)


@pytest.mark.parametrize("depth", [0, 1])
def test_two_adapters_and_none_in_one_batch(tmp_path, depth):
    engine = Engine(tmp_path, slots=2, host=2, depth=depth)
    for name in ("a", "b"):
        engine.adapter(name, f"content {name}")
    for i in range(2):  # the second time what is cached is found, and nobody finds another's
        engine.add(f"a{i}", engine.adapter("a"))
        engine.add(f"b{i}", engine.adapter("b"))
        engine.add(f"none{i}")
        engine.run()
    assert len({tuple(engine.said[name]) for name in ("a0", "b0", "none0")}) == 3
    assert engine.core.stats.hits == 3 * 4
    assert (engine.core.stats.adapter_reads, engine.core.stats.adapter_puts) == (2, 2)
    engine.check()


def test_who_waits_for_an_adapter_stops_nobody(engine, monkeypatch):
    go, read = threading.Event(), engine.executor.read_adapter
    monkeypatch.setattr(engine.executor, "read_adapter", lambda ref: go.wait(PATIENCE) and read(ref))
    engine.add("cold", engine.adapter("a", "1"))
    engine.add("other", max_tokens=30)
    engine.run("other")
    assert engine.ended == {"other": "length"} and "cold" not in engine.said
    assert engine.core.stats.waiting == 1
    go.set()
    engine.check()
    assert engine.ended["cold"] == "length"


def test_the_longest_unused_goes(tmp_path):
    engine = Engine(tmp_path, slots=2, host=3)
    for name in "abab":
        engine.add(f"{name}{len(engine.ended)}", engine.adapter(name, name))
        engine.run()
    engine.add("a", engine.adapter("a"))
    engine.run()
    engine.add("c", engine.adapter("c", "c"))
    engine.run()
    assert engine.on_device == ["a", "c"]
    engine.add("b", engine.adapter("b"))  # still in memory
    engine.run()
    assert engine.on_device == ["b", "c"]
    assert (engine.core.stats.adapter_reads, engine.core.stats.adapter_puts) == (3, 4)
    engine.add("d", engine.adapter("d", "d"))
    engine.run()
    assert set(engine.core.adapters._in_memory) == {engine.names.find(name).ref.version for name in "bcd"}
    assert set(engine.executor._read) == set(engine.core.adapters._in_memory)
    engine.check()


def test_one_place_for_three_adapters_at_once(engine):
    for name in ("a", "b", "c"):
        engine.adapter(name, name)
    for i in range(9):
        engine.add(f"r{i}", engine.adapter("abc"[i % 3]))
    engine.check()
    assert len(engine.ended) == 9 and engine.core.stats.adapter_puts == 3  # each once, for all that wait for it


def test_an_update_reaches_no_request_that_has_begun(tmp_path):
    engine = Engine(tmp_path, slots=1, host=2)
    old = engine.adapter("a", "1")
    engine.add("old", old, max_tokens=20)
    while "old" not in engine.said:
        engine.step()
    new = engine.adapter("a", "2", inplace=True)
    assert cache_salt(new) != cache_salt(old) and engine.names.find("a").extras == new
    engine.add("new", new)
    engine.run("new")
    assert engine.ended == {"old": "length", "new": "length"}  # in this order: there is one place
    assert list(engine.executor.adapters.values()) == [new.lora.version]
    assert set(engine.executor._read) == {new.lora.version}  # nobody can ask for the old one
    engine.check()


def test_the_same_content_is_the_same_adapter(tmp_path):
    engine = Engine(tmp_path, slots=1, host=1)
    engine.add("a", engine.adapter("a", "same"))
    engine.add("b", engine.adapter("b", "same"))
    engine.run()
    assert engine.core.stats.adapter_puts == 1
    assert engine.names.remove("a") is None  # b is left
    assert engine.names.remove("b") is not None
    engine.check()


@pytest.mark.parametrize("order", ["ab", "ba", "aab"])
def test_the_same_content_is_read_from_wherever_it_is(engine, order):
    for name in "ab":
        engine.adapter(name, "same")
    shutil.rmtree(engine.folder / "a")
    told = []
    for i, name in enumerate(order):
        engine.add(f"{name}{i}", engine.adapter(name))
        engine.core.adapters.load(engine.adapter(name).lora, False, told.append)
    engine.run()
    assert set(engine.ended.values()) == {"length"} and not engine.refused and told == [None] * len(order)
    engine.add("c", engine.adapter("c", "other"))  # there is room for one
    engine.run()
    shutil.rmtree(engine.folder / "b")
    for name in sorted(set(order)):
        engine.add(name, engine.adapter(name))
        engine.core.adapters.load(engine.adapter(name).lora, False, told.append)
    engine.check()
    lost = {name: f"{engine.folder / name}: there is no such directory" for name in sorted(set(order))}
    assert {name: str(error).split(";")[0] for name, error in engine.refused.items()} == lost
    assert [str(error).split(";")[0] for error in told[len(order) :]] == list(lost.values())


def test_unloading_takes_nothing_from_those_who_run(engine):
    extras = engine.adapter("a", "1")
    engine.add("a", extras, max_tokens=20)
    while "a" not in engine.said:
        engine.step()
    engine.core.retire_adapter(engine.names.remove("a"))
    for file in (engine.folder / "a").iterdir():
        file.unlink()
    assert list(engine.executor.adapters.values()) == [extras.lora.version]
    engine.check()
    assert engine.ended == {"a": "length"} and not engine.executor.adapters and not engine.executor._read


def test_files_that_changed_meanwhile_are_not_read(engine):
    extras = engine.adapter("a", "1")
    write_adapter(engine.folder / "a", "2")
    engine.add("a", extras)
    engine.add("none")
    engine.check()
    assert isinstance(engine.refused["a"], AdapterError) and "have changed since" in str(engine.refused["a"])
    assert engine.ended["none"] == "length" and not engine.executor._read


@pytest.mark.parametrize("settled", [-9, 3600], ids=["old", "too new for their times to tell"])
@pytest.mark.parametrize("back", [False, True], ids=["replaced", "replaced and put back"])
def test_files_that_change_between_digest_and_reading_are_nobodys(engine, monkeypatch, settled, back):
    monkeypatch.setattr("quire.files.adapter.STABLE_AGE_S", settled)
    extras, read = engine.adapter("a", "1"), engine.executor.read_adapter

    def write(content, when):
        os.utime(write_adapter(engine.folder / "a", content) / "adapter_config.json", (when, when))

    def late(ref):
        write("2", 2)
        facts = read(ref)
        if back:
            write("1", 3)
        return facts

    monkeypatch.setattr(engine.executor, "read_adapter", late)
    engine.add("a", extras)
    engine.run()
    assert isinstance(engine.refused["a"], AdapterChanged) and not engine.executor._read
    monkeypatch.setattr(engine.executor, "read_adapter", read)
    write("1", 4)
    engine.add("again", extras)
    engine.check()
    assert engine.ended["again"] == "length"


def test_bad_adapters_are_refused_and_nobody_else_notices(engine):
    extras = engine.adapter("a", "1", rank=0)
    for name in ("a", "b"):
        engine.add(name, extras)
    engine.add("good", engine.adapter("c", "1"))
    engine.check()
    assert set(engine.refused) == {"a", "b"} and "r must be" in str(engine.refused["a"])
    assert engine.ended["good"] == "length"


def test_what_cannot_be_put_on_the_device_is_refused(engine, monkeypatch):
    put = engine.executor.put_adapter

    def full(ref, place):
        if ref.path.endswith("large"):
            raise AdapterError("it needs 9 pages, and there are 4")
        if ref.path.endswith("broken"):
            raise EngineError("no")
        put(ref, place)

    monkeypatch.setattr(engine.executor, "put_adapter", full)
    for name in ("small", "large", "broken"):
        engine.add(name, engine.adapter(name, name))
    engine.check()
    assert engine.ended["small"] == "length"
    assert "needs 9 pages" in str(engine.refused["large"]) and "EngineError: no" in str(engine.refused["broken"])


@pytest.mark.parametrize("how", ["abort", "refuse", "fail"])
@pytest.mark.parametrize("when", ["waiting", "running"])
def test_every_end_gives_the_adapter_back(engine, how, when):
    engine.add("a", engine.adapter("a", "1"), max_tokens=20)
    while when == "running" and "a" not in engine.said:
        engine.step()
    if how == "abort":
        engine.core.abort(["a"])
    elif how == "refuse":
        engine.core.constraints.refuse("a", RequestError("its grammar is wrong"))
    else:
        engine.core._queue_deltas(engine.core.scheduler.end("a", "it failed"))
    engine.add("b", engine.adapter("b", "2"))
    engine.check()
    assert engine.ended["b"] == "length"


def test_an_adapter_that_many_ask_for_does_not_keep_others_out(engine):
    popular, rare = engine.adapter("popular", "1"), engine.adapter("rare", "2")
    engine.add("first", popular)
    sent = 0
    while "rare" not in engine.ended:
        engine.add(f"p{sent}", popular)
        sent += 1
        if sent == 5:
            engine.add("rare", rare)
        engine.step()
        assert sent < PASSES * 4
    engine.check()
    assert len(engine.ended) == sent + 2


def test_the_more_important_gets_the_place(tmp_path):
    engine = Engine(tmp_path)
    engine.core.scheduler.roster.order.policy = "priority"
    engine.add("now", engine.adapter("a", "a"))
    engine.run()
    engine.add("holds", engine.adapter("a"), max_tokens=20)
    for name, priority in (("b", 2), ("c", 1)):
        engine.add(name, engine.adapter(name, name), priority=priority)
    engine.check()
    assert list(engine.ended) == ["now", "holds", "c", "b"]


def test_pinned_adapters_stay(tmp_path, caplog):
    engine = Engine(tmp_path, slots=2, host=2)
    told = []
    engine.core.adapters.load(engine.adapter("pinned", "p").lora, True, told.append)
    for name in "abc":
        engine.add(name, engine.adapter(name, name))
        engine.run()
        assert engine.on_device == sorted([name, "pinned"])
    engine.core.adapters.load(engine.adapter("c").lora, True, told.append)
    engine.core.adapters.load(engine.adapter("d", "d").lora, True, told.append)
    assert told[:2] == [None, None] and "all 2 slots have pinned ones" in str(told[2])
    engine.add("none")
    engine.add("c2", engine.adapter("c"))
    engine.add("d", engine.adapter("d"))
    engine.run()
    assert set(engine.refused) == {"d"} and "pinned" in str(engine.refused["d"])
    assert "end: no adapter can be put on the device: all 2 slots have pinned ones" in caplog.text
    engine.core.retire_adapter(engine.names.remove("pinned"))
    engine.add("d2", engine.adapter("d"))
    engine.check()
    assert engine.ended["c2"] == engine.ended["d2"] == "length"


def test_loading_is_told_even_while_all_slots_are_held(engine):
    engine.add("a", engine.adapter("a", "1"), max_tokens=20)
    engine.add("b", engine.adapter("b", "2"))
    while "a" not in engine.said:
        engine.step()
    told = []
    engine.core.adapters.load(engine.adapter("c", "3").lora, False, told.append)
    engine.core.adapters.load(engine.adapter("d", "4", rank=0).lora, False, told.append)
    while len(told) < 2:
        assert "a" not in engine.ended
        engine.core.adapters.turn()
        engine.core.adapters.wait()
    assert None in told and any(isinstance(error, AdapterError) for error in told)
    engine.check()


def test_names(tmp_path):
    names = AdapterNames(enabled=True)
    write_adapter(tmp_path / "a", "1")
    lora = LoRARequest("a", 7, str(tmp_path / "a"))
    assert names.put(names.resolve(names.check(lora))) is None
    assert names.known(lora).ref.key == 7 and names.keys == {7} and names.fresh_key() == 1
    with pytest.raises(InvalidParameter, match="lora_int_id 7 is the adapter 'a'"):
        names.check(LoRARequest("b", 7, str(tmp_path / "a")))
    with pytest.raises(InvalidParameter, match="loaded from another path"):
        names.check(LoRARequest("a", 7, str(tmp_path / "b")))
    with pytest.raises(InvalidParameter, match="must be a LoRARequest"):
        names.check({"lora_name": "a"})
    with pytest.raises(NotSupported, match="enable_lora"):
        AdapterNames(enabled=False).check(lora)
    with pytest.raises(AdapterError, match="no such directory"):
        names.resolve(LoRARequest("b", 8, str(tmp_path / "b")))
    write_adapter(tmp_path / "a", "2")
    assert names.known(lora) is not None  # a name means what was loaded, not what lies there now
    assert names.put(names.resolve(LoRARequest("a", 7, str(tmp_path / "a"), load_inplace=True))) is not None


def test_zipf_traffic_with_loads_unloads_and_updates():
    """benchmarks/adapter_traffic.py is the same at any size."""
    path = Path(__file__).parents[2] / "benchmarks" / "adapter_traffic.py"
    spec = importlib.util.spec_from_file_location("adapter_traffic", path)
    traffic = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(traffic)
    tally = traffic.play(adapters=200, requests=2000, slots=4, host=16)
    assert not tally.wrong
    assert tally.right + tally.aborted + tally.refused == 2000 and tally.right > 1800
    assert tally.updates and tally.unloads and tally.reads > 200


def test_files_are_read_before_their_version_is_known_unless_others_wait(engine):
    begun, go_on, seen = threading.Event(), threading.Event(), list[AdapterRef]()

    def read_ahead(ref):
        seen.append(ref)
        begun.set()
        assert go_on.wait(PATIENCE)
        raise OSError("nobody hears of it")

    engine.executor.read_ahead = read_ahead
    extras = engine.adapter("a", "content")
    engine.core.expect_adapter("first", "stamp")
    assert begun.wait(PATIENCE) and not engine.core.has_unfinished
    engine.core.expect_adapter("second", "stamp")
    engine.add("asked", extras)
    go_on.set()
    engine.check()
    assert engine.ended == {"asked": "length"}
    assert [(ref.version, ref.path, ref.stamp) for ref in seen] == [("", "first", "stamp")]


def test_who_reads_at_the_same_time_is_told_of_files_that_are_not_too_new(engine, tmp_path):
    lora, told = LoRARequest("a", 1, str(write_adapter(tmp_path / "a", "content"))), list[AdapterRef]()
    until = time.monotonic() + PATIENCE
    engine.names.resolve(lora, expect=told.append)  # perhaps
    told.clear()
    while not stamp(lora.lora_path) and time.monotonic() < until:
        time.sleep(0.02)
    found = engine.names.resolve(lora, expect=told.append)
    assert [(ref.version, ref.path, ref.stamp) for ref in told] == [("", found.ref.path, found.ref.stamp)]
