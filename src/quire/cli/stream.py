"""Prints one request's text as it is generated."""

import itertools

from quire.llm_engine import LLMEngine
from quire.step_loop import interrupts_between_steps
from quire.types.errors import EngineError
from quire.types.prompts import PromptType
from quire.types.sampling import RequestOutputKind, SamplingParams

_ids = itertools.count()


def print_stream(engine: LLMEngine, prompt: PromptType, params: SamplingParams) -> str:
    """Returns the whole text. Ctrl-C ends the request and is passed on."""
    request_id = f"cli-{next(_ids)}"
    params = params.clone()
    params.output_kind = RequestOutputKind.DELTA
    engine.add_request(request_id, prompt, params)
    parts: list[str] = []
    try:
        with interrupts_between_steps() as check:
            while engine.has_unfinished_requests():
                check()
                for output in engine.step():
                    for choice in output.outputs:
                        print(choice.text, end="", flush=True)
                        parts.append(choice.text)
                        if choice.error:
                            raise EngineError(choice.error)
    finally:
        engine.abort_request(request_id)
    return "".join(parts)
