"""The device half of pooling: hidden states of prompts become vectors or class scores, next to the sampler.

    states of a row ─► LAST, CLS, MEAN (sums of a slot over the chunks of its prompt), ALL, STEP
                    ─► head or Dense layers ─► cut ─► normalization, sigmoid or softmax ─► host, float32

A row's values do not depend on the other rows: sums are made token by token in float64, and on a CPU heads that are not packed
multiply one row at a time. On a GPU this requires the fixed order (`ops/order.py`).
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional

from quire.attn.batch import PLAIN, Batch, LoRATokens, Tokens
from quire.device.base import Device
from quire.features.base import Allocation, Pooled, StepPart
from quire.features.pooling.host import CHUNK, ModelPooling
from quire.features.pooling.sentence_files import Dense
from quire.files.resolve import ModelFiles
from quire.layers.class_linear import ClassLinear
from quire.layers.embedding import Head, PlainHead
from quire.models.decoder import Decoder
from quire.ops.activation import activate
from quire.ops.order import order_is_fixed
from quire.ops.row_sums import add_rows
from quire.prepare.stage import OtherStage
from quire.runner.transfer import upload, upload_together
from quire.text.tokenizer_files import load_tokenizer
from quire.types.errors import EngineError, ModelError
from quire.types.plan import Admission, Ints, Longs, StepRows
from quire.types.pooling import Pooling

EPSILON = 1e-12  # least norm that a vector is divided by
ORDERED_STATES = 64  # per block in the fixed order (`ops/order.py`): torch chooses the order of sums by the number of rows


class NoHead(nn.Module):
    """The LM head of a model that samples nothing. Warm-up and profile runs, which sample, get zeros."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.total = vocab_size

    def forward(self, hidden: Tensor, tokens: Tokens) -> Tensor:  # noqa: ARG002
        return torch.zeros(len(hidden), self.total, device=hidden.device)


@dataclass
class PooledRequest:
    """A request in a slot."""

    pooling: Pooling
    prompt_length: int
    tokens: Ints  # its prompt, to find step_tag_id
    segment: int  # position of the first token with segment id 1; 0: there is none
    unpooled: int = 0  # tokens at the beginning that are left out of the mean
    adapter: int = 0  # slot of its LoRA adapter; 0: none
    unattended: int = 0  # tokens at the end that no token attends to
    skipped: tuple[int, ...] = ()  # token ids without vectors

    @property
    def pooled_tokens(self) -> int:
        return max(0, self.prompt_length - self.unpooled)

    @property
    def group(self) -> "Group":
        return self.pooling, self.adapter


Group = tuple[Pooling, int]  # requests with the same pooling and LoRA adapter are pooled together
Score = Callable[[Tensor, Tokens], Tensor]  # states [n, H] and their adapters -> class logits [n, classes]


