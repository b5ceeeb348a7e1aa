"""use_beam_search: rounds of one-token requests, one per beam. The prefix cache makes a round cheap.

`quire.beam` runs the rounds of an offline search, where beams can share pages without being looked up.
"""

from dataclasses import replace
from itertools import islice, repeat
from typing import Any

from quire.features.logits_processors.host import refuse_beam_search
from quire.features.media.host import media_of
from quire.serve.errors import GenerationFailed
from quire.serve.generation import GenerationJob, collect
from quire.serve.inputs import SAME, beam_params, wanted_logprobs
from quire.serve.protocol import GenerationFields
from quire.serve.server import Server
from quire.text.beam_search import Beam, BeamSearch
from quire.text.detokenizer import new_detokenizer
from quire.text.tokenizer import Tokenizer
from quire.types.errors import InvalidParameter, NotSupported
from quire.types.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from quire.types.sampling import SamplingParams

# of the fields that say how to sample or when to stop, those that a search heeds; the others must ask for nothing
_HEEDED = {
    "n", "temperature", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens",
    "stream_interval",
}  # fmt: skip
_PLAIN = SamplingParams()
_NEUTRAL: dict[str, tuple[Any, ...]] = {"top_k": (0, -1), "logit_bias": ({},), "vllm_xargs": ({},), "echo": (False,)}
_NOT_FOR_BEAMS = {
    name: (None, *_NEUTRAL.get(name, (getattr(_PLAIN, name, None),)))
    for name in (*SAME, "prompt_logprobs", "repetition_detection", "echo", "vllm_xargs")
    if name not in _HEEDED
}


async def search_beams(server: Server, job: GenerationJob, request: GenerationFields) -> list[RequestOutput]:
    """Like `collect`: one output per prompt, with the n best texts as its choices, best first."""
    width = request.n or 1
    _check(server, job, request, width)
    searches = [
        BeamSearch(prompt.ids, beam_params(request, params.max_tokens or 1), server.ends_of(prompt), server.llm.max_model_len)
        for prompt, params in zip(job.prompts, job.params, strict=True)
    ]
    step = SamplingParams(temperature=0.0, max_tokens=1, logprobs=2 * width)
    cached: list[int] = []
    while running := [search for search in searches if search.open]:
        prompts = [replace(job.prompts[0], text=None, ids=[*one.prompt, *beam.tokens]) for one in running for beam in one.beams]
        outputs = await collect(server, replace(job, prompts=prompts, params=[step] * len(prompts)))
        cached = cached or [output.num_cached_tokens for output in outputs]  # the first round is of the prompts
        results = iter(outputs)
        for search in running:
            search.advance([_chances(output) for output in islice(results, len(search.beams))])
    return [_output(server, job, request, i, search, cached[i]) for i, search in enumerate(searches)]


def _check(server: Server, job: GenerationJob, request: GenerationFields, width: int) -> None:
    for name, neutral in _NOT_FOR_BEAMS.items():
        if getattr(request, name, None) not in neutral:
            raise InvalidParameter(f"{name} cannot be used with a beam search", name)
    refuse_beam_search(server.llm.config, "use_beam_search")
    media = media_of(server.llm.config)
    if media is not None and media.family.bidirectional == "prompt" and any(prompt.extras.media for prompt in job.prompts):
        raise NotSupported(
            f"use_beam_search is not supported with images in {server.llm.config.facts.architecture}, whose prompts attend to "
            "later tokens. Remove one of them",
            "use_beam_search",
        )
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


def _output(
    server: Server, job: GenerationJob, request: GenerationFields, prompt: int, search: BeamSearch, cached_tokens: int
) -> RequestOutput:
    top = wanted_logprobs(request)[0]
    choices = [
        CompletionOutput(
            index=index,
            text=_text(server.tokenizer_of(job.prompts[prompt]), request, search, beam),
            token_ids=list(beam.tokens),
            cumulative_logprob=beam.total,
            logprobs=None if top is None else list(map(_likeliest, beam.tokens, beam.logprobs, repeat(top))),
            finish_reason="stop" if beam.ended else "length",
            stop_reason=beam.tokens[-1] if beam.ended else None,
        )
        for index, beam in enumerate(search.best())
    ]
    return RequestOutput(
        request_id=job.id,
        prompt=job.prompts[prompt].text,
        prompt_token_ids=job.prompts[prompt].ids,
        prompt_logprobs=None,
        outputs=choices,
        finished=True,
        num_cached_tokens=cached_tokens,
    )


def _likeliest(chosen: int, position: TokenLogprobs, top: int) -> TokenLogprobs:
    """The chosen token first, as everywhere, and the `top` likeliest; -1: all that are known."""
    return {
        token: chance
        for token, chance in {chosen: position[chosen], **position}.items()
        if token == chosen or top == -1 or (chance.rank or 0) <= top
    }


def _text(tokenizer: Tokenizer | None, request: GenerationFields, search: BeamSearch, beam: Beam) -> str:
    if tokenizer is None:
        return ""
    detokenizer = new_detokenizer(tokenizer, search.prompt, request.skip_special_tokens, request.spaces_between_special_tokens)
    return detokenizer.feed(search.shown(beam)) + detokenizer.finish()
