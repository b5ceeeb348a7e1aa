"""A scheduler on the fake executor with small numbers, and requests in one line: for tests of single rules."""

from collections import defaultdict

from workload import StrictExecutor, check_encoder, layout_of

from quire.engine.core import EngineCore
from quire.engine.executor.fake import Faults
from quire.engine.executor.fake_media import media_flavours
from quire.engine.executor.fake_model import FakeModel
from quire.sched.draft.speculation import Speculation
from quire.sched.encoding import Encoding
from quire.sched.scheduler import Scheduler
from quire.types.outputs import TokenDelta
from quire.types.plan import Admission, StepPlan
from quire.types.prompts import Extras
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams

SIZE = 4


class Desk:
    """Turns the loop by hand and keeps every plan."""

    def __init__(
        self,
        windows=(None,),
        *,
        pages=20,
        max_seqs=4,
        budget=64,
        depth=0,
        faults=None,
        max_model_len=60,
        budget_rule=None,
        drafts=0,
        wrong=3,
        host=False,
        adaptive=False,
        clock=lambda: 7.0,
        encoder=(0, 0),
        undivided="",
        **more,
    ):
        """Every `wrong`th draft is. `host`: drafts come with the plans. `encoder`: embeddings of its cache, and of a step."""
        layout = self.layout = layout_of(windows, SIZE)
        self.model = FakeModel.of(layout, vocab_size=50)
        numbers = {"pages": pages, "max_seqs": max_seqs, "max_model_len": max_model_len}
        self.speculation = Speculation(self, drafts, adaptive=adaptive) if host else None
        self.undivided = undivided
        self.encoding = Encoding(*encoder, undivided, max_tokens=budget, chunked=more.get("chunked", True))
        self.scheduler = Scheduler(
            layout, max_batched_tokens=budget, budget=budget_rule, drafts=0 if host else drafts, speculation=self.speculation,
            encoding=self.encoding, **numbers, **more,
        )  # fmt: skip
        self.wrong, self.finished_texts = wrong, []

        def guess(tenant: Admission, position: int) -> list[int]:
            return self.guess(self.executor.tokens[tenant.slot, :position].tolist(), tenant.seed, drafts)

        faults = faults or Faults()
        asked = guess if drafts and not host else None
        self.executor = StrictExecutor(
            layout, self.model, faults=faults, guess=asked, embeddings=encoder[0], undivided=undivided, **numbers
        )
        self.core = EngineCore(self.scheduler, self.executor, depth, clock=clock)
        self.plans: list[StepPlan] = []
        self.heard: dict[str, list[TokenDelta]] = defaultdict(list)
        self.specs: dict[str, EngineRequest] = {}
        submit = self.executor.submit

        def remember(plan: StepPlan):
            self.plans.append(plan)
            return submit(plan)

        self.executor.submit = remember

    def guess(self, text: list[int], seed: int, most: int) -> list[int]:
        right = self.model.generate(text, seed=seed, max_tokens=most)
        return [(token + ((len(text) + i) % self.wrong == 0)) % 50 for i, token in enumerate(right)]

    def propose(self, text, most: int) -> list[int]:
        """As a drafter of the host, for requests that differ in their prompts."""
        spec = next(spec for spec in self.specs.values() if spec.prompt == tuple(text.tokens[: text.prompt]))
        return self.guess(text.tokens.tolist(), spec.seed, most)

    def finished(self, text) -> None:
        self.finished_texts.append((text.tokens[text.prompt :].tolist(), text.scope))

    def add(
        self,
        name,
        prompt,
        max_tokens=4,
        *,
        stop=(),
        eos=(),
        priority=0,
        salt=(),
        tenant="",
        fork_of=None,
        hold=False,
        media=(),
        **params,
    ):
        self.specs[name] = EngineRequest(
            id=name,
            prompt=tuple(prompt),
            params=SamplingParams(max_tokens=max_tokens, **params),
            seed=len(self.specs),
            stop_ids=frozenset(stop) | frozenset(eos),
            eos_ids=frozenset(eos),
            arrival=0.0,
            priority=priority,
            tenant=tenant,
            salt=salt,
            fork_of=fork_of,
            hold=hold,
            extras=Extras(media=tuple(media)),
        )
        self.core.add(self.specs[name])

    def step(self, turns: int = 1) -> StepPlan | None:
        """Returns the last plan of these turns, or None if there was none."""
        before = len(self.plans)
        for _ in range(turns):
            for delta in self.core.step():
                self.heard[delta.request_id].append(delta)
            self.scheduler.roster.check()
            check_encoder(self.encoding, self.executor)
        return self.plans[-1] if len(self.plans) > before else None

    def finish(self) -> None:
        for _ in range(500):
            self.step()
            if not self.core.has_unfinished:
                return
        raise AssertionError("the loop does not come to an end")

    def tokens(self, name: str) -> list[int]:
        return [token for delta in self.heard[name] for token in delta.token_ids]

    def answer(self, name: str) -> list[int]:
        spec = self.specs[name]
        params = spec.params
        return self.model.generate(
            spec.prompt, seed=spec.seed, max_tokens=params.max_tokens, stop_ids=spec.stop_ids, min_tokens=params.min_tokens,
            added=media_flavours(spec.extras.media, spec.prompt, self.undivided),
        )  # fmt: skip

    def right(self, *names: str) -> bool:
        return all(self.tokens(name) == self.answer(name) for name in names)

    def cached(self, name: str) -> int:
        return self.heard[name][-1].cached_tokens

    def running(self) -> set[str]:
        return {request.spec.id for request in self.scheduler._running}