class PoolingPart(StepPart):
    name = "pooling"
    replays_states = True

    def __init__(
        self,
        device: Device,
        dtype: torch.dtype,
        pooling: ModelPooling,
        tokenizer: str | None,
        revision: str | None,
        files: ModelFiles,
        reserved: int,
    ) -> None:
        """tokenizer, revision, files: of the engine's tokenizer. reserved: bytes that pooling takes, see `step_bytes`."""
        self._device, self._dtype, self._how, self._files = device, dtype, pooling, files
        self._tokenizer, self._revision, self._reserved = tokenizer, revision, reserved
        self._requests: dict[int, PooledRequest] = {}
        self._sums: Tensor | None = None  # [S, H] float64, made when a prompt's mean is first asked for
        self._slots = 0
        self._score: Score | None = None
        self._dense: list[tuple[Tensor, Tensor | None, str]] = []  # weight, bias, activation

    # ---- the model's head ------------------------------------------------------------------------------------------------

    def before_cut(self, model: Decoder) -> None:
        replace_head(model, self._how)

    def transform(self, model: Decoder) -> None:
        replace_head(model, self._how)  # unless a pipeline stage did so before the cut

    def load(self, model: Decoder, reserved_bytes: Callable[[], int]) -> None:  # noqa: ARG002
        how, head = self._how, getattr(model, "lm_head", None)
        if isinstance(head, OtherStage):  # results are pooled on the first pipeline stage
            return
        if hasattr(model, "classify"):
            self._score = cast(Score, model.classify)
        elif how.from_tokens:
            self._score = self._score_by_tokens(model)
        elif how.head != "embed":
            assert isinstance(head, ClassHead)
            self._score = head.score
        if how.files is not None:
            self._dense = [_load_dense(dense, self._device.torch_device) for dense in how.files.dense]

    def _score_by_tokens(self, model: Decoder) -> Score:
        """Class logits from the rows of the LM head that belong to tokens."""
        how, head = self._how, model.lm_head
        ids = self._find_ids()
        matrix: Tensor | None = None
        if isinstance(head.method, PlainHead) and head.group is None and head.bias is None and head.soft_cap is None:
            rows = head.matrix()[torch.tensor(ids, device=self._device.torch_device)].float()
            matrix = (rows[1:] - rows[:1] if how.difference else rows) * head.scale

        def score(states: Tensor, tokens: Tokens) -> Tensor:
            adapted = tokens.lora is not None and head.bank is not None and any(head.bank.of(tokens.lora))
            if matrix is not None and not adapted:
                return self._by_row(lambda row: functional.linear(row.float(), matrix))(states)
            parts = [model.logits(part, _like(tokens, len(part)))[:, ids] for part in torch.split(states, CHUNK)]
            logits = torch.cat(parts)
            return logits[:, 1:] - logits[:, :1] if how.difference else logits

        return score

    def _find_ids(self) -> list[int]:
        tokenizer = load_tokenizer(self._files, tokenizer=self._tokenizer, revision=self._revision)
        found = []
        for token in self._how.from_tokens:
            ids = tokenizer.encode(token, add_special_tokens=False)
            if len(ids) != 1:
                raise ModelError(f"classifier_from_token must name single tokens; {token!r} is {len(ids)} tokens of this model")
            found += ids
        return found

    def _by_row(self, layer: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """On a CPU, run a layer one row at a time: how a matrix product sums depends on the number of rows."""
        if self._device.torch_device.type != "cpu":
            return layer
        return lambda states: torch.cat([layer(row) for row in torch.split(states, 1)]) if len(states) else layer(states)

    def reserved_bytes(self, max_seqs: int, recording: bool) -> int:  # noqa: ARG002
        return self._reserved

    # ---- requests --------------------------------------------------------------------------------------------------------

    def allocate(self, allocation: Allocation) -> None:
        self._requests.clear()
        self._sums, self._slots = None, len(allocation.slots.tokens)

    def admit(self, slot: int, admission: Admission) -> None:
        if (pooling := admission.extras.pooling) is not None:
            extras = admission.extras
            self._requests[slot] = PooledRequest(
                pooling, admission.prompt_length, admission.tokens, extras.segment, extras.unpooled, extras.adapter_slot,
                extras.unattended, extras.skipped,
            )  # fmt: skip

    def retire(self, slot: int) -> None:
        self._requests.pop(slot, None)

    def extend(self, batch: Batch, rows: StepRows, slot: Tensor) -> Batch:  # noqa: ARG002
        """Add what encoders read: which tokens belong to the second text of a pair, and which are no keys."""
        unattended = self._unattended(rows)
        if any(unattended):
            keys = [(first, count, length - less) for (first, count, length), less in zip(batch.rows, unattended, strict=True)]
            batch = replace(batch, rows=tuple(keys))
        segments = self._segments(rows)
        if not any(segments):
            return batch
        shapes = zip(segments, rows.end.tolist(), rows.count.tolist(), strict=True)
        types = [np.arange(end - count, end) >= (segment or end) for segment, end, count in shapes]
        return replace(batch, token_types=upload(np.concatenate(types).astype(np.int64), self._device.torch_device))

    def graph_key(self, rows: StepRows) -> Hashable | None:
        return None if any(self._segments(rows)) or any(self._unattended(rows)) else False

    def _segments(self, rows: StepRows) -> list[int]:
        requests = [self._requests.get(each) for each in rows.slot.tolist()]
        return [0 if request is None else request.segment for request in requests]

    def _unattended(self, rows: StepRows) -> list[int]:
        requests = [self._requests.get(each) for each in rows.slot.tolist()]
        return [0 if request is None else request.unattended for request in requests]

    def close(self) -> None:
        self._score = self._sums = None
        self._dense.clear()
        self._requests.clear()

    # ---- pooling ---------------------------------------------------------------------------------------------------------

    def pool(self, rows: StepRows, hidden: Tensor, index: Longs) -> Sequence[Pooled] | None:
        owner, groups = rows.shapes.rows_of(rows.outputs.pool), dict[Group, list[tuple[int, Longs]]]()
        pooled = np.unique(owner)
        starts, ends = (np.searchsorted(owner, pooled, side).tolist() for side in ("left", "right"))
        means = list[tuple[int, int, int, int]]()  # row, first state, states, position of the row's first token
        shapes = zip(pooled.tolist(), starts, ends, rows.slot[pooled].tolist(), rows.end[pooled].tolist(), strict=True)
        for row, start, stop, slot, end in shapes:
            request = self._requests[slot]
            if request.pooling.type == "MEAN":
                begin = end - (stop - start)
                left_out = min(max(0, request.unpooled - begin), stop - start)
                means.append((row, int(index[start]) + left_out, stop - start - left_out, begin))
            elif (chosen := _choose(request, index[start:stop], end)) is not None:
                groups.setdefault(request.group, []).append((row, chosen))
        found = [self._finish(group, hidden, chosen) for group, chosen in groups.items()]
        return [*found, *self._means(rows, hidden, means)] if means else found

    def _means(self, rows: StepRows, hidden: Tensor, means: list[tuple[int, int, int, int]]) -> Iterator[Pooled]:
        """Add the states of rows to the sums of their slots. Yield the results of those whose prompts are complete."""
        if self._sums is None:
            self._sums = torch.zeros(self._slots, hidden.shape[1], dtype=torch.float64, device=hidden.device)
        row, first, count, begin = np.array(means, np.int64).T
        slot, end = rows.slot[row].astype(np.int64), rows.end[row]
        add_rows(hidden, first, count, slot, (begin == 0).astype(np.int64), self._sums)
        requests = [self._requests[each] for each in slot.tolist()]
        length = np.array([max(1, request.pooled_tokens) for request in requests], np.int64)
        complete = dict[Group, list[int]]()
        for each in np.flatnonzero(end == [request.prompt_length for request in requests]).tolist():
            complete.setdefault(requests[each].group, []).append(each)
        for group, chosen in complete.items():
            slots, lengths = upload_together([slot[chosen], length[chosen]], hidden.device)
            averages = self._sums[slots] / lengths.double()[:, None]
            yield Pooled(dict.fromkeys(row[chosen].tolist(), 1), self._activate(group, averages.float()))

    def _finish(self, group: Group, hidden: Tensor, chosen: Sequence[tuple[int, Longs]]) -> Pooled:
        index = np.concatenate([states for _, states in chosen])
        parts = [
            self._activate(group, hidden[upload(index[first : first + CHUNK], hidden.device)].float())
            for first in range(0, max(1, len(index)), CHUNK)
        ]
        return Pooled({row: len(states) for row, states in chosen}, parts[0] if len(parts) == 1 else torch.cat(parts))

    def _activate(self, group: Group, states: Tensor) -> Tensor:
        """Apply the group's head and activation: states [n, H] float32 -> [n, size] float32."""
        if not order_is_fixed():
            return self._activate_together(group, states)
        blocks = []  # with zeros after the last states
        for part in torch.split(states, ORDERED_STATES):
            block = functional.pad(part, (0, 0, 0, ORDERED_STATES - len(part)))
            blocks.append(self._activate_together(group, block)[: len(part)])
        return torch.cat(blocks)

    def _activate_together(self, group: Group, states: Tensor) -> Tensor:
        pooling, adapter = group
        if pooling.task.endswith("classify"):
            if self._score is None:
                raise EngineError("the model has no classification head")
            scores = self._score(states.to(self._dtype), _adapted(adapter, len(states), states.device))
            scores = scores.to(torch.float32, copy=True)  # the next product of a packed head overwrites this one
            if pooling.activate:
                scores = _apply(self._how.activation, scores)
            ids = pooling.returned_token_ids
            return scores if ids is None else scores[:, list(ids)]
        for weight, bias, activation in self._dense:
            states = self._by_row(lambda x, w=weight, b=bias: functional.linear(x, w, b))(states)  # type: ignore[misc]
            states = _apply(activation, states)
        if pooling.dimensions is not None:
            states = states[:, : pooling.dimensions]
        if pooling.activate:
            exact = states.double()
            states = (exact / exact.norm(dim=-1, keepdim=True).clamp_min(EPSILON)).float()
        return states.contiguous()


def replace_head(model: Decoder, how: ModelPooling) -> None:
    """Replace the LM head by the pooling head, on the meta device. Do nothing if that was done."""
    if hasattr(model, "classify") or how.from_tokens:  # an encoder has its own head; the LM head has the classes
        return
    if not isinstance(cast(nn.Module, model.lm_head), Head):
        return
    vocab, size = model.embed_tokens.total, model.embed_tokens.size
    unread: list[tuple[str, str | None]] = [(r"^lm_head\.", None)]
    with torch.device("meta"):
        if how.head == "embed":
            head: nn.Module = NoHead(vocab)
            unread.append((r"^(score|classifier)\.", None))
        elif how.layers == 1:
            head = ClassHead(vocab, how.size, size, how.bias)
            unread.append((r"^(score|classifier)\.(0\.)?", "lm_head.classes."))
        else:
            head = ClassHead(vocab, how.size, size, how.bias, hidden=True)
            unread += [
                (r"^(score|classifier)\.0\.", "lm_head.hidden."),
                (r"^(score|classifier)\.\d+\.", "lm_head.classes."),
            ]
    model.lm_head = head  # type: ignore[assignment]
    model.renames = (*model.renames, *unread)


class ClassHead(NoHead):
    """Class logits in float32, from one linear layer, or from two with a ReLU between them."""

    def __init__(self, vocab_size: int, labels: int, size: int, bias: bool, hidden: bool = False) -> None:
        super().__init__(vocab_size)
        self.hidden = ClassLinear(size, size, bias=bias) if hidden else None
        self.classes = ClassLinear(size, labels, bias=bias)

    def score(self, states: Tensor, tokens: Tokens) -> Tensor:
        """states [n, H], all with the same adapter -> [n, labels] float32."""
        if states.device.type == "cpu" and len(states) > 1:  # a product's sums depend on the number of rows
            one = _like(tokens, 1)
            return torch.cat([self.score(row, one) for row in torch.split(states, 1)])
        x = states.float()
        if self.hidden is not None:
            x = self.hidden.compute_in_float32(x, tokens).relu()
        return self.classes.compute_in_float32(x, tokens)


def _adapted(adapter: int, count: int, device: torch.device) -> Tokens:
    """Return `count` states with the LoRA adapter in this slot; 0: without one."""
    return Tokens(LoRATokens(np.full(count, adapter, np.int64), device)) if adapter else PLAIN


def _like(tokens: Tokens, count: int) -> Tokens:
    """Return the first `count` of states that all have the same adapter."""
    return tokens.take(np.arange(count))


def _choose(request: PooledRequest, states: Longs, end: int) -> Longs | None:
    """Return which of a row's states [n] have a result; None: the row brings nothing. end: position after its last token."""
    begin = end - len(states)
    match request.pooling.type:
        case "LAST":
            return states[-1:] if end == request.prompt_length else None
        case "CLS":
            first = request.unpooled if request.pooled_tokens else 0
            return states[first - begin : first - begin + 1] if begin <= first < end else None
        case "STEP":
            chosen: Longs = states[request.tokens[begin:end] == request.pooling.step_tag_id]
            return chosen
        case _:
            return states[~np.isin(request.tokens[begin:end], request.skipped)] if request.skipped else states


def _apply(name: str, x: Tensor) -> Tensor:
    match name:
        case "identity":
            return x
        case "sigmoid":
            return x.sigmoid()
        case "softmax":
            return x.softmax(dim=-1)
        case "tanh":
            return x.tanh()
        case _:
            return activate(x, name)


def _load_dense(dense: Dense, device: torch.device) -> tuple[Tensor, Tensor | None, str]:
    with safe_open(dense.weights, "pt") as tensors:
        weight = tensors.get_tensor("linear.weight")
        bias = tensors.get_tensor("linear.bias") if dense.bias else None
    return weight.float().to(device), None if bias is None else bias.float().to(device), dense.activation
