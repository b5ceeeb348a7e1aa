"""Methods of vLLM's LLM that ask for what is not there: calling one says so."""

from typing import Any, NoReturn

from quire.types.errors import NotSupported

_POOLING = "only text generation is built, and this model generates text"
_NO_CODE = "no code is sent to ranks; llm.collective_rpc calls their own methods"
_NO_PROFILER = "profile the process itself, for instance with torch.profiler around the calls"
_KEPT = "weights stay as they were loaded"


class NotBuilt:
    def encode(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("encode", _POOLING)

    def embed(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("embed", _POOLING)

    def classify(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("classify", _POOLING)

    def score(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("score", _POOLING)

    def reward(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("reward", _POOLING)

    def apply_model(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("apply_model", _NO_CODE)

    def start_profile(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("start_profile", _NO_PROFILER)

    def stop_profile(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("stop_profile", _NO_PROFILER)

    def sleep(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("sleep", _KEPT)

    def wake_up(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("wake_up", _KEPT)

    def update_weights(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("update_weights", _KEPT)

    def reset_mm_cache(self) -> None:
        """There are no media, so nothing of them is kept."""


def _refuse(name: str, reason: str) -> NoReturn:
    raise NotSupported(f"llm.{name} is not available: {reason}", name)
