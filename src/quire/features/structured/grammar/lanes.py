"""Two grammar processes: requests with slow grammars go on in the second, where only others of the kind wait behind them.

Work is counted in processor time of masks, so the machine's load does not matter. All open requests with one grammar share a
budget in the first lane: when it is used up, all of them move. In the first lane a step waits a few milliseconds for masks; for
those of the second it never does. The second process starts with the first request that needs it and ends with the last, and it
gives way to other processes. Slow grammars are remembered, and start there next time.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from quire.features.structured.grammar import wire
from quire.features.structured.grammar.client import ROWS, Grammars, News, fingerprint
from quire.features.structured.grammar.process import Words
from quire.types.request import EngineRequest
from quire.types.structured import StructuredOutputsParams

FIRST_LANE_CPU_S = 0.2  # processor time of slow masks in the first lane, for all open requests with one grammar
MOST_REMEMBERED = 1024


class GrammarLanes:
    def __init__(
        self,
        path: str,
        tokenizer: str | None,
        revision: str | None,
        vocab_size: int,
        eos_ids: Iterable[int],
        drafts: int = 0,
        backend: str = "guidance",
    ) -> None:
        """
        drafts: maximum draft tokens per request and step
        backend: "guidance" or "xgrammar"
        """
        start = wire.StartWorker(path, tokenizer, revision, vocab_size, sorted(eos_ids), ROWS, drafts, backend)
        self.first, self.second = Grammars(start), Grammars(start, gives_way=True)
        self._slow: OrderedDict[bytes, None] = OrderedDict()  # grammars

    def __contains__(self, name: str) -> bool:
        return name in self.first or name in self.second

    def __len__(self) -> int:
        return len(self.first) + len(self.second)

    @property
    def losses(self) -> int:
        return self.first.losses + self.second.losses

    def open(self, request: EngineRequest) -> None:
        params = request.params.structured_outputs
        slow = self._slow and params is not None and fingerprint(params) in self._slow
        (self.second if slow else self.first).open(request)

    def close(self, name: str) -> None:
        if name in self.second:
            self.second.close(name)
            if not len(self.second):
                self.second.stop()
        else:
            self.first.close(name)

    def check(self, params: StructuredOutputsParams) -> None:
        self.first.check(params)

    def prepare(self) -> None:
        self.first.prepare()

    def stop(self) -> None:
        self.first.stop()
        self.second.stop()

    def tell(self, name: str, tokens: Sequence[int]) -> None:
        (self.second if name in self.second else self.first).tell(name, tokens)

    def guess(self, name: str, drafts: Sequence[int]) -> None:
        (self.second if name in self.second else self.first).guess(name, drafts)

    def send(self) -> None:
        self.first.send()
        self.second.send()

    def wait(self, seconds: float) -> None:
        busy = [lane for lane in (self.first, self.second) if len(lane)]
        for lane in busy:
            lane.wait(seconds / len(busy))

    def news(self) -> News:
        news = self.first.news()
        for entry in self.first.take_slow(FIRST_LANE_CPU_S, self._slow):
            self._remember(entry.grammar)
            self.second.adopt(entry)
            news.move(entry.name or "")
        if len(self.second):
            news.add(self.second.news())
        return news

    def settle(self, seconds: float) -> None:
        self.first.settle(seconds)

    def forced(self) -> list[tuple[str, list[int]]]:
        return self.first.forced() + self.second.forced()

    def late(self, names: Sequence[str], seconds: float) -> list[str]:
        late = self.first.late(names, seconds)
        return late + self.second.late(names, 0.0) if len(self.second) else late

    def masks(self, names: Sequence[str], behind: Sequence[int] | None = None) -> Words:
        masks = self.first.masks(names, behind)
        for i, name in enumerate(names) if len(self.second) else ():
            if name in self.second:
                masks[i] = self.second.masks([name], [behind[i] if behind else 0])[0]
        return masks

    def _remember(self, grammar: bytes) -> None:
        self._slow[grammar] = None
        if len(self._slow) > MOST_REMEMBERED:
            self._slow.popitem(last=False)
