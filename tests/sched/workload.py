"""Random workloads for scheduler, cache and engine core on the fake executor, and the run that holds them to the oracle."""

from collections import defaultdict
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np
from hypothesis import strategies as st

from quire.cache.layout import make_layout, pages_for
from quire.cache.policies import policy_maker
from quire.engine.assemble import open_disk_tier
from quire.engine.core import EngineCore
from quire.engine.executor.fake import FakeExecutor, Faults, Guess
from quire.engine.executor.fake_media import media_flavours
from quire.engine.executor.fake_model import FakeModel
from quire.sched.budget import StepBudget
from quire.sched.draft.speculation import Speculation
from quire.sched.encoding import Encoding
from quire.sched.scheduler import Scheduler
from quire.types.cache import EVICTION_POLICIES, CacheLayout, LayerCache
from quire.types.errors import EngineError
from quire.types.media import Bidirectional, MediaItem
from quire.types.outputs import TokenDelta
from quire.types.plan import Admission
from quire.types.pooling import Pooling, PoolingType
from quire.types.prompts import Extras
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams

VOCABULARY, EOS = 5, 4
STEMS = ((0, 1, 2, 3, 0, 1, 2, 3, 3, 2, 1, 0), (0, 1, 2, 3, 0, 1, 1, 1, 1, 1, 1, 1), (2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2))
LAYOUTS = ((None,), (3,), (None, 4), (None, 1), (2, 7), (None, 3, 6))  # the window of each layer
MAX_MODEL_LEN = 30
# tokens of images and videos, which parts of them are embedded, and the grid
SHAPES = (
    ((3, 3, 3, 3), (), None),
    ((3,), (), None),
    ((1, 3, 3, 3, 2), ((1, 3),), None),
    ((1, 3, 3, 2, 0, 3, 3, 2), ((1, 2), (5, 2)), None),
    ((1, 3, 3, 3, 3, 2), ((1, 4),), (4, 1, 1)),
    ((1, 3, 3, 3, 3, 2), ((1, 4),), (1, 2, 2)),
)


class StrictExecutor(FakeExecutor):
    """Refuses a step in which a row reads what a row of one token writes."""

    def _check_rows(self, plan, slots, end, count):
        super()._check_rows(plan, slots, end, count)
        last = (end - 1) // self.size
        for tables, window in zip(self.tables[:, slots], self.model.windows, strict=True):
            first = 0 * end if window is None else np.maximum(end - count + 1 - window, 0) // self.size
            index = np.arange(tables.shape[1])
            seen = np.where((first[:, None] <= index) & (index <= last[:, None]), tables, 0)  # [rows, page index]
            written = tables[np.arange(len(slots)), last][count == 1]
            if any((seen == page).sum() > 1 for page in written.tolist()):
                raise EngineError("a row reads what a row of one token writes in the same step")


def layout_of(windows: tuple[int | None, ...], page_size: int) -> CacheLayout:
    return make_layout([LayerCache(1, 8, window) for window in windows], page_size, 2)


@dataclass(frozen=True)
class Visit:
    """One request and what happens to it, in turns of the loop."""

    spec: EngineRequest
    arrives: int
    aborted: int | None
    released: int | None


@dataclass(frozen=True)
class Encoder:
    """What images and videos are run with."""

    capacity: int = 0
    step: int = 0
    undivided: Bidirectional = ""


@dataclass(frozen=True)
class HostRecords:
    """The host tier of a workload. 0: every record is right, or every page arrives at once."""

    count: int = 0
    broken: int = 0  # every n-th record does not come back
    late: int = 0  # every n-th question finds no page that has arrived
    policy: str = "lru"
    disk: int = 0  # every n-th page on disk does not come back; 0: there is no disk
    per_snapshot: int = 1  # records


