"""The device half: logits processors as a stage of the sampler.

Each step: tokens of the output are read ─► update_state of all ─► apply of those that may change the most likely token ─►
penalties, masks of grammars ─► apply of the others, on logits divided by the temperature.

A processor sees one row for each request of its batch: zeros, if the request gets no token in the step.
"""

import logging
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from quire.config.config import Config
from quire.config.model_config import VllmConfig
from quire.device.base import Device
from quire.features.base import Allocation, StepPart
from quire.features.logits_processors.batch import BatchRequest, PersistentBatch
from quire.features.logits_processors.host import reserved_bytes
from quire.features.logits_processors.interface import AdapterLogitsProcessor, BatchUpdate, LogitsProcessor
from quire.features.logits_processors.loading import load_classes
from quire.models.decoder import Decoder
from quire.runner.sampler.filters import largest
from quire.runner.sampler.stage import Rows
from quire.types.errors import PLUGIN_FAILURES, ConfigError
from quire.types.plan import Admission, Floats, StepRows

logger = logging.getLogger(__name__)
Make = Callable[[], LogitsProcessor]


class LogitsProcessorsPart(StepPart):
    name = "logits_processors"
    samples_on_one_rank = True  # processors of other ranks could choose other tokens

    def __init__(
        self,
        device: Device,
        dtype: torch.dtype,  # noqa: ARG002
        config: Config,
    ) -> None:
        self._torch_device, self._config = device.torch_device, config
        self._makers: list[tuple[str, Make]] = []

    def load(self, model: Decoder, reserved_bytes: Callable[[], int]) -> None:  # noqa: ARG002
        """Load the classes, and make each once: what cannot be made stops the start."""
        device, args, config = self._torch_device, self._config.args, VllmConfig.of(self._config, self._config.max_model_len)
        pinned = device.type == "cuda"
        for name, kind in load_classes(args.logits_processors, args.require_plugins):

            def make(kind: type[LogitsProcessor] = kind) -> LogitsProcessor:
                return kind(config, device, pinned)

            self._makers.append((name, make))
        self._make_all()

    def _make_all(self) -> "list[GuardedProcessor]":
        made = []
        for name, make in self._makers:
            try:
                made.append(GuardedProcessor(name, make))
            except PLUGIN_FAILURES as error:
                raise ConfigError(f"logits_processors: {name} cannot be made: {type(error).__name__}: {error}") from error
        return made

    def reserved_bytes(self, max_seqs: int, recording: bool) -> int:  # noqa: ARG002
        return reserved_bytes(max_seqs, self._config.facts.vocab_size + self._config.adapter_tokens)

    def allocate(self, allocation: Allocation) -> None:
        if allocation.pages and self._makers:  # not for profile and warm-up runs
            allocation.sampler.insert(ProcessorsStage(self._make_all()))

    def graph_key(self, rows: StepRows) -> bool:  # noqa: ARG002
        return False  # graphs end with logits, which are edited after them


class GuardedProcessor:
    """A processor whose errors are messages for the rows they concern. After an error of its own it is made anew, and gets the
    requests whose rows did not fail, with their tokens."""

    def __init__(self, name: str, make: Make) -> None:
        self.name, self._make = name, make
        self._processor: LogitsProcessor | None = make()
        self.invariant = self._processor.is_argmax_invariant()

    def update(self, update: BatchUpdate | None, batch: PersistentBatch) -> dict[int, str]:
        """Return what is wrong with requests, by index in the batch."""
        if self._processor is None:
            why = f"the logits processor {self.name} failed before, and cannot be made anew"
            return dict.fromkeys(batch.index.values(), why)
        try:
            self._processor.update_state(update)
        except PLUGIN_FAILURES as error:
            added = [index for index, *_ in update.added] if update is not None else []
            moves = {first: second for first, second, _ in update.moved} if update is not None else {}
            wrong = [moves.get(index, index) for index in added] or [*batch.index.values()]
            return self._recover(error, wrong, batch, "update_state")
        return self._failures()

    def apply(self, logits: Tensor, order: list[int], batch: PersistentBatch) -> tuple[Tensor, dict[int, str]]:
        """Return logits of the rows `order` of the batch, and what is wrong, by index."""
        size = len(batch.index)
        whole = order == list(range(size))
        if self._processor is None:
            return logits, {}
        if isinstance(self._processor, AdapterLogitsProcessor):
            self._processor.present = None if whole else frozenset(order)
        try:
            if whole:
                changed = _checked(self._processor.apply(logits.view_as(logits)), logits)  # resize_ changes the view only
            else:
                rows = torch.tensor(order, device=logits.device)
                spread = logits.new_zeros(size, logits.shape[1])
                spread[rows] = logits
                changed = _checked(self._processor.apply(spread.view_as(spread)), spread)[rows]
        except PLUGIN_FAILURES as error:
            return logits, self._recover(error, order, batch, "apply")
        return changed, self._failures()

    def _failures(self) -> dict[int, str]:
        if not isinstance(self._processor, AdapterLogitsProcessor) or not self._processor.failures:
            return {}
        failures, self._processor.failures = self._processor.failures, None
        return {index: self._message(error) for index, error in failures.items()}

    def _recover(self, error: BaseException, wrong: Iterable[int], batch: PersistentBatch, where: str) -> dict[int, str]:
        logger.error("the logits processor %s failed in %s", self.name, where, exc_info=error)
        found = dict.fromkeys(wrong, self._message(error))
        try:
            self._processor = self._make()
            left = [batch.requests[slot].added(index) for slot, index in batch.index.items() if index not in found]
            if left:
                self._processor.update_state(BatchUpdate(len(batch.index), [], left, []))
        except PLUGIN_FAILURES:
            logger.exception("the logits processor %s cannot be made anew", self.name)
            self._processor = None
            found |= dict.fromkeys(batch.index.values(), self._message(error))
        return found

    def _message(self, error: BaseException) -> str:
        return f"the logits processor {self.name} failed: {type(error).__name__}: {error}"


