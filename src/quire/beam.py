"""LLM.beam_search: rounds of one-token requests that fork the pages of their beam's previous round.

A round's requests are held after they finish, so the next round shares their pages by reference and copies only the partly
filled last one.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import numpy as np
from tqdm import tqdm

from quire.features.logits_processors.host import refuse_beam_search
from quire.llm_engine import LLMEngine
from quire.step_loop import interrupts_between_steps
from quire.text.beam_search import Beam, BeamSearch
from quire.text.outputs import read_logprobs
from quire.text.tokenizer import Tokenizer
from quire.types.errors import EngineError
from quire.types.outputs import BeamSearchOutput, BeamSearchSequence, TokenDelta
from quire.types.plan import TopLogprobs
from quire.types.prompts import NO_EXTRAS, Extras, PromptType
from quire.types.request import EngineRequest
from quire.types.sampling import BeamSearchParams, SamplingParams

_names = itertools.count()


def search_beams(
    engine: LLMEngine, prompts: Sequence[PromptType], params: BeamSearchParams, use_tqdm: bool, extras: Sequence[Extras] = ()
) -> list[BeamSearchOutput]:
    refuse_beam_search(engine.config, "logits_processors")
    rescaled = params.temperature not in (0.0, 1.0)  # then every logprob is needed to normalize again
    step = SamplingParams(temperature=0.0, max_tokens=1, logprobs=-1 if rescaled else 2 * params.beam_width)
    first = SamplingParams(temperature=0.0, max_tokens=1)
    each = zip(prompts, extras or [NO_EXTRAS] * len(prompts), strict=True)
    prepared = [engine.prepare("beam", prompt, first, extras=extra) for prompt, extra in each]
    asked = [one.requests[0] for one in prepared]
    searches = [BeamSearch(one.prompt, params, one.eos_ids, engine.max_model_len) for one in asked]
    tools = [engine.outputs.tools_for(one) for one in prepared]
    held: list[list[str]] = [[] for _ in searches]  # by place: the requests whose pages hold the beams of the latest round
    with interrupts_between_steps() as check:
        try:
            for _ in tqdm(range(params.max_tokens), desc="Beam search", disable=not use_tqdm):
                requests = [
                    [_next_request(one, beam, step, parents) for beam in search.beams] if search.open else []
                    for one, search, parents in zip(asked, searches, held, strict=True)
                ]
                if not any(requests):
                    break
                answers = _run_round(engine, [request for group in requests for request in group], check)
                engine.core.release(itertools.chain(*held))
                held = [[request.id for request in group] for group in requests]
                for search, group, (_, texts) in zip(searches, requests, tools, strict=True):
                    if group:
                        tops = [(_rescaled(answers[one.id], params), (*one.prompt, *one.resumed)) for one in group]
                        search.advance([read_logprobs(top, 0, texts, before, ranked=True) for top, before in tops])
        finally:
            engine.core.release(itertools.chain(*held))
    return [
        BeamSearchOutput([_sequence(tokenizer, search, beam) for beam in search.best()])
        for search, (tokenizer, _) in zip(searches, tools, strict=True)
    ]


def _next_request(asked: EngineRequest, beam: Beam, params: SamplingParams, parents: Sequence[str]) -> EngineRequest:
    return replace(
        asked,
        id=f"beam-{next(_names)}",
        resumed=tuple(beam.tokens),  # not part of the prompt, all of which may attend to all of it
        params=msgspec.structs.replace(params, max_tokens=len(beam.tokens) + 1),
        stop_ids=frozenset(),
        eos_ids=frozenset(),
        fork_of=parents[beam.parent] if parents else None,
        hold=True,
    )


def _run_round(engine: LLMEngine, requests: list[EngineRequest], check: Callable[[], None]) -> dict[str, TopLogprobs]:
    """Run the requests to the end; after an interruption none is left in the engine."""
    answers: dict[str, TopLogprobs] = {}
    waiting = {request.id for request in requests}
    try:
        for request in requests:
            engine.core.add(request)
        while waiting:
            check()
            for delta in engine.core.step():
                if delta.request_id in waiting:
                    waiting.discard(delta.request_id)
                    answers[delta.request_id] = _only_logprobs(delta)
    finally:
        if waiting:
            ids = [request.id for request in requests]
            engine.core.abort(ids)
            engine.core.release(ids)
    return answers


def _only_logprobs(delta: TokenDelta) -> TopLogprobs:
    if delta.finish_reason == "error" or not delta.logprobs:
        raise EngineError(f"beam search failed: {delta.error or delta.finish_reason}")
    return delta.logprobs[0]


def _rescaled(top: TopLogprobs, params: BeamSearchParams) -> TopLogprobs:
    """The 2 * beam_width most likely next tokens, at the asked temperature."""
    if params.temperature in (0.0, 1.0):
        return top
    scaled = top.values.astype(np.float64) / params.temperature
    rest = scaled[:, 1:]  # the first column is the chosen one, once more
    peak = rest.max()
    values = scaled - (peak + np.log(np.exp(rest - peak).sum()))
    count = 1 + 2 * params.beam_width
    return TopLogprobs(top.ids[:, :count], values[:, :count], top.rank)


def _sequence(tokenizer: Tokenizer | None, search: BeamSearch, beam: Beam) -> BeamSearchSequence:
    tokens = [*search.prompt, *search.shown(beam)]
    return BeamSearchSequence(
        tokens=tokens,
        logprobs=list(beam.logprobs),
        cum_logprob=beam.total,
        text=None if tokenizer is None else tokenizer.decode(tokens),
        finish_reason="stop" if beam.ended else "length",
        stop_reason=beam.tokens[-1] if beam.ended else None,
    )
