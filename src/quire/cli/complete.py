"""`quire complete`: complete texts, one per line, with a running server or with a model in this process."""

import argparse
import contextlib
import dataclasses
import http.client
import json
import os
import ssl
import sys
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

from quire.cli.chat import read_message
from quire.cli.parser import load_engine, replace_invalid_input, take_words
from quire.cli.run import add_sampling_arguments, print_stream, sampling_params, sampling_values
from quire.config.args import EngineArgs, add_cli_arguments
from quire.types.errors import ConfigError, EngineError, RequestError

API_PATH = "/v1"  # of addresses without a path
DEFAULT_URL = f"http://localhost:8000{API_PATH}"
KEY_VARIABLES = ("QUIRE_API_KEY", "VLLM_API_KEY", "OPENAI_API_KEY")
CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 10.0, 600.0
Complete = Callable[[str], object]  # completes one text and prints it


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "complete",
        conflict_handler="resolve",  # -q is --quick here, as in vLLM, and not --quantization
        usage="%(prog)s [MODEL] [PROMPT] [options]",
        help="complete texts with a running server, or with a model",
        description="Completes texts and prints what follows them, as it is generated. Without MODEL a running server does it "
        "(--url); with MODEL, or --model, a model in this process. Without PROMPT, every line of input is a text.",
    )
    add_cli_arguments(parser)
    parser.add_argument("words", nargs="*", metavar="MODEL PROMPT", help="the model, as in --model, and a text in quotes")
    parser.add_argument("--url", default=None, help=f"address of the server's API (default: {DEFAULT_URL})")
    parser.add_argument("--model-name", default=None, metavar="NAME", help="model to name to the server (default: its first)")
    parser.add_argument(
        "--api-key", default=None, metavar="KEY", help=f"key for the server (default: {', '.join(KEY_VARIABLES)})"
    )
    parser.add_argument("-q", "--quick", default=None, metavar="PROMPT", help="complete this text and exit")
    add_sampling_arguments(parser, max_tokens=128)
    parser.set_defaults(run=run)


def run(namespace: argparse.Namespace) -> int:
    local = "model" in vars(namespace)
    args, texts = take_words(namespace, namespace.words)
    local = local or len(texts) < len(namespace.words)
    texts = [*([] if namespace.quick is None else [namespace.quick]), *texts]
    if len(texts) > 1:
        raise ConfigError(f"one prompt at a time, in quotes; got {len(texts)}")
    sampling_values(namespace)  # wrong flags are reported before anything is loaded
    complete = _in_process(namespace, args) if local else _by_server(namespace)
    replace_invalid_input()
    if texts:
        complete(texts[0])
        print()
        return 0
    return _converse(complete, sys.stdin.isatty())


def _converse(complete: Complete, terminal: bool) -> int:
    """Complete every line of input."""
    if terminal:
        with contextlib.suppress(ImportError):  # line editing and history for input()
            import readline  # noqa: F401
        print('(Type a text to complete, or several lines between """; Ctrl-C stops an answer, Ctrl-D ends.)')
    while True:
        try:
            text = read_message(terminal)
        except (EOFError, KeyboardInterrupt):
            if terminal:
                print()
            return 0
        if not text.strip():
            continue
        try:
            complete(text)
        except KeyboardInterrupt:
            print("\n(stopped)", end="")
        except RequestError as error:
            print(f"\n{error}", file=sys.stderr)
        print()


def _in_process(namespace: argparse.Namespace, args: EngineArgs) -> Complete:
    for flag in ("url", "model_name", "api_key"):
        if getattr(namespace, flag) is not None:
            name = flag.replace("_", "-")
            raise ConfigError(f"--{name} is for a running server, and {args.model!r} runs in this process; drop one of them")
    engine = load_engine(args)
    params = sampling_params(namespace, engine.config.default_sampling)
    return lambda text: print_stream(engine, text, params)


def _by_server(namespace: argparse.Namespace) -> Complete:
    given = sorted({field.name for field in dataclasses.fields(EngineArgs)} & vars(namespace).keys())
    if given:
        raise ConfigError(f"--{given[0].replace('_', '-')} is for a model in this process: add MODEL or --model")
    values = sampling_values(namespace)
    key = namespace.api_key or next((text for name in KEY_VARIABLES if (text := os.environ.get(name))), None)
    server = RemoteServer(namespace.url or DEFAULT_URL, key)
    body = {**values, "model": namespace.model_name or server.first_model(), "stream": True}

    def complete(text: str) -> None:
        for piece in server.stream({**body, "prompt": text}):
            print(piece, end="", flush=True)

    return complete


class RemoteServer:
    """The completions of an OpenAI server."""

    def __init__(self, url: str, key: str | None) -> None:
        self._parts = urlsplit(url if "://" in url else f"http://{url}")
        if self._parts.scheme not in ("http", "https") or not self._parts.hostname:
            raise ConfigError(f"--url must be the address of a server's API, such as {DEFAULT_URL}; got {url!r}")
        if not self._parts.path.strip("/"):
            self._parts = self._parts._replace(path=API_PATH)
        self._url = self._parts.geturl().rstrip("/")
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    def first_model(self) -> str:
        with self._answer("GET", "/models") as answer:
            try:
                return str(json.loads(answer.read())["data"][0]["id"])
            except (ValueError, KeyError, IndexError, TypeError):
                raise ConfigError(
                    f"{self._url}/models lists no model; --url must end with the API's path, as in {DEFAULT_URL}"
                ) from None

    def stream(self, body: dict[str, Any]) -> Iterator[str]:
        """Yield the generated text, piece by piece."""
        with self._answer("POST", "/completions", json.dumps(body).encode()) as answer:
            while line := answer.readline():
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                if not line.startswith(b"data:"):
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise EngineError(f"{self._url}: {_message(event)}")
                for choice in event.get("choices", ()):
                    yield choice.get("text") or ""
        raise EngineError(f"{self._url}: the connection was lost before the answer was complete")

    @contextlib.contextmanager
    def _answer(self, method: str, path: str, body: bytes | None = None) -> Iterator[http.client.HTTPResponse]:
        host, port = str(self._parts.hostname), self._parts.port
        if self._parts.scheme == "https":
            context = ssl.create_default_context()
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                host, port, timeout=CONNECT_TIMEOUT_S, context=context
            )
        else:
            connection = http.client.HTTPConnection(host, port, timeout=CONNECT_TIMEOUT_S)
        try:
            connection.connect()
            connection.sock.settimeout(READ_TIMEOUT_S)
            connection.request(method, self._parts.path.rstrip("/") + path, body, self._headers)
            answer = connection.getresponse()
            if answer.status != http.client.OK:
                raise self._refusal(answer)
            yield answer
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or error or type(error).__name__
            raise EngineError(
                f"{self._url} does not answer: {reason}. Start a server with `quire serve MODEL`, give its address with "
                "--url, or name a model: quire complete MODEL"
            ) from error
        finally:
            connection.close()

    def _refusal(self, answer: http.client.HTTPResponse) -> ConfigError | RequestError:
        text = answer.read().decode(errors="replace")
        try:
            message = _message(json.loads(text))
        except ValueError:
            message = text.strip()[:200]
        if answer.status in (401, 403):
            return ConfigError(f"{self._url} requires another key: give --api-key KEY or set {KEY_VARIABLES[0]} ({message})")
        return RequestError(f"{self._url} refused the request with {answer.status}: {message}")


def _message(body: Any) -> str:
    """Return the message of an error in OpenAI's form."""
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
