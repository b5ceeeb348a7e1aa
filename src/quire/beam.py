"""Beam search: rounds of one-token requests that fork the pages of their beam's previous round.

Every round asks the engine for the best continuations of each beam. A round's requests are held after they finish, so the next
round shares their pages by reference and copies only the partly filled last one.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from tqdm import tqdm

from quire.interrupt import interrupts_between_steps
from quire.llm_engine import LLMEngine
from quire.types.errors import EngineError
from quire.types.outputs import BeamSearchOutput, BeamSearchSequence, Logprob, TokenDelta, TokenLogprobs
from quire.types.plan import TopLogprobs
from quire.types.prompts import PromptType
from quire.types.request import EngineRequest
from quire.types.sampling import BeamSearchParams, SamplingParams

_names = itertools.count()


@dataclass
class _Beam:
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    total: float = 0.0
    parent: str | None = None  # the engine request whose pages hold these tokens but the last


@dataclass
class _Search:
    """One prompt's beams."""

    prompt: tuple[int, ...]
    salt: tuple[str, ...]
    beams: list[_Beam]
    complete: list[BeamSearchSequence] = field(default_factory=list)


def search_beams(
    engine: LLMEngine, prompts: Sequence[PromptType], params: BeamSearchParams, use_tqdm: bool
) -> list[BeamSearchOutput]:
    searches = []
    for prompt in prompts:
        prepared = engine.prepare("beam", prompt, SamplingParams(temperature=0.0, max_tokens=1))
        searches.append(_Search(prepared.prompt_ids, prepared.requests[0].salt, [_Beam(prepared.prompt_ids)]))
    held: list[str] = []
    with interrupts_between_steps() as check, _released(engine, held):
        for _ in tqdm(range(params.max_tokens), desc="Beam search", disable=not use_tqdm):
            open_searches = [s for s in searches if s.beams]
            if not open_searches:
                break
            requests = [(s, beam, _next_request(s, beam, params)) for s in open_searches for beam in s.beams]
            answers = _run_round(engine, [request for _, _, request in requests], check)
            engine.core.release(held)
            held[:] = [request.id for _, _, request in requests]
            for search in open_searches:
                grown = [(beam, request, answers[request.id]) for s, beam, request in requests if s is search]
                _advance(engine, search, grown, params)
    return [BeamSearchOutput(sequences=_best(engine, search, params)) for search in searches]


@contextmanager
def _released(engine: LLMEngine, held: list[str]) -> Iterator[None]:
    try:
        yield
    finally:
        engine.core.release(held)


def _next_request(search: _Search, beam: _Beam, params: BeamSearchParams) -> EngineRequest:
    rescaled = params.temperature not in (0.0, 1.0)  # then every logprob is needed to normalize again
    return EngineRequest(
        id=f"beam-{next(_names)}",
        prompt=beam.tokens,
        params=SamplingParams(temperature=0.0, max_tokens=1, logprobs=-1 if rescaled else 2 * params.beam_width),
        seed=0,
        stop_ids=frozenset(),
        eos_ids=frozenset(),
        arrival=0.0,
        salt=search.salt,
        fork_of=beam.parent,
        hold=True,
    )


def _run_round(engine: LLMEngine, requests: list[EngineRequest], check: Callable[[], None]) -> dict[str, TopLogprobs]:
    """Runs the requests to the end; whatever interrupts it, none stays behind."""
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


def _advance(
    engine: LLMEngine, search: _Search, grown: list[tuple[_Beam, EngineRequest, TopLogprobs]], params: BeamSearchParams
) -> None:
    """Every beam's best continuations compete; an end-of-text one leaves the race complete."""
    candidates: list[_Beam] = []
    for beam, request, top in grown:
        best = dict(_continuations(top, params))
        for token, value in best.items():
            table = {t: Logprob(v, rank) for rank, (t, v) in enumerate(best.items(), start=1)}
            candidates.append(_Beam((*beam.tokens, token), (*beam.logprobs, table), beam.total + value, request.id))
    candidates.sort(key=lambda beam: -beam.total)
    search.beams = []
    for beam in candidates:
        ended = not params.ignore_eos and beam.tokens[-1] in engine.inputs.eos_ids
        full = len(beam.tokens) >= engine.max_model_len
        if ended or full:
            search.complete.append(_sequence(beam, ended))
        else:
            search.beams.append(beam)
        if len(search.beams) == params.beam_width:
            break


def _continuations(top: TopLogprobs, params: BeamSearchParams) -> Iterator[tuple[int, float]]:
    """The 2 * beam_width most likely next tokens, at the asked temperature."""
    ids, values = top.ids[0, 1:], top.values[0, 1:]
    if params.temperature not in (0.0, 1.0):
        scaled = values.astype(np.float64) / params.temperature
        peak = scaled.max()
        values = scaled - (peak + np.log(np.exp(scaled - peak).sum()))
    for token, value in zip(ids[: 2 * params.beam_width].tolist(), values[: 2 * params.beam_width].tolist(), strict=True):
        yield int(token), float(value)


def _sequence(beam: _Beam, ended: bool) -> BeamSearchSequence:
    return BeamSearchSequence(
        tokens=list(beam.tokens),
        logprobs=list(beam.logprobs),
        cum_logprob=beam.total,
        finish_reason="stop" if ended else "length",
        stop_reason=beam.tokens[-1] if ended else None,
    )


def _best(engine: LLMEngine, search: _Search, params: BeamSearchParams) -> list[BeamSearchSequence]:
    found = search.complete + [_sequence(beam, ended=False) for beam in search.beams]
    found.sort(key=lambda sequence: -_score(sequence, params.length_penalty))
    best = found[: params.beam_width]
    for sequence in best:
        if sequence.finish_reason == "stop" and not params.include_stop_str_in_output:
            sequence.tokens.pop()
        if engine.tokenizer is not None:
            sequence.text = engine.tokenizer.decode(sequence.tokens)
    return best


def _score(sequence: BeamSearchSequence, length_penalty: float) -> float:
    """Log-probability per token to the power of the penalty; an end-of-text token is not counted as length."""
    length = len(sequence.tokens) - (sequence.finish_reason == "stop")
    return sequence.cum_logprob / float(max(length, 1) ** length_penalty)
