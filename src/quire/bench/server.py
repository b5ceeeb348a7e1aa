"""Questions that are put to the server before the load: is it there, which model, how large is its vocabulary."""

import asyncio
import time
from typing import Any

from quire.bench.client import Client, WholeAnswer, reason
from quire.bench.openai import error_text
from quire.bench.samples import WORDS
from quire.types.errors import EngineError

RETRY_SECONDS = 0.5
UNAUTHORIZED, UNAVAILABLE = 401, 503
CHARACTERS_PER_TOKEN = 4  # of English text, where nobody can count


def _probe() -> str:
    """Words and scripts from everywhere, so that some of their tokens stand near the end of any vocabulary."""
    scripts = ((0x0400, 0x0460), (0x05D0, 0x05EB), (0x0620, 0x0650), (0x0905, 0x0940), (0x3041, 0x30FF), (0xAC00, 0xB000))
    letters = "".join(chr(code) for first, last in scripts for code in range(first, last, 3))
    chinese = "".join(chr(code) for code in range(0x4E00, 0x9FA5, 61))
    names = " ".join(word.capitalize() + word + word.upper() for word in WORDS)
    return f"{' '.join(WORDS)} {names} {letters} {chinese}"


class MeasuredServer:
    """Also counts tokens; where the server has no `/tokenize`, `estimated` becomes true and text is divided by four."""

    def __init__(self, client: Client, model: str | None = None) -> None:
        self.client = client
        self.model = model
        self.estimated = False

    async def wait_ready(self, seconds: float) -> None:
        """Until the server listens and does not say 503, at most this long; with 0 it must listen now."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                await self.client.reach()
                if not seconds or (await self._ask("/v1/models")).status != UNAVAILABLE:
                    return
                trouble = EngineError(f"the server at {self.client.origin} is not ready after {seconds:g} s")
            except EngineError as error:
                trouble = error
            if time.monotonic() >= deadline:
                raise trouble
            await asyncio.sleep(RETRY_SECONDS)

    async def first_model(self) -> str:
        answer = await self._ask("/v1/models")
        said = answer.json()
        if answer.status != 200:
            raise self._refused(answer)
        models = said.get("data") if isinstance(said, dict) else None
        name = models[0].get("id") if isinstance(models, list) and models and isinstance(models[0], dict) else None
        if not isinstance(name, str):
            raise EngineError(f"/v1/models of {self.client.origin} lists no model; say which with --model")
        return name

    async def check_key(self) -> None:
        """Otherwise every request of the load would be told that none was given, or a wrong one."""
        answer = await self._ask("/v1/models")
        if answer.status == UNAUTHORIZED:
            raise self._refused(answer)

    def _refused(self, answer: WholeAnswer) -> EngineError:
        text = error_text(answer.json(), f"HTTP {answer.status}", answer.content)
        hint = "; give its key with --api-key or QUIRE_API_KEY" if answer.status == UNAUTHORIZED else ""
        return EngineError(f"/v1/models of {self.client.origin} answers {text}{hint}")

    async def _ask(self, endpoint: str) -> WholeAnswer:
        try:
            return await self.client.ask("GET", endpoint)
        except OSError as error:
            raise EngineError(f"{endpoint} of {self.client.origin}: {reason(error)}") from None

    async def vocab_size(self) -> int | None:
        """Ids below this one are in the vocabulary: the largest that a varied text has, plus one. None if nobody says."""
        tokens = await self._tokenize(_probe())
        return max(tokens) + 1 if tokens else None

    async def count(self, text: str) -> int:
        tokens = None if self.estimated else await self._tokenize(text)
        if tokens is None:
            self.estimated = True
            return -(-len(text) // CHARACTERS_PER_TOKEN)
        return len(tokens)

    async def version(self) -> str | None:
        said = await self._say("GET", "/version")
        version = said.get("version") if isinstance(said, dict) else None
        return version if isinstance(version, str) else None

    async def _tokenize(self, text: str) -> list[int] | None:
        question: dict[str, Any] = {"model": self.model, "prompt": text, "add_special_tokens": False}
        said = await self._say("POST", "/tokenize", question)
        tokens = said.get("tokens") if isinstance(said, dict) else None
        if not isinstance(tokens, list) or not tokens or not all(type(token) is int for token in tokens):
            return None
        return tokens

    async def _say(self, method: str, endpoint: str, question: Any = None) -> Any:
        """An optional question: None where there is no such endpoint."""
        try:
            answer = await self.client.ask(method, endpoint, question)
        except OSError:
            return None
        return answer.json() if answer.status == 200 else None
