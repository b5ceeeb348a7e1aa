"""Bodies that cost a server much, the status each is answered with, and a server that measures how long its event loop stalls.

tests/serve/test_hostile_bodies.py sends them; benchmarks/loop_stalls.py measures them.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from server_process import READY, wait_for
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from patience import PATIENCE

M = 1 << 20
CONTEXT = 1 << 17
JSON = {"content-type": "application/json"}
USER = {"role": "user", "content": "hello"}


class PulseServer:
    """`quire serve` without a model, with a pulse on its event loop (pulse_server.py)."""

    def __init__(self, model: Path, log: Path) -> None:
        self._log = log
        here = Path(__file__).parent / "pulse_server.py"
        line = [sys.executable, str(here), "serve", str(model), "--served-model-name", "tiny", "--port", "0"]
        line += ["--distributed-executor-backend", "fake", "--trust-request-chat-template", "--max-num-seqs", "256"]
        line += ["--max-num-batched-tokens", "8192", "--kv-cache-memory-bytes", str(256 * M), "--max-logprobs", "20"]
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                line,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env={**os.environ, "QUIRE_FAKE_LATENCY": "0.001", "QUIRE_TEMPLATE_SECONDS": "1", "OMP_NUM_THREADS": "1"},
            )
        wait_for(lambda: READY.search(self.log()) or self.process.poll() is not None)
        found = READY.search(self.log())
        assert found, self.log()
        self.http = httpx.Client(base_url=found[1], timeout=PATIENCE)

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def longest_stall(self) -> float:
        """Return the longest stall since the last call, in seconds."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(b"?")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def post(self, name: str) -> httpx.Response:
        """Send the body of this name."""
        path, make, _ = CASES[name]
        body = make()
        content = body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode()
        return self.http.post(path, content=content, headers=JSON)

    def close(self) -> None:
        self.http.close()
        self.process.kill()
        self.process.communicate()


def make_checkpoint(directory: Path) -> Path:
    """Write a configuration and a tokenizer with a long context for the fake executor. Every byte is a token."""
    tokenizer = Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{% endfor %}"
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 320, "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": CONTEXT, "bos_token_id": 256, "eos_token_id": 257, "rms_norm_eps": 1e-5,
        "torch_dtype": "float32", "hidden_act": "silu", "rope_theta": 10000.0, "tie_word_embeddings": True,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def chat(content: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 1, **fields}


def called(arguments: str) -> list[Any]:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "x"}]


def tools(count: int, parameters: int) -> list[Any]:
    schema = {"type": "object", "properties": {str(k): {} for k in range(parameters)}}
    return [{"type": "function", "function": {"name": f"f{i}", "parameters": schema}} for i in range(count)]


def tokens(count: int, **fields: Any) -> dict[str, Any]:
    return {"prompt": [65] * count, "max_tokens": 1, **fields}


CHAT, TEXT, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
GROW = "{% set n = namespace(s='xxxxxxxx') %}{% for i in range(50) %}{% set n.s = n.s ~ n.s %}{% endfor %}"

CASES: dict[str, tuple[str, Callable[[], Any], int]] = {
    # texts longer than the context
    "chat": (CHAT, lambda: chat("a b" * (8 * M // 3)), 400),
    "chat_not_ascii": (CHAT, lambda: chat("é" * (7 * M)), 400),
    "messages": ("/v1/messages", lambda: chat("a b" * (2 * M)), 400),
    "count_tokens": ("/v1/messages/count_tokens", lambda: {"messages": [{"role": "user", "content": "a b" * (2 * M)}]}, 400),
    "responses": ("/v1/responses", lambda: {"input": "a b" * (2 * M)}, 400),
    "completion": (TEXT, lambda: {"prompt": "a b" * (2 * M)}, 400),
    "tokenize": (TOKENIZE, lambda: {"prompt": "a b" * (2 * M)}, 400),
    # long texts that fit
    "tokenize_long": (TOKENIZE, lambda: {"prompt": "a b" * (CONTEXT // 4), "return_token_strs": True}, 200),
    "chat_long": (CHAT, lambda: chat("a b" * (CONTEXT // 4)), 200),
    "chat_truncated": (CHAT, lambda: chat("a b" * (M // 8), truncate_prompt_tokens=100), 200),
    "many_texts": (TEXT, lambda: {"prompt": ["a b" * 100] * 300, "max_tokens": 1}, 200),
    "detokenize": ("/detokenize", lambda: {"tokens": [65] * M}, 200),
    # JSON
    "brackets_in_strings": (TEXT, lambda: b'{"prompt": [' + b'"[",' * (4 * M - 16) + b'"["]}', 400),
    "brackets": (TEXT, lambda: b'{"prompt": ' + b"[" * (15 * M) + b"]" * (M // 2) + b"}", 400),
    "numbers": (TEXT, lambda: b'{"x": [' + b"1," * (8 * M - 16) + b"1]}", 400),
    "many_names": (TEXT, lambda: b"{" + b",".join(b'"%d":1' % i for i in range(M)) + b"}", 400),
    "escapes": (TEXT, lambda: b'{"prompt": "' + b"\\n" * (8 * M - 16) + b'"}', 400),
    "not_json": (CHAT, lambda: b'{"messages": "' + b"a" * (15 * M), 400),
    "too_many_ids": (TEXT, lambda: tokens(M), 400),
    # values
    "many_messages": (CHAT, lambda: {"messages": [USER] * 4096, "max_tokens": 1}, 200),
    "many_parts": (CHAT, lambda: chat([{"type": "text", "text": "x" * 20}] * 4096), 200),
    "tool_arguments": (CHAT, lambda: {"messages": called(json.dumps({"x": ["a"] * M})), "max_tokens": 1}, 400),
    "deep_tool_arguments": (CHAT, lambda: {"messages": called("[" * M)}, 400),
    "many_tools": (CHAT, lambda: chat("a", tools=tools(256, 80), tool_choice="none"), 200),
    "metadata": ("/v1/responses", lambda: {"input": "a", "metadata": {str(i): "x" * 100 for i in range(30000)}}, 400),
    # large requests and answers
    "ids": (TEXT, lambda: {"prompt": [[65 + i % 20] * 200 for i in range(1024)], "max_tokens": 1}, 200),
    "forks": (TEXT, lambda: tokens(8000, n=512), 200),
    "prompt_logprobs": (TEXT, lambda: tokens(0, prompt=[[65] * 2000] * 16, prompt_logprobs=1), 200),
    "many_logprobs": (TEXT, lambda: tokens(8000, prompt_logprobs=20), 200),
    "echo": (TEXT, lambda: tokens(20000, echo=True, logprobs=5), 200),
    "echo_streamed": (TEXT, lambda: tokens(20000, echo=True, logprobs=5, stream=True), 200),
    "echo_ids": (TEXT, lambda: tokens(100000, echo=True, return_token_ids=True), 200),
    "many_choices": (CHAT, lambda: {**chat("a", n=1024, logprobs=True, top_logprobs=5), "max_tokens": 4}, 200),
    # chat templates
    "looping_template": (CHAT, lambda: chat("a", chat_template=LOOP), 400),
    "growing_template": (CHAT, lambda: chat("a", chat_template=GROW), 400),
}
