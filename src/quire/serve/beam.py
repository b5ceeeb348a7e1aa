"""Beam search over AsyncLLM: rounds of one-token requests, one per beam. The prefix cache makes a round cheap.

`quire.beam` does the same for the offline engine, where beams can share pages without being looked up.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from quire.serve.errors import GenerationFailed
from quire.serve.generation import Job, collect
from quire.serve.prompts import Prompt
from quire.serve.protocol.fields import GenerationFields
from quire.serve.sampling import beam_params, wanted_logprobs
from quire.serve.server import Server
from quire.text.detokenizer import Detokenizer
from quire.types.errors import InvalidParameter
from quire.types.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobs
from quire.types.sampling import BeamSearchParams, SamplingParams

# fields that say how to sample or when to stop, and their values when nothing is asked for
_NOT_FOR_BEAMS: dict[str, tuple[Any, ...]] = {
    "top_p": (None, 1.0),
    "top_k": (None, 0, -1),
    "min_p": (None, 0.0),
    "repetition_penalty": (None, 1.0),
    "presence_penalty": (None, 0.0),
    "frequency_penalty": (None, 0.0),
    "seed": (None,),
    "stop": (None, []),
    "stop_token_ids": (None, []),
    "min_tokens": (0,),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "logprob_token_ids": (None,),
    "prompt_logprobs": (None,),
    "repetition_detection": (None,),
    "echo": (None, False),
}


@dataclass(frozen=True)
class _Beam:
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    total: float = 0.0
    ended: bool = False  # with an end-of-text token, the last of `tokens`

    def score(self, length_penalty: float) -> float:
        """Log-probability per token to the power of the penalty; an end-of-text token is not counted as length."""
        return self.total / float(max(len(self.tokens) - self.ended, 1) ** length_penalty)


@dataclass
class _Search:
    """One prompt's beams."""

    prompt: Prompt
    params: BeamSearchParams
    beams: list[_Beam] = field(default_factory=lambda: [_Beam()])
    complete: list[_Beam] = field(default_factory=list)
    cached_tokens: int = 0

    @property
    def open(self) -> bool:
        return bool(self.beams) and len(self.beams[0].tokens) < self.params.max_tokens

    def advance(self, grown: list[tuple[_Beam, TokenLogprobs]], eos_ids: frozenset[int]) -> None:
        """Every beam's likeliest continuations compete; one that ends the text leaves the race complete."""
        candidates = sorted(_continuations(grown, eos_ids, self.params.ignore_eos), key=lambda beam: -beam.total)
        self.beams = []
        for beam in candidates:
            (self.complete if beam.ended else self.beams).append(beam)
            if len(self.beams) == self.params.beam_width:
                break

    def best(self) -> list[_Beam]:
        found = sorted(self.complete + self.beams, key=lambda beam: -beam.score(self.params.length_penalty))
        return found[: self.params.beam_width]


async def search_beams(server: Server, job: Job, request: GenerationFields) -> list[RequestOutput]:
    """Like `collect`: one output per prompt, with the n best texts as its choices, best first."""
    width = request.n or 1
    _check(server, request, width)
    eos_ids = server.eos_ids
    searches = [
        _Search(prompt, beam_params(request, params.max_tokens or 1))
        for prompt, params in zip(job.prompts, job.params, strict=True)
    ]
    step = SamplingParams(temperature=0.0, max_tokens=1, logprobs=2 * width, detokenize=False)
    while running := [(search, beam) for search in searches if search.open for beam in search.beams]:
        prompts = [Prompt(None, [*search.prompt.ids, *beam.tokens]) for search, beam in running]
        outputs = await collect(server, replace(job, prompts=prompts, params=[step] * len(prompts)))
        told = [(search, beam, output) for (search, beam), output in zip(running, outputs, strict=True)]
        for search in {id(search): search for search, _ in running}.values():
            mine = [(beam, output) for owner, beam, output in told if owner is search]
            if not mine[0][0].tokens:
                search.cached_tokens = mine[0][1].num_cached_tokens
            search.advance([(beam, _chances(output)) for beam, output in mine], eos_ids)
    return [_output(server, job, request, search) for search in searches]


def _check(server: Server, request: GenerationFields, width: int) -> None:
    for name, neutral in _NOT_FOR_BEAMS.items():
        if getattr(request, name, None) not in neutral:
            raise InvalidParameter(f"{name} cannot be used with a beam search", name)
    most = server.llm.config.max_logprobs
    if most != -1 and 2 * width > most:
        raise InvalidParameter(
            f"n={width} is too wide a beam: it needs 2 * n logprobs and this server gives {most} (max_logprobs)", "n"
        )


def _chances(output: RequestOutput) -> TokenLogprobs:
    [choice] = output.outputs
    position = choice.logprobs[0] if choice.logprobs else None
    if position is None:
        raise GenerationFailed(f"a beam ended with {choice.finish_reason!r} before its next token")
    return position


def _continuations(grown: list[tuple[_Beam, TokenLogprobs]], eos_ids: frozenset[int], ignore_eos: bool) -> Iterator[_Beam]:
    for beam, chances in grown:
        for token, chance in chances.items():
            ended = not ignore_eos and token in eos_ids
            # the chosen token comes first, as it does everywhere
            told = {token: chance, **chances}
            yield _Beam((*beam.tokens, token), (*beam.logprobs, told), beam.total + chance.logprob, ended)


def _output(server: Server, job: Job, request: GenerationFields, search: _Search) -> RequestOutput:
    top = wanted_logprobs(request)[0]
    choices = []
    for index, beam in enumerate(search.best()):
        logprobs = None if top is None else [_likeliest(position, top) for position in beam.logprobs]
        choices.append(
            CompletionOutput(
                index=index,
                text=_text(server, request, search, beam),
                token_ids=list(beam.tokens),
                cumulative_logprob=beam.total,
                logprobs=logprobs,
                finish_reason="stop" if beam.ended else "length",
            )
        )
    return RequestOutput(
        request_id=job.id,
        prompt=search.prompt.text,
        prompt_token_ids=search.prompt.ids,
        prompt_logprobs=None,
        outputs=choices,
        finished=True,
        num_cached_tokens=search.cached_tokens,
    )


def _likeliest(position: TokenLogprobs, top: int) -> TokenLogprobs:
    """The chosen token, which is the first, and the `top` likeliest; -1: all that are known."""
    chosen = next(iter(position))
    return {
        token: Logprob(chance.logprob, chance.rank, chance.decoded_token)
        for token, chance in position.items()
        if token == chosen or top == -1 or (chance.rank or 0) <= top
    }


def _text(server: Server, request: GenerationFields, search: _Search, beam: _Beam) -> str:
    if server.llm.tokenizer is None:
        return ""
    shown = beam.tokens[:-1] if beam.ended and not request.include_stop_str_in_output else beam.tokens
    detokenizer = Detokenizer(
        server.llm.tokenizer, search.prompt.ids, request.skip_special_tokens, request.spaces_between_special_tokens
    )
    return detokenizer.feed(shown) + detokenizer.finish()
