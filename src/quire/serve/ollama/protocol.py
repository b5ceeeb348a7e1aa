"""Request bodies of Ollama's API, and the table of options.

Each option works (`WORKING`), has no effect here (`HINTS`), or is refused unless its value asks for nothing (`REFUSED`).
"""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool
from pydantic_core import PydanticCustomError

from quire.serve.protocol import LARGEST_INT, Int64, Integer, Number, Objects, RequestBody, Strings, one_error

MAX_TOP_LOGPROBS = 20
_DURATION = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:(?:ns|us|µs|μs|ms|s|m|h)(?:\d+(?:\.\d*)?(?:ns|us|µs|μs|ms|s|m|h))*)?")
_MAX_DURATION_CHARS = 64


def _duration(value: Any) -> Any:
    if isinstance(value, str) and not (len(value) <= _MAX_DURATION_CHARS and _DURATION.fullmatch(value)):
        raise PydanticCustomError("duration", 'should be seconds, or a duration such as "5m"')
    return value


_INT = Annotated[Integer, Field(ge=-LARGEST_INT, le=LARGEST_INT)] | None
_REAL = Number | None
_FLAG = StrictBool | None
_STOP = Annotated[str | Strings | None, one_error("should be a string or a list of strings")]


class Options(BaseModel):
    """Sampling and the limits of an answer; null: not set."""

    model_config = ConfigDict(extra="allow")

    temperature: _REAL = None
    top_p: _REAL = None
    top_k: _INT = None
    min_p: _REAL = None
    seed: Int64 | None = None
    stop: _STOP = None
    num_predict: _INT = Field(None, description="most tokens of the answer; -1, -2 and 0: as many as fit")
    repeat_penalty: _REAL = None
    presence_penalty: _REAL = None
    frequency_penalty: _REAL = None

    num_ctx: _INT = Field(None, description="at most the model's context, which does not change")
    num_keep: _INT = None
    num_batch: _INT = None
    num_gpu: _INT = None
    main_gpu: _INT = None
    num_thread: _INT = None
    draft_num_predict: _INT = None
    numa: _FLAG = None
    low_vram: _FLAG = None
    f16_kv: _FLAG = None
    logits_all: _FLAG = None
    vocab_only: _FLAG = None
    embedding_only: _FLAG = None
    use_mmap: _FLAG = None
    use_mlock: _FLAG = None
    penalize_newline: _FLAG = None

    repeat_last_n: _INT = Field(None, description="-1, or any value without penalties")
    typical_p: _REAL = None
    tfs_z: _REAL = None
    mirostat: _INT = None
    mirostat_tau: _REAL = None
    mirostat_eta: _REAL = None


# option -> field of a chat or completion
WORKING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "num_predict": "max_tokens",
}
_START = "the server's arguments decide at its start"
# option -> why it has no effect
HINTS = {
    "num_ctx": "the context is that of the server (--max-model-len)",
    "num_keep": "no tokens of a prompt are dropped",
    "penalize_newline": "newlines are tokens like all others, as in Ollama",
    "mirostat_tau": "it belongs to mirostat, which is off",
    "mirostat_eta": "it belongs to mirostat, which is off",
    "draft_num_predict": "drafts change no answer; --speculative-config decides about them",
    **dict.fromkeys(("num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram", "f16_kv", "logits_all", "vocab_only",
                     "embedding_only", "use_mmap", "use_mlock"), _START),
}  # fmt: skip
# option -> the value that asks for nothing, and what to do instead
REFUSED: dict[str, tuple[float, str]] = {
    "mirostat": (0, "send temperature, top_p or min_p"),
    "typical_p": (1, "send top_p or min_p"),
    "tfs_z": (1, "send top_p or min_p"),
}
_NO_IMAGES = "this server makes text only"
# field -> why it is not supported; values that ask for nothing (null, false, 0, empty) are accepted
REFUSED_FIELDS = {
    **dict.fromkeys(("width", "height", "steps"), _NO_IMAGES),
    "suffix": "the model cannot fill in the middle",
    "template": "chat templates are Jinja and belong to the server (--chat-template). Send raw=true and the whole prompt",
    "context": "send the conversation as messages to /api/chat",
    "truncate": "a prompt that is too long is an error. Shorten it",
    "shift": "an answer ends at the end of the context. Send num_predict for shorter ones",
    "_debug_render_only": "/tokenize shows the prompt",
}


class OllamaFields(RequestBody):
    options: Options | None = None
    keep_alive: Annotated[Number | str | None, one_error("should be seconds or a duration"), AfterValidator(_duration)] = Field(
        None, description="has no effect: the model stays loaded while the server runs"
    )


class OllamaGenerationFields(OllamaFields):
    """What /api/chat and /api/generate have in common."""

    stream: StrictBool | None = Field(None, description="default: true")
    format: Annotated[
        Literal["", "json"] | dict[str, Any] | None, one_error('should be "json" or a JSON schema, which is an object')
    ] = None
    think: Annotated[
        StrictBool | Literal["low", "medium", "high", "max"] | None,
        one_error('should be true, false, "low", "medium", "high" or "max"'),
    ] = Field(None, description="needs a server with --reasoning-parser; default: the chat template decides")
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[Integer, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


class OllamaChatRequest(OllamaGenerationFields):
    messages: Objects | None = Field(None, description="role, content, images, thinking, tool_calls, tool_name")
    tools: Objects | None = None


class OllamaGenerateRequest(OllamaGenerationFields):
    prompt: str | None = None
    system: str | None = None
    images: Annotated[Strings | None, one_error("should be a list of images in base64")] = None
    raw: StrictBool | None = Field(None, description="the prompt is complete: no chat template is applied")


class OllamaEmbedRequest(OllamaFields):
    input: Annotated[str | Strings | None, one_error("should be a text or a list of texts")] = None
    truncate: StrictBool | None = Field(
        None, description="false: a text that is too long is an error; default: its end is cut off"
    )
    dimensions: Annotated[Integer, Field(ge=0, le=LARGEST_INT)] | None = None


class OllamaEmbeddingsRequest(OllamaFields):
    prompt: str | None = None


class OllamaShowRequest(RequestBody):
    name: str | None = Field(None, description="older name of model")
    verbose: StrictBool | None = Field(None, description="has no effect: tokens are not listed")
