"""Simulated host memory and disk: times computed by hand, and the pages that the engine itself moves."""

import random
from array import array

import pytest
from sim_support import LAYOUT, PAGE, PerToken, alone, trace

import quire.sim.tiers as simulated
from quire import LLM, SamplingParams
from quire.features.tiers.disk import DiskStore
from quire.sched.scheduler import Scheduler
from quire.sched.speeds import Speeds
from quire.sim.analytic import HostTime
from quire.sim.figures import figures_of
from quire.sim.fleet import Fleet, RoundRobin
from quire.sim.replica import Replica, SimulatedDevice
from quire.sim.tiers import COPY_S, DIGEST_BANDWIDTH, DISK_S, SimulatedStore, SimulatedTiers, TierSizes
from tiny_model import make_model

BYTES = LAYOUT.bytes_per_page
LONG = ((0.0, 40, 1), (100.0, 40, 2), (200.0, 40, 3), (300.0, 40, 1))  # the cache of the device holds one and a half


def replica(pages: int, records: int, disk: int = 0, host: float = BYTES, **more) -> Replica:
    """Return a replica whose link to host memory moves `host` bytes per second. disk: records."""
    scheduler = Scheduler(LAYOUT, pages=pages, max_model_len=200, max_batched_tokens=64, max_seqs=4, records=records, **more)
    sizes = TierSizes(BYTES, host, 1, 2.0 * BYTES, disk * (BYTES + 200))
    if disk:
        scheduler.arrivals.open_disk([(b"", [])])
    device, timing = SimulatedDevice(4, PerToken(HostTime(0.0, 0.0)), ((None, 1.0),)), HostTime(0.0, 0.0)
    return Replica(scheduler, PAGE, device, timing, 0, tiers=SimulatedTiers(sizes))


def run(one: Replica, arrivals: tuple):
    found = Fleet([one], RoundRobin(1)).run(trace(*(alone(at, length, 1, content) for at, length, content in arrivals)))
    one.scheduler.roster.check()
    return found


def test_a_page_comes_back_after_the_time_of_its_copy():
    fetched = replica(15, 40)
    visits = run(fetched, LONG).visits
    assert [visit.cached for visit in visits] == [0, 0, 0, 36]
    copies, step = (9 + 9) * (COPY_S + 1.0), 1.0 + 0.1 * 4  # with those that are evicted for them
    assert visits[3].ttft == pytest.approx(copies + step, abs=0.002)  # it is noticed at the engine's next look
    figures = figures_of(Fleet([fetched], RoundRobin(1)).run(trace(alone(0.0, 5, 1, 9)))).tiers
    assert figures is not None
    assert (figures.fetched, figures.written, figures.disk_hits) == (9 * BYTES, 0, 0)
    assert fetched.scheduler.stats.tier.hits == 36


@pytest.mark.parametrize(("buffers", "copied"), [(1, 32), (2, 16), (3, 0)])
def test_rows_wait_while_all_buffers_are_full_of_stored_pages(monkeypatch: pytest.MonkeyPatch, buffers: int, copied: int):
    """The second prompt evicts 38 pages: two buffers of 16 pages, and a part of a third one."""
    monkeypatch.setattr(simulated, "STAGED_BYTES", 16 * BYTES)
    whole = Scheduler(LAYOUT, pages=42, max_model_len=200, max_batched_tokens=200, max_seqs=4, records=99)
    device = SimulatedDevice(4, PerToken(HostTime(0.0, 0.0)), ((None, 1.0),))
    tiers = SimulatedTiers(TierSizes(BYTES, BYTES, buffers=buffers))
    one = Replica(whole, PAGE, device, HostTime(0.0, 0.0), 0, tiers=tiers)
    ttft = run(one, ((0.0, 160, 1), (1000.0, 160, 2))).visits[1].ttft
    assert ttft == pytest.approx(copied * (COPY_S + 1.0) + 1.0 + 16.0, abs=0.001)


def test_pages_that_only_the_disk_has_are_read_and_then_fetched():
    one = replica(15, 12, disk=100, preemption_mode="auto")
    run_of = run(one, LONG)
    visit, tier = run_of.visits[3], one.scheduler.stats.tier
    figures = figures_of(run_of).tiers
    assert figures is not None and figures.has_disk
    assert figures.device_hits + figures.host_hits + figures.disk_hits == sum(each.cached for each in run_of.visits)
    # host memory has two pages of it, and half of its 12 records are read into
    assert (figures.device_hits, figures.host_hits, figures.disk_hits) == (0, 8, 24) and visit.cached == 32
    assert figures.read == tier.read * BYTES > 0
    each = DISK_S + 0.5 + BYTES / DIGEST_BANDWIDTH
    assert visit.ttft > tier.read * each + tier.fetched * 1.0


def test_a_disk_that_is_slower_than_computing_is_not_waited_for():
    speeds = Speeds()
    speeds.computed(1000, 1.0)
    speeds.fetched(10, 1.0)
    assert speeds.pays(10, 1001) and not speeds.pays(10, 999)
    one = replica(15, 12, disk=100)
    tier = one.scheduler.arrivals
    assert tier is not None and tier.disk is not None
    tier.disk.speeds.fetched(1, 100.0)
    tier.disk.speeds.computed(1000, 1.0)
    visits = run(one, LONG).visits
    assert tier.disk.read == 0 and visits[3].ttft < 10.0


def test_the_names_of_a_simulated_disk_are_those_of_a_real_one(tmp_path):
    rng, content = random.Random(3), memoryview(bytes(1000))
    real, simulated = DiskStore(tmp_path, "x", 60_000), SimulatedStore(60_000, 1000)
    for _ in range(600):
        name = bytes([rng.randrange(120)]) * 32
        match rng.choice(("put", "put", "put", "get", "remove")):
            case "put":
                done, removed = real.put(name, bytes(16), content)
                again, gone = simulated.put(name)
                assert (done, sorted(removed)) == (again, sorted(gone))
            case "get":
                assert (real.get(name, memoryview(bytearray(1000))) is not None) == simulated.get(name)
            case "remove":
                real.remove(name)
                simulated.remove(name)
        assert sorted(real.names) == sorted(simulated.names)
    real.close()


def test_the_engine_moves_the_same_pages(tmp_path, monkeypatch):
    """Prompts one after the other, through `LLM` and through the simulation."""
    monkeypatch.setattr(Speeds, "pays", lambda *_: True)
    prompts = [[3 + i % 4 * 9 + j % 7 for j in range(50 + i % 3)] for i in range(16)]
    llm = LLM(
        str(make_model(tmp_path)), device="cpu", num_gpu_blocks_override=30, max_model_len=100, block_size=4, max_num_seqs=4,
        max_num_batched_tokens=64, kv_offloading_size=0.01, seed=0,
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    found = [llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0].num_cached_tokens for prompt in prompts]
    real = llm.llm_engine.core.stats.tier
    llm.llm_engine.shutdown()
    one = replica(30, real.records)
    blocks = [tuple((token, 1) for token in prompt) for prompt in prompts]
    visits = Fleet([one], RoundRobin(1)).run(trace(*((100.0 * i, block, 1) for i, block in enumerate(blocks)))).visits
    tier = one.scheduler.stats.tier
    assert [visit.cached for visit in visits] == found and array("i", found).count(0) < len(found)
    names = ("stored", "fetched", "queries", "hits", "used", "skipped")
    assert [getattr(tier, name) for name in names] == [getattr(real, name) for name in names]
    assert real.fetched > 0
