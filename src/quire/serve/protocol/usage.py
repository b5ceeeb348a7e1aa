"""What an answer cost: tokens and times."""

from typing import NotRequired

from typing_extensions import TypedDict


class PromptTokens(TypedDict):
    cached_tokens: int


class CompletionTokens(TypedDict):
    reasoning_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: NotRequired[PromptTokens]
    completion_tokens_details: NotRequired[CompletionTokens]


class Drafts(TypedDict):
    """Of a request to a server that drafts; zeros if it had none."""

    num_spec_steps: int  # steps in which it had some
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    mean_acceptance_length: float  # tokens that such a step brought
    draft_acceptance_rate: float


class Timing(TypedDict):
    """Milliseconds; None where there is nothing to measure. queue + prefill = time to the first token."""

    time_to_first_token_ms: float | None
    generation_time_ms: float | None  # first token to last
    queue_time_ms: float | None
    prefill_time_ms: float | None  # first time in a batch to first token
    mean_itl_ms: float | None
    tokens_per_second: float | None  # from the first time in a batch
    preemptions: int
    speculative_decoding: NotRequired[Drafts]