@dataclass(frozen=True)
class Workload:
    layout: CacheLayout
    depth: int
    pages: int
    max_seqs: int
    budget: int
    follows: StepBudget | None
    chunk_cap: int | None
    chunked: bool
    prefix_caching: bool
    policy: str
    model: FakeModel
    visits: tuple[Visit, ...]
    faults: Faults
    snapshots: int | None = field(default=None, kw_only=True)  # of recurrent states
    turns: bool = field(default=False, kw_only=True)  # those who run take turns
    encoder: Encoder = field(default=Encoder(), kw_only=True)
    host_records: HostRecords = field(default=HostRecords(), kw_only=True)
    drafts: int
    wrong: int  # every n-th draft is; 1 = all
    host: bool  # who drafts

    def answer(self, spec: EngineRequest) -> list[int]:
        return whole_answer(self.model, spec, self.encoder.undivided)

    def guesser(self) -> Guess:
        """Knows the answers, and is wrong now and then."""
        answers = {
            (spec.prompt, spec.seed, spec.params.min_tokens): self.answer(spec) for spec in (v.spec for v in self.visits)
        }

        def guess(tenant: Admission, position: int) -> list[int]:
            prompt = tuple(tenant.tokens[: tenant.prompt_length].tolist())
            answer = [*prompt, *answers[prompt, tenant.seed, tenant.params.min_tokens], 0, 1, 2, 3]
            right = enumerate(answer[position : position + self.drafts], position)
            return [(token + (place % self.wrong == 0)) % VOCABULARY for place, token in right]

        return guess


class Oracle:
    """Knows the answers of a workload, on the host, and is wrong now and then."""

    def __init__(self, work: Workload) -> None:
        self._work = work
        self._texts = [[*visit.spec.prompt, *work.answer(visit.spec)] for visit in work.visits]

    def propose(self, text, most):
        known = text.tokens.tolist()
        right = next((each for each in self._texts if each[: len(known)] == known), [*known, 0, 1, 2])
        following = enumerate(right[len(known) : len(known) + most], len(known))
        return [(token + (place % self._work.wrong == 0)) % VOCABULARY for place, token in following]

    def finished(self, text) -> None: ...


def whole_answer(model: FakeModel, spec: EngineRequest, undivided: Bidirectional) -> list[int]:
    if not spec.samples:
        return []
    most = min(spec.params.max_tokens, MAX_MODEL_LEN - len(spec.prompt))
    return model.generate(
        spec.prompt, seed=spec.seed, max_tokens=most, stop_ids=spec.stop_ids, min_tokens=spec.params.min_tokens,
        added=media_flavours(spec.extras.media, spec.prompt, undivided),
    )  # fmt: skip


@dataclass
class Heard:
    tokens: list[int] = field(default_factory=list)
    last: TokenDelta | None = None
    scores: list[int] = field(default_factory=list)
    pooled: list[int] = field(default_factory=list)  # positions


@st.composite
def illustrated(draw, prompt: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[MediaItem, ...]]:
    """The prompt with images and videos in it."""
    found, items, end = (), [], 0
    for at in sorted(draw(st.lists(st.sampled_from((0, 1, 2, 5, 8)), max_size=3))):
        number = draw(st.integers(0, len(SHAPES) - 1))
        tokens, embedded, grid = SHAPES[number]
        found += prompt[end:at]
        end = max(end, at)
        digest = f"{number}{draw(st.sampled_from('aaab'))}"
        items.append(MediaItem("image", len(found), len(tokens), digest, (), embedded, grid))
        found += tokens
    found += prompt[end:]
    if len(found) > MAX_MODEL_LEN - 8:
        return prompt, ()
    return (*found, 1), tuple(items)


