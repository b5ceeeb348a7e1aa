"""Start and stop profiles on every rank of every engine, and what the callers are told. Does not import torch."""

import re
import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quire.config.config import Config
from quire.features.profiling.host import NAME, REMEDY, read_settings
from quire.types.errors import EngineError, InvalidParameter, NotSupported, RequestError

if TYPE_CHECKING:
    from quire.llm_engine import LLMEngine

PART = ("call_part", "profiling")
RUNNING = "a profile is already running. Stop it first (stop_profile)."
_PREFIX = re.compile(r"[A-Za-z0-9._-]{1,80}")


def name_profile(config: Config, prefix: str | None) -> str:
    """Return the name of a new profile; raise why there can be none."""
    require_profiler(config)
    if prefix is not None and not (isinstance(prefix, str) and _PREFIX.fullmatch(prefix)):
        raise InvalidParameter(
            f"profile_prefix must be 1 to 80 letters, digits, dots, underscores or hyphens; got {prefix!r}. Leave it out or "
            "change it.", "profile_prefix",
        )  # fmt: skip
    return f"{prefix or 'quire'}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def require_profiler(config: Config) -> None:
    if read_settings(config.args.profiler_config) is None:
        raise NotSupported(f"profiles require {NAME}; got none. Start with {REMEDY}", NAME)


def refused_start(answers: Sequence[Sequence[str]]) -> Exception | None:
    """Return why the profile did not begin on all ranks; None: it did."""
    if errors := [text for kind, text in answers if kind == "error"]:
        return EngineError(f"the profile was not started: {'; '.join(dict.fromkeys(errors))}")
    return RequestError(RUNNING) if any(kind == "busy" for kind, _ in answers) else None


def written_files(answers: Sequence[Sequence[str]]) -> list[str]:
    """Return the files of a stopped profile, in the order of ranks; raise why there are none, or fewer."""
    files = [text for kind, text in answers if kind == "ok" and text]
    if errors := [text for kind, text in answers if kind == "error"]:
        also = f". Written: {', '.join(files)}" if files else ""
        raise EngineError(f"the profile could not be written: {'; '.join(dict.fromkeys(errors))}{also}")
    if all(kind == "idle" for kind, _ in answers):
        raise RequestError(
            "no profile is running. Start one first (start_profile); an engine that was restarted has lost its profile."
        )
    if not files and any(kind == "empty" for kind, _ in answers):
        raise RequestError("the profile is empty: no step ran after delay_iterations. Send requests while it is running.")
    return files


class EngineProfiles:
    """`start_profile` and `stop_profile` of `LLMEngine`."""

    config: Config

    def call_all(self, method: str, *args: Any) -> list[Any]:
        """Call a method on every rank of every engine."""
        raise NotImplementedError

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Profile the following steps on every rank. `profile_prefix`: begins the names of the traces."""
        name = name_profile(self.config, profile_prefix)
        refusal = refused_start(self.call_all(*PART, "start", name))
        if refusal is not None:
            self.call_all(*PART, "discard", name)
            raise refusal

    def stop_profile(self) -> list[str]:
        """Stop the profile; return the traces, one for each rank. The profiler 'cuda' writes none."""
        require_profiler(self.config)
        return written_files(self.call_all(*PART, "stop"))


class LLMProfiles:
    """`start_profile` and `stop_profile` of `LLM`."""

    llm_engine: "LLMEngine"

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Profile the following steps on every rank. `profile_prefix`: begins the names of the traces."""
        self.llm_engine.start_profile(profile_prefix)

    def stop_profile(self) -> list[str]:
        """Stop the profile; return the traces, one for each rank. The profiler 'cuda' writes none."""
        return self.llm_engine.stop_profile()


class AsyncProfiles:
    """`start_profile` and `stop_profile` of `AsyncLLM`."""

    config: Config

    async def call_all(self, method: str, *args: Any) -> list[Any]:
        """Call a method on every rank of every engine."""
        raise NotImplementedError

    async def start_profile(self, profile_prefix: str | None = None) -> None:
        """Profile the following steps on every rank. `profile_prefix`: begins the names of the traces."""
        name = name_profile(self.config, profile_prefix)
        refusal = refused_start(await self.call_all(*PART, "start", name))
        if refusal is not None:
            await self.call_all(*PART, "discard", name)
            raise refusal

    async def stop_profile(self) -> list[str]:
        """Stop the profile; return the traces, one for each rank. The profiler 'cuda' writes none."""
        require_profiler(self.config)
        return written_files(await self.call_all(*PART, "stop"))
