"""/v1/models."""

from typing import Literal

from typing_extensions import TypedDict


class Permission(TypedDict):
    id: str
    object: Literal["model_permission"]
    created: int
    allow_create_engine: bool
    allow_sampling: bool
    allow_logprobs: bool
    allow_search_indices: bool
    allow_view: bool
    allow_fine_tuning: bool
    organization: str
    group: str | None
    is_blocking: bool


class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    permission: list[Permission]


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]