@st.composite
def requests(draw, model: FakeModel, earlier: list[EngineRequest], encoder: Encoder) -> EngineRequest:
    prompt = draw(st.sampled_from(STEMS))[: draw(st.sampled_from((12, 12, 11, 10, 8, 5, 2, 1)))]
    items: tuple[MediaItem, ...] = ()
    if encoder.capacity and draw(st.sampled_from((False, True, True))):
        prompt, items = draw(illustrated(prompt))
    salt = draw(st.sampled_from(((), (), (), ("adapter",))))
    fork_of = None
    if earlier and draw(st.booleans()):
        parent = draw(st.sampled_from(earlier))
        items = parent.extras.media
        added = media_flavours(items, parent.prompt, encoder.undivided)
        answer = model.generate(parent.prompt, seed=parent.seed, max_tokens=4, added=added)
        prompt = (parent.prompt + tuple(answer))[: len(parent.prompt) + draw(st.integers(-1, 4))] or parent.prompt
        fork_of = parent.id
        salt = draw(st.sampled_from((parent.salt, parent.salt, parent.salt, salt)))
    prompt = (prompt + (draw(st.integers(0, 3)),) * draw(st.integers(0, 2)))[: MAX_MODEL_LEN - 4]
    items = items if not items or items[-1].end <= len(prompt) else ()
    max_tokens = draw(st.integers(1, 10))
    spec = EngineRequest(
        id=f"r{len(earlier)}",
        prompt=prompt,
        params=SamplingParams(
            max_tokens=max_tokens,
            min_tokens=draw(st.sampled_from((0, 0, min(2, max_tokens)))),
            logprobs=draw(st.sampled_from((None, None, 2))),
            prompt_logprobs=draw(st.sampled_from((None, None, None, None, None, 1))),
        ),
        seed=draw(st.integers(0, 3)),
        stop_ids=frozenset({EOS}),
        eos_ids=frozenset({EOS}),
        arrival=0.0,
        priority=draw(st.integers(0, 2)),
        tenant=draw(st.sampled_from(("", "", "", "a", "b"))),
        salt=salt,
        fork_of=fork_of,
        hold=draw(st.booleans()),
        extras=Extras(media=items),
    )
    if draw(st.sampled_from((False, False, False, True))):
        return pooled(spec, draw(st.sampled_from(("LAST", "MEAN", "ALL"))))
    return (
        draw(resumptions(spec, whole_answer(model, spec, encoder.undivided)))
        if draw(st.sampled_from((False, False, False, True)))
        else spec
    )


def pooled(spec: EngineRequest, how: PoolingType) -> EngineRequest:
    params = SamplingParams(max_tokens=1, skip_reading_prefix_cache=how != "LAST")
    return replace(spec, params=params, extras=Extras(pooling=Pooling("embed", how)))


@st.composite
def resumptions(draw, spec: EngineRequest, answer: list[int]) -> EngineRequest:
    """The request after an engine was lost that had told some of its tokens, or only some scores of its prompt."""
    told = draw(st.integers(0, len(answer) - 1))
    scores = len(spec.prompt) - 1
    if spec.params.prompt_logprobs is None:
        scores = 0
    elif not told:
        scores = draw(st.integers(0, scores))
    return replace(spec, resumed=tuple(answer[:told]), scored=scores)


@st.composite
def step_budgets(draw, most: int) -> StepBudget:
    """Steps that are longer where more pages are in use and more tokens wait."""
    least = draw(st.integers(1, most))
    return StepBudget(most, least, draw(st.integers(least, most)), 1, draw(st.sampled_from((0.0, 0.3, 1.0))))


