"""What vLLM's server takes and this one does not build: every name, its harmless values, and the reason (see `refused`)."""

from typing import Any

from quire.config.fields import FLAG, TEXT, Kind
from quire.config.refused import table_of

_ABSENT = "the endpoint that reads it is not available"
_NO_PLUGINS = "the server runs no code but its own"

SERVER_REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = table_of((
    ("tools are called by the client, never by the server", {"tool_server": ()}),
    (_NO_PLUGINS, {"middleware": ([],), "log_config_file": ()}),
    ("only HTTP is spoken", {"grpc": (False,)}),
    ("certificates are read once, at the start", {"enable_ssl_refresh": (False,)}),
    ("the fingerprint has one form", {"fingerprint_mode": ("full",), "fingerprint_value": ()}),
    ("errors are logged without their stack unless the level is debug", {"log_error_stack": (False,)}),
    ("headers are bounded by the server", {"h11_max_incomplete_event_size": (), "h11_max_header_count": ()}),
    ("tokens in, tokens out is not served yet", {"tokens_only": (False,)}),
))  # fmt: skip
# what changes nothing here (see `hints`)
SERVER_HINTS: dict[str, tuple[str, Kind]] = {
    "disable_frontend_multiprocessing": ("engines run in processes of their own", FLAG),
    "aggregate_engine_logging": ("every engine has a line of its own", FLAG),
    "disable_log_requests": ("requests are logged only with --enable-log-requests", FLAG),
    "enable_offline_docs": ("/docs never loads anything from the network", FLAG),
    **dict.fromkeys(("data_parallel_supervisor_port", "dp_supervisor_probe_interval_s", "dp_supervisor_probe_timeout_s",
                     "dp_supervisor_probe_failure_threshold"), ("the engines of a server have one port", TEXT)),
    **dict.fromkeys(("cohere_is_reasoning_model", "enable_flash_late_interaction"), (_ABSENT, FLAG)),
    "cohere_format": (_ABSENT, TEXT),
    "enable_reasoning": ("--reasoning-parser is enough", FLAG),
}  # fmt: skip
SERVER_SHORT_FLAGS: dict[str, str] = {}
