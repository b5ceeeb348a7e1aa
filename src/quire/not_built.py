"""Methods of vLLM's engines that require features Quire does not have: calling one raises NotSupported with the reason."""

from collections.abc import Callable
from typing import Any, NoReturn

from quire.types.errors import NotSupported

_NO_CODE = "no code is sent to ranks; collective_rpc calls their own methods"
_KEPT = "sleep mode and weight updates are not built; weights stay as they were loaded"
_NO_PAUSE = "pausing is not built; abort requests, or wait with wait_for_requests_to_drain"


def _refused(name: str, reason: str) -> Callable[..., NoReturn]:
    """Return a method that raises at the call itself, so that `await` and `async for` get the error as well."""

    def method(self: object, *_: Any, **__: Any) -> NoReturn:
        raise NotSupported(f"{type(self).__name__}.{name} is not available: {reason}", name)

    method.__name__, method.__doc__ = name, f"Not available: {reason}."
    return method


def refuse_connector(reset_connector: bool) -> None:
    if reset_connector:
        raise NotSupported(
            "reset_connector=True is not supported: KV connectors are not built. Leave it out.", "reset_connector"
        )


class NotBuilt:
    """What `LLM`, `LLMEngine` and `AsyncLLM` lack."""

    sleep = _refused("sleep", _KEPT)
    wake_up = _refused("wake_up", _KEPT)
    init_weight_transfer_engine = _refused("init_weight_transfer_engine", _KEPT)
    start_weight_update = _refused("start_weight_update", _KEPT)
    start_draft_weight_update = _refused("start_draft_weight_update", _KEPT)
    update_weights = _refused("update_weights", _KEPT)
    finish_weight_update = _refused("finish_weight_update", _KEPT)
    update_weight_version = _refused("update_weight_version", _KEPT)
    get_weight_version = _refused("get_weight_version", _KEPT)

    @classmethod
    def from_vllm_config(cls, *_: Any, **__: Any) -> NoReturn:
        raise NotSupported(f"{cls.__name__}.from_vllm_config is not available: use from_engine_args", "from_vllm_config")


class LLMNotBuilt(NotBuilt):
    apply_model = _refused("apply_model", _NO_CODE)


class LLMEngineNotBuilt(NotBuilt):
    encode = _refused("encode", "it pools through LLM.encode or AsyncLLM.encode")
    apply_model = _refused("apply_model", _NO_CODE)
    get_metrics = _refused("get_metrics", "metrics are counted by LLM.get_metrics and by the server")
    set_weight_version = _refused("set_weight_version", _KEPT)
    do_log_stats_with_interval = _refused("do_log_stats_with_interval", "statistics are logged by the server; see core.stats")
    has_unfinished_requests_dp = _refused("has_unfinished_requests_dp", "data-parallel engines step by themselves")

    def reset_encoder_cache(self) -> None:
        """Do nothing: the encoder cache is addressed by content, and weights do not change."""

    def is_sleeping(self) -> bool:
        return False


class AsyncLLMNotBuilt(NotBuilt):
    add_request = _refused("add_request", "requests have no output queue of their own; iterate over generate(...)")
    pause_generation = _refused("pause_generation", _NO_PAUSE)
    resume_generation = _refused("resume_generation", _NO_PAUSE)
    checkpoint_prepare = _refused("checkpoint_prepare", "checkpointing of engine processes is not built")
    checkpoint_restore = _refused("checkpoint_restore", "checkpointing of engine processes is not built")
    scale_elastic_ep = _refused("scale_elastic_ep", "elastic expert parallelism is not built; restart with other sizes")
    handle_fault = _refused("handle_fault", "a lost engine is restarted without instructions, and its requests go on")
    get_status = _refused("get_status", "there is no fault-tolerance status; see state, restarts and last_loss")
    notify_kv_transfer_request_rejected = _refused("notify_kv_transfer_request_rejected", "KV cache transfer is not built")

    async def reset_encoder_cache(self) -> None:
        """Do nothing: the encoder cache is addressed by content, and weights do not change."""

    async def is_sleeping(self) -> bool:
        return False

    async def is_paused(self) -> bool:
        return False
