"""Every kind of bad input to a pooling endpoint: a 400 that names the field and the remedy; the next request is answered.

Values that are NaN or infinite are in tests/features/pooling/test_not_finite.py.
"""

from pathlib import Path
from typing import Any

import pytest

from encoder_families import SIZES, Encoder
from sentence_models import save_text_encoder
from serving import Running, error_of
from tiny_model import make_model

LONG = "the lazy dog " * 100
EMBED, RERANK, CHAT = "/v1/embeddings", "/rerank", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
# model, path, body, field, words of the message
CASES: dict[str, tuple[str, str, dict[str, Any], str, str]] = {
    "empty text": ("embedder", EMBED, {"input": ""}, "input", "send a text"),
    "empty list": ("embedder", EMBED, {"input": []}, "input", "send at least one text"),
    "one empty text of several": ("embedder", EMBED, {"input": ["a", ""]}, "input", "input[1] is empty: send a text"),
    "2,049 inputs": ("embedder", EMBED, {"input": ["a"] * 2049}, "input", "2048"),
    "2,049 documents": ("reranker", RERANK, {"query": "a", "documents": ["a"] * 2049}, "documents", "2048"),
    "id above the vocabulary": ("embedder", EMBED, {"input": [5, 320]}, "input", "ids go from 0 to 319"),
    "id below 0": ("embedder", EMBED, {"input": [[5, -1]]}, "input", "ids go from 0 to 319"),
    "dimensions without Matryoshka": ("embedder", EMBED, {"input": "a", "dimensions": 8}, "dimensions", "Remove it"),
    "dimensions above the size": ("matryoshka", EMBED, {"input": "a", "dimensions": 33}, "dimensions", "at most 32"),
    "output_dimension": ("embedder", "/v2/embed", {"texts": ["a"], "output_dimension": 8}, "output_dimension", "Remove it"),
    "encoding_format": ("embedder", EMBED, {"input": "a", "encoding_format": "hex"}, "body.encoding_format", "'base64'"),
    "texts and ids": ("embedder", EMBED, {"input": ["a", [5]]}, "body.input", "list of either"),
    "text too long": ("embedder", EMBED, {"input": LONG}, "input", "Shorten it, or send truncate_prompt_tokens"),
    "text too long for Cohere": (
        "embedder", "/v2/embed", {"texts": [LONG], "truncate": "NONE"}, "texts", "Shorten it, or send truncate=END",
    ),
    "no documents": ("reranker", RERANK, {"query": "a", "documents": []}, "documents", "send at least one text"),
    "documents missing": ("reranker", RERANK, {"query": "a"}, "body.documents", "required"),
    "query longer than the context": ("reranker", RERANK, {"query": LONG, "documents": ["a"]}, "query", "Shorten it"),
    "document longer than the context": ("reranker", RERANK, {"query": "a", "documents": [LONG]}, "documents", "Shorten it"),
    "chat with an embedder": ("embedder", CHAT, {"messages": HELLO}, "model", "serve a generative model"),
    "embeddings of a reranker": ("reranker", EMBED, {"input": "a"}, "model", "--runner pooling --convert embed"),
    "embeddings of a chat model": ("chat", EMBED, {"input": "a"}, "model", "--runner pooling --convert embed"),
    "rerank by a chat model": ("chat", RERANK, {"query": "a", "documents": ["a"]}, "model", "--runner pooling --convert embed"),
    "classes of an embedder": ("embedder", "/classify", {"input": "a"}, "model", "--runner pooling --convert classify"),
}  # fmt: skip
GOOD = {
    "embedder": (EMBED, {"input": "a page"}),
    "matryoshka": (EMBED, {"input": "a page", "dimensions": 32}),
    "reranker": (RERANK, {"query": "a", "documents": ["a page"]}),
    "chat": (CHAT, {"messages": HELLO, "max_tokens": 2}),
}


@pytest.fixture(scope="module", params=GOOD)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    kind, folder, more = request.param, tmp_path_factory.mktemp(request.param), dict[str, Any]()
    _save(kind, folder)
    if kind == "matryoshka":
        more["hf_overrides"] = {"is_matryoshka": True}
    served = Running(folder, max_num_batched_tokens=512, **more)
    yield kind, served.http
    served.close()


def _save(kind: str, folder: Path) -> None:
    if kind == "chat":
        make_model(folder)
    elif kind == "reranker":
        options = {**SIZES, "vocab_size": 320, "num_labels": 1}
        save_text_encoder(folder, Encoder("BertForSequenceClassification", "BertConfig", options))
    else:
        save_text_encoder(folder)


def test_bad_input(server) -> None:
    kind, http = server
    path, body = GOOD[kind]
    for name, (model, bad_path, bad, field, words) in CASES.items():
        if model != kind:
            continue
        error = error_of(http.post(bad_path, json=bad))
        assert (error["code"], error["param"]) == (400, field), (name, error)
        assert words in error["message"], (name, error)
        assert http.post(path, json=body).status_code == 200, name
