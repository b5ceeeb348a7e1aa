"""Every failure becomes one JSON error that reveals nothing about this machine.

    RequestError                     400 BadRequestError     `param` is the field to blame
      NotSupported without a field   501 NotImplementedError the endpoint is not for this model
      FetchFailed                    422 UnprocessableEntityError an image or a video cannot be fetched
    HttpError                        its own status (413 too large, 404 no such model, ...)
    a body that is not the schema    400 Bad Request         `param` is the dotted path, as body.prompt
    anything else                    500 InternalServerError only the request id; the reason is in the server's log

A stream that has begun gets the same JSON as its last event before [DONE]. Clients of /v1/messages get Anthropic's form of it,
those of /api/chat and its like Ollama's: {"error": "one sentence"}.

An error names the field that the client sent (`FieldNames`):

    of a grammar                 structured_outputs: $.items.properties.parameters.properties.a: Invalid type
    of a chat request            tools[0].function.parameters: $.properties.a: Invalid type
    of another protocol          tools[0].input_schema: $.properties.a: Invalid type
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from typing_extensions import TypedDict

from quire.serve.protocol import GenerationFields
from quire.serve.tools import ToolUse
from quire.text.pacing import is_light, json_chunks
from quire.types.errors import EngineDead, EngineError, FetchFailed, NotSupported, RequestError
from quire.types.structured import FIELD


class ErrorInfo(TypedDict):
    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(TypedDict):
    error: ErrorInfo


class AnthropicErrorInfo(TypedDict):
    type: str
    message: str


class AnthropicErrorBody(TypedDict):
    type: Literal["error"]
    error: AnthropicErrorInfo
    request_id: str


class OllamaErrorBody(TypedDict):
    error: str


logger = logging.getLogger(__name__)

MAX_MESSAGE_CHARS = 2000
MAX_ERRORS_SHOWN = 5
RETRY_AFTER = 5  # seconds until a client should try again, here or at another server
CLIENT_GONE = 499  # for access logs and metrics only

_TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    422: "UnprocessableEntityError",
    500: "InternalServerError",
    501: "NotImplementedError",
}
_ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_OLLAMA_NAMES = "blobs|chat|copy|create|delete|embed|embeddings|generate|ps|pull|push|show|tags|version"
_OLLAMA_PATH = re.compile(rf"/api/(?:{_OLLAMA_NAMES})(?:/[^/]*)?$")
_PATHS = re.compile(rf"(?<![\w/])(?!/v[12]/|/api/(?:{_OLLAMA_NAMES})(?![\w./-]*/))(?:/[\w.@+~-]+){{2,}}/?(?:\.\w+)?")
_COUNT_OF_ERRORS = re.compile(r"^\d+ validation errors?: ")
_FIELDS_OF_A_BODY = re.compile(r"(^|; )body\.")
_ADDRESSES = re.compile(r"\b0x[0-9a-fA-F]{6,}\b")


class HttpError(HTTPException):
    """An HTTP error that the server itself decides on.

    own: a path that the client named, as it stands in the message, and as the client wrote it. This path and the files directly
    in it may appear in the message.
    """

    def __init__(self, status: int, message: str, parameter: str | None = None, own: tuple[str, str] | None = None) -> None:
        super().__init__(status_code=status, detail=message)
        self.parameter, self.own = parameter, own


class GenerationFailed(EngineError):
    """The engine ended one request with an error; other requests continue."""


def error_body(
    status: int, message: str, parameter: str | None = None, kind: str | None = None, own: tuple[str, str] | None = None
) -> ErrorBody:
    named = kind or _TYPES.get(status) or HTTPStatus(status).phrase
    return {"error": {"message": _clean(message, own), "type": named, "param": parameter, "code": status}}


def describe(error: BaseException, request_id: str) -> ErrorBody:
    """Return the error as its client may see it. Failures of the server are logged here, once."""
    if isinstance(error, RequestError):
        status = 501 if isinstance(error, NotSupported) and error.parameter is None else 400
        status = 422 if isinstance(error, FetchFailed) else status
        return error_body(status, str(error), error.parameter)
    if isinstance(error, RequestValidationError):
        return _describe_validation(error.errors())
    if isinstance(error, HttpError):
        return error_body(error.status_code, str(error.detail), error.parameter, own=error.own)
    if isinstance(error, HTTPException):
        return error_body(error.status_code, str(error.detail))
    if isinstance(error, GenerationFailed):
        logger.error("request %s failed in the engine: %s", request_id, error)
        return error_body(500, f"the engine could not finish this request: {error} (request id {request_id})")
    trace = None if isinstance(error, EngineDead) else error  # the loss of an engine is logged already
    logger.error("request %s failed: %s", request_id, error, exc_info=trace)
    what = "the engine is not available" if isinstance(error, EngineError) else "internal error"
    return error_body(500, f"{what} (request id {request_id}; the server's log has the reason)")


def error_response(error: BaseException, scope: Any) -> Response:
    body = describe(error, request_id_of(scope))
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    return json_response(shaped(body, scope), body["error"]["code"], headers)


def shaped(body: ErrorBody, scope: Any) -> ErrorBody | AnthropicErrorBody | OllamaErrorBody:
    """Return the error in the protocol of the request's path."""
    path = scope.get("path", "")
    if _OLLAMA_PATH.search(path):
        return ollama_error(body)
    return anthropic_error(body, request_id_of(scope)) if _ANTHROPIC_PATH in path else body


