"""What all requests of Ollama's API share: the model's name, checks of fields and options, and options as fields of a chat."""

import difflib
from collections.abc import Mapping
from typing import Any

from starlette.types import Receive, Scope, Send

from quire.serve.body import JSONRoute
from quire.serve.errors import Terms
from quire.serve.field_table import check_fields
from quire.serve.limits import check_limits
from quire.serve.ollama.protocol import HINTS, REFUSED, REFUSED_FIELDS, WORKING, OllamaFields, OllamaGenerationFields, Options
from quire.serve.protocol import RequestBody
from quire.serve.server import Server
from quire.types.checks import shown
from quire.types.errors import InvalidParameter, NotSupported

LATEST = ":latest"
MAX_SHOWN_CHARS = 80  # of names that clients choose
_PENALTIES = {"repeat_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}  # and the values of none

TERMS: Terms = (
    (r"response_format(\.json_schema\.schema)?", "format"),
    ("max_completion_tokens|max_tokens", "options.num_predict"),
    ("repetition_penalty", "options.repeat_penalty"),
    ("reasoning_effort", "think"),
    *((field, f"options.{field}") for field in WORKING if field == WORKING[field]),
)
GENERATE_TERMS: Terms = (*TERMS, (r"messages(\[\d+\](\.content)?)?", "prompt"))
_BROWSER_HEADERS = (b"origin", b"sec-fetch-site")


class OllamaRoute(JSONRoute):
    """A route that takes JSON with any content type, as Ollama does: curl's default is that of forms.

    Not from browsers: for a request with another type than JSON they ask no permission of this server, so any web page
    could send one. They send Origin with every POST.
    """

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = scope["headers"]
        if not any(name in _BROWSER_HEADERS for name, _ in headers):
            kept = [(name, value) for name, value in headers if name != b"content-type"]
            scope = {**scope, "headers": [*kept, (b"content-type", b"application/json")]}
        await super().answer(scope, receive, send)


def full_name(name: str) -> str:
    """Return the name as Ollama lists it: with a tag."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


async def find_model(server: Server, request: RequestBody) -> str:
    """Return the name by which this server knows the request's model: its tag `latest` may be there or not."""
    check_limits(request, server.limits)
    name = request.model
    if name is None:
        return server.names[0]
    for known in dict.fromkeys((name, name.removesuffix(LATEST), full_name(name))):
        if known in server.names or await server.adapters.find(known) is not None:
            return known
    if server.settings.accept_any_model_name:
        return name
    raise server.no_such_model(name)


def check_request(server: Server, request: OllamaFields, elsewhere: Mapping[str, str] | None = None) -> Options:
    """Raise an error for fields and options that are not supported; return the options.

    elsewhere: fields of other endpoints, and where they belong
    """
    refused = REFUSED_FIELDS | dict(elsewhere or {})
    for name, value in (request.model_extra or {}).items():
        if value and name in refused:
            raise NotSupported(f"{name} cannot be used: {refused[name]}", name)
        if value is not None and name in Options.model_fields:
            raise InvalidParameter(f"{name} is an option in this protocol. Send it in options", name)
    unknown = [name for name in check_fields(request) if name not in refused]
    if unknown:
        server.unknown_fields.log(request, unknown)
    options = request.options or Options.model_validate({})
    _check_options(server, options)
    return options


def _check_options(server: Server, options: Options) -> None:
    for name in options.model_extra or ():
        near = difflib.get_close_matches(name[:MAX_SHOWN_CHARS], Options.model_fields, n=1)
        hint = f"Send {near[0]}, or leave it out" if near else "Leave it out"
        raise InvalidParameter(f"options.{name[:MAX_SHOWN_CHARS]} is not an option of Ollama. {hint}", "options")
    for name, (neutral, instead) in REFUSED.items():
        value = getattr(options, name)
        if value not in (None, neutral):
            raise NotSupported(
                f"options.{name} must be {neutral} here; got {shown(value)}. Leave it out, or {instead}", "options"
            )
    longest = server.llm.max_model_len
    if options.num_ctx is not None and options.num_ctx > longest:
        raise InvalidParameter(
            f"options.num_ctx must be at most the model's context of {longest} tokens; got {shown(options.num_ctx)}. "
            "Leave it out, or start the server with a larger --max-model-len",
            "options",
        )
    penalized = any(getattr(options, name) not in (None, neutral) for name, neutral in _PENALTIES.items())
    if penalized and options.repeat_last_n not in (None, -1):
        message = f"options.repeat_last_n must be -1 here, since penalties cover all tokens; got {shown(options.repeat_last_n)}"
        raise NotSupported(f"{message}. Leave it out", "options")


def sampling_fields(options: Options, limit: str) -> dict[str, Any]:
    """Return the fields of a chat or completion that the options set. limit: the field of the answer's length"""
    given = {field: getattr(options, name) for name, field in WORKING.items() if getattr(options, name) is not None}
    tokens = given.pop(WORKING["num_predict"], 0)
    if tokens < -2:
        message = f"options.num_predict must be at least -2; got {shown(tokens)}"
        raise InvalidParameter(f"{message}. Leave it out, or send -1, for as many tokens as fit", "options")
    return {**given, limit: tokens if tokens > 0 else None}


def answer_fields(request: OllamaGenerationFields) -> dict[str, Any]:
    """Return the fields of a chat or completion for the form of the answer."""
    fields: dict[str, Any] = {"stream": request.stream is not False}
    if isinstance(request.format, dict):
        schema = {"name": "format", "schema": request.format}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif request.format:
        fields["response_format"] = {"type": "json_object"}
    if request.top_logprobs and not request.logprobs:
        raise InvalidParameter("top_logprobs requires logprobs=true. Send it, or leave top_logprobs out", "top_logprobs")
    return fields


assert {*WORKING, *HINTS, *REFUSED, "repeat_last_n"} == set(Options.model_fields)