@st.composite
def workloads(draw, faulty: bool = False, media: bool = False) -> Workload:
    layout = layout_of(draw(st.sampled_from(LAYOUTS)), draw(st.integers(1, 4)))
    model = FakeModel.of(layout, vocab_size=VOCABULARY, eos_id=EOS, eos_probability=0.04)
    encoder = Encoder(1, 1, draw(st.sampled_from(("", "", "item", "prompt")))) if media else Encoder()
    specs: list[EngineRequest] = []
    visits: list[Visit] = []
    for _ in range(draw(st.integers(2, 8))):
        spec = draw(requests(model, specs, encoder))
        specs.append(spec)
        arrives = draw(st.sampled_from((0, 0, 0, 1, 2, 3, 6, 9)))
        if spec.fork_of is not None:
            arrives = min(12, visits[int(spec.fork_of[1:])].arrives + draw(st.sampled_from((0, 0, 1, 2, 5))))
        patience = draw(st.sampled_from((None,) * 12 + (0, 1, 2, 4)))
        aborted = None if patience is None else arrives + patience
        visits.append(Visit(spec, arrives, aborted, draw(st.sampled_from((None, arrives + 6, arrives + 12)))))
    chunked = draw(st.sampled_from((True, True, False)))
    longest = max(len(spec.prompt) + spec.params.max_tokens - 1 for spec in specs)
    budget = draw(st.integers(1, 16)) if chunked else max(longest, draw(st.integers(1, 24)))
    chunk_cap = draw(st.sampled_from((None, None, 1, 3, 6))) if chunked else None
    if media:
        encoder = draw(encoders(specs, encoder.undivided, chunked))
    if encoder.undivided:
        budget = max(budget, *(len(spec.prompt) if encoder.undivided == "prompt" else 4 for spec in specs))
    needed = pages_for(layout, longest, budget if encoder.undivided else min(budget, chunk_cap or budget))
    max_seqs = draw(st.integers(1, 5))
    steps = st.frozensets(st.integers(0, 12), max_size=2)
    faults = Faults()
    if faulty:
        rows = st.frozensets(st.tuples(st.integers(0, 12), st.integers(0, max_seqs - 1)), max_size=3)
        faults = Faults(draw(rows), draw(steps), draw(steps))
    return Workload(
        layout=layout,
        depth=draw(st.integers(0, 2)),
        pages=needed + draw(st.sampled_from((0, 0, 1, 2, 3, 5, 8, 30, 60))),
        max_seqs=max_seqs,
        budget=budget,
        follows=draw(step_budgets(budget)) if chunked and draw(st.booleans()) else None,
        chunk_cap=chunk_cap,
        chunked=chunked,
        prefix_caching=draw(st.sampled_from((True, True, False))),
        policy=draw(st.sampled_from(("fcfs", "priority"))),
        model=model,
        visits=tuple(visits),
        faults=faults,
        drafts=draw(st.sampled_from((0, 0, 1, 2, 3))),
        wrong=draw(st.sampled_from((1, 2, 3, 5, 100))),
        host=draw(st.booleans()),
        turns=draw(st.booleans()),
        encoder=encoder,
        host_records=draw(host_tiers()),
    )


@st.composite
def host_tiers(draw) -> HostRecords:
    return HostRecords(
        draw(st.sampled_from((0, 1, 2, 5, 12, 60))), draw(st.sampled_from((0, 0, 1, 2, 5))),
        draw(st.sampled_from((0, 0, 2, 3))), draw(st.sampled_from(EVICTION_POLICIES)), draw(st.sampled_from((0, 2, 5, 300))),
        draw(st.sampled_from((1, 2, 3))),
    )  # fmt: skip


@st.composite
def encoders(draw, specs: list[EngineRequest], undivided: Bidirectional, chunked: bool) -> Encoder:
    """An encoder that can just run these requests, or has some more room."""
    least = 1
    for spec in specs:
        sizes = {item.digest: item.embeddings for item in spec.extras.media}.values()
        least = max(least, sum(sizes) if undivided == "prompt" or not chunked else max(sizes, default=0))
    capacity = least + draw(st.sampled_from((0, 0, 1, 3, 8, 40)))
    return Encoder(capacity, draw(st.sampled_from((1, 2, 4, 8, 40))), undivided)