def anthropic_error(body: ErrorBody, request_id: str) -> AnthropicErrorBody:
    status = body["error"]["code"]
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": _as_text(body)}, "request_id": request_id}


def ollama_error(body: ErrorBody) -> OllamaErrorBody:
    return {"error": _as_text(body)}


def _as_text(body: ErrorBody) -> str:
    """Return the error as one text, with fields as the client wrote them: max_tokens: ..."""
    message, parameter = body["error"]["message"], body["error"]["param"]
    text = message if parameter is None or parameter in message else f"{parameter}: {message}"
    return _FIELDS_OF_A_BODY.sub(r"\1", _COUNT_OF_ERRORS.sub("", text))


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse(body, status, headers)


class JSONResponse(Response):
    """A large answer is encoded in time slices between other work, and sent in chunks."""

    media_type = "application/json"

    def __init__(self, body: Any, status: int, headers: dict[str, str] | None) -> None:
        self._large = None if is_light(body) else body
        super().__init__(msgspec.json.encode(body) if self._large is None else b"", status, headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._large is None:
            await super().__call__(scope, receive, send)
            return
        chunks = await json_chunks(self._large)
        self.headers["content-length"] = str(sum(map(len, chunks)))
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for i, chunk in enumerate(chunks, start=1):
            await send({"type": "http.response.body", "body": chunk, "more_body": i < len(chunks)})


def install_error_handlers(app: FastAPI) -> None:
    async def answer(request: Request, error: Exception) -> Response:
        return error_response(error, request.scope)

    for kind in (RequestError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, answer)


def request_id_of(scope: Any) -> str:
    return str(scope.get("state", {}).get("request_id", "unknown"))


def _describe_validation(errors: Sequence[Any]) -> ErrorBody:
    shown = [f"{_dotted(error['loc'])}: {error['msg']}" for error in errors[:MAX_ERRORS_SHOWN]]
    if len(errors) > len(shown):
        shown.append(f"and {len(errors) - len(shown)} more")
    plural = "s" if len(errors) != 1 else ""
    message = f"{len(errors)} validation error{plural}: {'; '.join(shown)}"
    parameter = _dotted(errors[0]["loc"]) if errors else None
    return error_body(400, message, parameter, kind=HTTPStatus.BAD_REQUEST.phrase)


def _dotted(location: Sequence[str | int]) -> str:
    return ".".join(str(part) for part in location)


def _clean(message: str, own: tuple[str, str] | None) -> str:
    """Remove files and addresses of this machine, and bound the length."""
    here, written = own or ("", "")
    parts = re.split(rf"(?<![\w/]){re.escape(here)}(?![\w.@+~-])", message) if here else [message]
    message = (written.rstrip("/") or "/").join(_ADDRESSES.sub("<address>", _PATHS.sub("<path>", part)) for part in parts)
    return message if len(message) <= MAX_MESSAGE_CHARS else message[: MAX_MESSAGE_CHARS - 3] + "..."


# ---- errors that name the fields of the client's request

Terms = tuple[tuple[str, str], ...]  # patterns of a chat request's fields, and their names in another protocol

# positions in the schema that forces a tool call (`ToolUse.answer_schema`)
_TOOL = re.compile(r"\$\.items(?:\.anyOf\[(\d+)\])?\.properties\.parameters\b")
_DEFINITION = re.compile(r"\$\['\$defs'\]\['tool(\d+)[.:]([^']*)'\]")


@dataclass(frozen=True)
class FieldNames:
    field: str = FIELD  # where the request's grammar came from, in full
    parameter: str = FIELD  # as OpenAI's `param` has it: not in full in a chat
    terms: Terms = ()

    def of(self, error: RequestError) -> RequestError:
        message, parameter = str(error), error.parameter
        if parameter == FIELD:
            message, parameter = self._placed(re.sub(rf"^{FIELD}(\.(json|structural_tag))?\b", "", message))
        for field, own in (*self.terms, ("extra_args", "vllm_xargs")):
            pattern = re.compile(rf"{field}(?![\w-])")
            message = pattern.sub(own, message, count=1) if pattern.match(message) else message
            parameter = pattern.sub(own, parameter, count=1) if parameter and pattern.match(parameter) else parameter
        return type(error)(message, parameter)

    def _placed(self, rest: str) -> tuple[str, str]:
        """Replace the place in `rest`, a message without the name of its field."""
        place = (_TOOL.search(rest) or _DEFINITION.search(rest)) if self.field == "tools" else None
        if place is None:
            return self.field + rest, self.parameter
        field, root = f"tools[{place[1] or 0}].function.parameters", "$"
        if place.re is _DEFINITION:
            root = f"$['$defs']['{place[2]}']"
        return f"{field}{rest[: place.start()]}{root}{rest[place.end() :]}", field


def field_names_of(request: GenerationFields, use: ToolUse | None = None, terms: Terms = ()) -> FieldNames:
    if use is not None and use.forced:
        field = "tools"
        if use.name is not None:
            field = f"tools[{list(use.schemas or ()).index(use.name)}].function.parameters"
        return FieldNames(field, field, terms)
    form = request.response_format
    if form is None or request.structured_outputs is not None:
        return FieldNames(terms=terms)
    field = "response_format.json_schema.schema" if form.get("type") == "json_schema" else "response_format"
    return FieldNames(field, field if terms else "response_format", terms)
