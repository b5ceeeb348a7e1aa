"""One question, answered as soon as the server is ready: the user sees at once that it works."""

import logging

from quire.async_llm import AsyncLLM
from quire.types.errors import QuireError, RequestError
from quire.types.prompts import PromptType
from quire.types.sampling import RequestOutputKind, SamplingParams

MOST_TOKENS = 64
logger = logging.getLogger(__name__)


async def print_sample(llm: AsyncLLM, question: str) -> None:
    """Failing is no reason not to serve."""
    try:
        print(f"> {question}\n{await _answer(llm, question)}", flush=True)
    except QuireError as error:
        logger.warning("the sample could not be answered: %s", error)


async def _answer(llm: AsyncLLM, question: str) -> str:
    params = SamplingParams(temperature=0.0, max_tokens=MOST_TOKENS, output_kind=RequestOutputKind.FINAL_ONLY)
    text = ""
    async for output in llm.generate(await _prompt(llm, question), params, "sample"):
        text = output.outputs[0].text
    return text.strip()


async def _prompt(llm: AsyncLLM, question: str) -> PromptType:
    """As a user's message, or, for a model without a chat template, as it is."""
    try:
        text, ids = await llm.render_chat([{"role": "user", "content": question}], add_generation_prompt=True)
    except RequestError:
        return question
    return {"prompt": text, "prompt_token_ids": ids}