def run(work: Workload) -> dict[str, Heard]:
    """Plays the workload to the end, checking the books after every turn and the silence after every last word."""
    encoder = work.encoder
    encoding = Encoding(encoder.capacity, encoder.step, encoder.undivided, max_tokens=work.budget, chunked=work.chunked)
    scheduler = Scheduler(
        work.layout, pages=work.pages, max_model_len=MAX_MODEL_LEN, max_batched_tokens=work.budget, max_seqs=work.max_seqs,
        chunk_cap=work.chunk_cap, chunked=work.chunked, prefix_caching=work.prefix_caching, policy=work.policy,
        budget=work.follows, drafts=0 if work.host else work.drafts,
        snapshots=work.snapshots, turns=work.depth + 1 if work.turns else 1,
        speculation=Speculation(Oracle(work), work.drafts, adaptive=False) if work.host and work.drafts else None,
        encoding=encoding, records=work.host_records.count, evictable=policy_maker(work.host_records.policy, 2.0),
        snapshot_records=work.host_records.per_snapshot,
    )  # fmt: skip
    executor = StrictExecutor(
        work.layout, work.model, pages=work.pages, max_seqs=work.max_seqs, max_model_len=MAX_MODEL_LEN, faults=work.faults,
        recurrent=work.snapshots is not None, embeddings=encoder.capacity, undivided=encoder.undivided,
        guess=work.guesser() if work.drafts and not work.host else None,
    )  # fmt: skip
    if work.host_records.broken:
        executor.tier.is_broken = lambda record: record % work.host_records.broken == 0
    if work.host_records.late:
        asked = count()
        executor.tier.is_late = lambda _: next(asked) % work.host_records.late == 0
    if work.host_records.disk:
        executor.tier.disk = {}
        executor.tier.is_lost = lambda name: name[0] % work.host_records.disk == 0
    core = EngineCore(scheduler, executor, work.depth, clock=lambda: 1.0)
    open_disk_tier(core)
    heard: dict[str, Heard] = defaultdict(Heard)
    patience = 60 + 4 * sum(len(v.spec.prompt) + v.spec.params.max_tokens for v in work.visits) * len(work.visits)
    for turn in range(patience):
        for visit in work.visits:
            if visit.arrives == turn:
                core.add(visit.spec)
            if visit.aborted == turn:
                core.abort([visit.spec.id])
            if visit.released == turn:
                core.release([visit.spec.id])
        for delta in core.step():
            listen(heard[delta.request_id], delta)
        scheduler.roster.check()
        check_windows(scheduler, work.layout)
        check_encoder(encoding, executor)
        if turn > 24 and not core.has_unfinished:
            break
    assert not core.has_unfinished, "somebody starves"
    core.step()
    core.release([visit.spec.id for visit in work.visits])
    scheduler.roster.check()
    stats = scheduler.stats
    assert (stats.running, stats.waiting, stats.free_pages) == (0, 0, work.pages)
    if not work.faults.submit:
        assert stats.encoder.encoded == len(executor.encoder.encoded)
    assert core.reset_prefix_cache()
    scheduler.roster.check()
    return heard


def check_windows(scheduler: Scheduler, layout: CacheLayout) -> None:
    """Whatever becomes of drafts in flight, the next row finds all that it sees."""
    for request in scheduler._running:
        for table, group in zip(request.pages, layout.groups, strict=True):
            first = 0 if group.window is None else max(0, request.settled - group.window) // layout.page_size
            assert 0 not in table[first:], f"{request.spec.id} misses pages"


def check_encoder(encoding: Encoding, executor: FakeExecutor) -> None:
    """Both sides know the same embeddings, but for what the next plan forgets."""
    encoding.check()
    assert set(executor.encoder.cached) - set(encoding._stale) == set(encoding._cached)


def listen(heard: Heard, delta: TokenDelta) -> None:
    assert heard.last is None, f"{delta} came after the last word"
    assert [int(top.ids[0, 0]) for top in delta.logprobs] in ([], delta.token_ids)
    assert (delta.error is not None) == (delta.finish_reason == "error")
    heard.tokens += delta.token_ids
    for top in delta.prompt_logprobs:
        heard.scores += top.ids[:, 0].tolist()
    if delta.pooled is not None:
        assert delta.finish_reason == "stop" and not delta.token_ids, "it comes with the end"
        heard.pooled += delta.pooled[:, 0].tolist()
    if delta.finish_reason is not None:
        heard.last = delta
