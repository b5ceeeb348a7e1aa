"""Tokenizers and chat templates for programs written for vLLM: transformers' objects."""

from importlib import import_module
from pathlib import Path
from typing import Any

from quire.config.vllm_arguments import take_hint
from quire.text.chat import read_template


def get_tokenizer(
    tokenizer_name: str | Path,
    *args: Any,
    tokenizer_mode: str = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
    **kwargs: Any,
) -> Any:
    """Return transformers' tokenizer of a model; code of the model's repository is never run."""
    if tokenizer_mode not in ("auto", "hf", "slow"):
        raise ValueError(f"tokenizer_mode must be auto, hf or slow; got {tokenizer_mode!r}. Leave it out.")
    take_hint("trust_remote_code", trust_remote_code)
    try:
        transformers = import_module("transformers")
    except ImportError as error:
        raise ImportError("get_tokenizer requires transformers; install it with pip install 'quire[transformers]'") from error
    fast = {"use_fast": False} if tokenizer_mode == "slow" else {}
    return transformers.AutoTokenizer.from_pretrained(str(tokenizer_name), *args, revision=revision, **fast, **kwargs)


def resolve_chat_template(
    tokenizer: Any,
    chat_template: str | None,
    tools: list[dict[str, Any]] | None,
    *,
    model_config: Any = None,  # noqa: ARG001
) -> str | None:
    """Return the template that conversations are rendered with: the given one, or the tokenizer's, if it has one.

    model_config: of vLLM; unused
    """
    own = tokenizer.chat_template if chat_template is None else chat_template
    if not isinstance(own, dict):
        return own
    chosen = own.get("tool_use") if tools else None
    return chosen or own.get("default")


def load_chat_template(chat_template: str | Path | None, *, is_literal: bool = False) -> str | None:
    """Return the template's text: the argument itself, or the file of that name."""
    if chat_template is None or is_literal:
        return None if chat_template is None else str(chat_template)
    return read_template(str(chat_template))
