"""Small helpers that programs written for vLLM import from it."""

import enum
import gc
import logging
import socket
import sys
import uuid


class UsageContext(enum.StrEnum):
    """Caller metadata of vLLM's usage statistics, which Quire does not collect."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"


def random_uuid() -> str:
    """Return 32 random hexadecimal digits."""
    return uuid.uuid4().hex


def init_logger(name: str) -> logging.Logger:
    return logging.getLogger(name)


def get_open_port() -> int:
    """Return a TCP port that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        port: int = listener.getsockname()[1]
        return port


def get_ip() -> str:
    """Return the address of the interface that leads out of this machine; 127.0.0.1 if none does."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a documentation address: nothing is sent
        except OSError:
            return "127.0.0.1"
        address: str = probe.getsockname()[0]
        return address


def set_ulimit(target_soft_limit: int = 65535) -> None:
    """Raise the limit of open files, as far as the hard limit allows."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = target_soft_limit if hard == resource.RLIM_INFINITY else min(target_soft_limit, hard)
    if soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Give back the memory of engines that nothing refers to any more."""
    gc.collect()
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if shutdown_ray and (ray := sys.modules.get("ray")) is not None:
        ray.shutdown()