class ProcessorsStage:
    """An edit of the sampler for every request."""

    fields = ()  # of every request

    def __init__(self, processors: list[GuardedProcessor]) -> None:
        self._processors = processors
        self._batch = PersistentBatch()
        self._failed: dict[int, str] = {}  # index in the batch -> message, of this step

    def wants(self, admission: Admission) -> bool:  # noqa: ARG002
        return True

    def admit(self, slot: int, admission: Admission) -> None:
        tokens = admission.tokens.tolist()
        prompt, output = tokens[: admission.prompt_length], tokens[admission.prompt_length :]
        self._batch.admit(slot, BatchRequest(admission.params, prompt, output))

    def retire(self, slot: int) -> None:
        self._batch.retire(slot)

    def active(self, rows: Rows) -> bool:  # noqa: ARG002
        return True

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        slots = rows.slots.tolist()
        self._read_outputs(slots, rows)
        update, self._failed = self._batch.update(slots), {}
        for processor in self._processors:
            self._failed |= processor.update(update, self._batch)
        return self._run(False, logits, self._order(rows))

    def finish(self, logits: Tensor, rows: Rows, temperature: Floats) -> tuple[Tensor, dict[int, str]]:
        """Apply the processors that change no greedy row; return the logits, and why rows failed.

        temperature: [N], 0 of greedy rows.
        """
        order = self._order(rows)
        if any(processor.invariant for processor in self._processors) and temperature.any():
            random = torch.from_numpy(temperature > 0).to(logits.device)[:, None]
            scale = torch.from_numpy(np.where(temperature > 0, temperature, 1).astype(np.float32)).to(logits.device)[:, None]
            scaled = logits / scale
            changed = self._run(True, scaled.clone(), order)
            logits = torch.where(random & (changed != scaled), changed * scale, logits)
        failed = {row: self._failed[at] for row, at in enumerate(order) if at in self._failed}
        if failed:
            logits[torch.tensor([*failed], device=logits.device)] = 0.0  # finite, so that sampling goes on
        return logits, failed

    def _order(self, rows: Rows) -> list[int]:
        """Return the index in the batch of each row."""
        return [self._batch.index[slot] for slot in rows.slots.tolist()]

    def _read_outputs(self, slots: list[int], rows: Rows) -> None:
        """Append the tokens that were sampled or given since the last step. Waits for the device."""
        missing = []
        for row, (slot, end) in enumerate(zip(slots, rows.ends.tolist(), strict=True)):
            request = self._batch.requests[slot]
            if (behind := end - len(request.prompt) - len(request.output)) != 0:
                missing.append((row, slot, end, behind))
        if not missing:
            return
        if all(behind == 1 for *_, behind in missing):
            index = torch.tensor([[slot, end - 1] for _, slot, end, _ in missing], device=rows.tokens.device)
            for (_, slot, _, _), token in zip(missing, rows.tokens[index[:, 0], index[:, 1]].tolist(), strict=True):
                self._batch.requests[slot].output.append(token)
            return
        for _, slot, end, _ in missing:
            request = self._batch.requests[slot]
            del request.output[max(0, end - len(request.prompt)) :]
            known = len(request.prompt) + len(request.output)
            request.output += rows.tokens[slot, known:end].tolist()

    def _run(self, invariant: bool, logits: Tensor, order: list[int]) -> Tensor:
        processors = [processor for processor in self._processors if processor.invariant is invariant]
        sound = _finite(logits) if processors else []
        for processor in processors:
            logits, failed = processor.apply(logits, order, self._batch)
            finite = _finite(logits)
            for row, at in enumerate(order):
                if sound[row] and not finite[row] and at not in failed:
                    failed[at] = f"the logits processor {processor.name} {_fault_of(logits[row])}"
            self._failed = failed | self._failed
            if failed:
                wrong = [row for row, at in enumerate(order) if at in failed]
                logits[torch.tensor(wrong, dtype=torch.long, device=logits.device)] = 0.0
                finite = [good or row in wrong for row, good in enumerate(finite)]
            sound = finite
        return logits


def _finite(logits: Tensor) -> list[bool]:
    """Return which rows have no NaN or +inf, and a finite value."""
    return torch.isfinite(largest(logits)[0]).tolist()


def _fault_of(row: Tensor) -> str:
    broken = bool((torch.isnan(row) | torch.isposinf(row)).any())
    return "returned NaN or +inf" if broken else "forbids every token"


def _checked(returned: Tensor, given: Tensor) -> Tensor:
    if not isinstance(returned, Tensor):
        raise TypeError(f"apply must return a tensor; got {returned!r:.80}")
    if returned.shape != given.shape:
        raise ValueError(f"apply must return logits of shape {list(given.shape)}; got {list(returned.shape)}")
    if not returned.is_floating_point():
        raise TypeError(f"apply must return floating-point logits; got {returned.dtype}")
    return returned.to(given.device, torch.float32)
