"""A logits processor: requests with `"vllm_xargs": {"only": 42}` (`SamplingParams.extra_args`) sample no other token."""

from typing import Any

from torch import Tensor

from quire import LogitsProcessor, SamplingParams
from quire.v1.sample.logits_processor import BatchUpdate, process_dict_updates


class Only(LogitsProcessor):
    def __init__(self, *given: Any) -> None:
        self.tokens: dict[int, int] = {}  # index in the batch -> token

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        if type((params.extra_args or {}).get("only", 0)) is not int:
            raise ValueError("only must be a token id")

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.tokens, batch_update, lambda params, *_: (params.extra_args or {}).get("only"))

    def apply(self, logits: Tensor) -> Tensor:
        for index, token in self.tokens.items():
            kept = logits[index, token].clone()
            logits[index] = -float("inf")
            logits[index, token] = kept
        return logits
