"""Embeddings, reranking, scores and classes over HTTP, by tiny random models, against transformers."""

import asyncio
import base64
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch

from quire.bench.client import Origin
from quire.bench.datasets import DatasetOptions
from quire.bench.metrics import summarize
from quire.bench.report import table
from quire.bench.serve import ServeSettings, bench_serve
from quire.cli.bench_serve import endpoint_of
from quire.config.server_args import ServerArgs
from quire.serve.pooling.work import MAX_INPUTS
from quire.types.errors import ConfigError
from serving import NAME, Running, error_of
from tiny_model import make_model, make_tokenizer

TEXTS = ["the quick brown fox", "a page is a page", "héllo wörld ☃", "jumps over the lazy dog, a quire is a gathering of pages"]
LONGEST = 256


def transformers_embedding(directory: Path, ids: list[int], normalize: bool = True) -> np.ndarray:
    from transformers import AutoModel

    model = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        last = model(torch.tensor([ids])).last_hidden_state[0, -1]
    return (torch.nn.functional.normalize(last, dim=0) if normalize else last).numpy()


def tokens_of(directory: Path, text: str) -> list[int]:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(directory / "tokenizer.json")).encode(text).ids


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("embedder"))


@pytest.fixture(scope="module")
def running(model: Path):
    served = Running(model, runner="pooling", hf_overrides={"is_matryoshka": True})
    yield served
    served.close()


@pytest.fixture
def http(running: Running):
    yield running.http
    running.wait_idle()


def make_classifier(directory: Path, labels: int) -> Path:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    make_tokenizer(directory)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=LONGEST, bos_token_id=0, eos_token_id=1, pad_token_id=1, num_labels=labels,
        initializer_range=0.3, id2label={i: f"class {i}" for i in range(labels)},
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(directory)
    return directory


def transformers_logits(directory: Path, ids: list[int]) -> torch.Tensor:
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory):
    served = Running(make_classifier(tmp_path_factory.mktemp("reranker"), 1))
    yield served
    served.close()


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory):
    served = Running(make_classifier(tmp_path_factory.mktemp("classifier"), 3))
    yield served
    served.close()


def folder(served: Running) -> Path:
    return Path(served.llm.config.args.model)


# ---- /v1/embeddings


def embeddings(http: httpx.Client, given: Any, **more: Any) -> list[Any]:
    answer = http.post("/v1/embeddings", json={"input": given, **more})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["object"] == "list" and body["id"].startswith("embd-")
    assert [one["index"] for one in body["data"]] == list(range(len(body["data"])))
    return [one["embedding"] for one in body["data"]]


def test_texts_and_token_ids_give_transformers_vectors(http: httpx.Client, model: Path) -> None:
    ids = [tokens_of(model, text) for text in TEXTS]
    expected = [transformers_embedding(model, one) for one in ids]
    for given in (TEXTS, ids):
        np.testing.assert_allclose(embeddings(http, given), expected, atol=1e-5)
    for given in (TEXTS[0], ids[0]):
        np.testing.assert_allclose(embeddings(http, given), expected[:1], atol=1e-5)


def test_usage_counts_the_tokens_of_all_inputs(http: httpx.Client, model: Path) -> None:
    usage = http.post("/v1/embeddings", json={"input": TEXTS}).json()["usage"]
    tokens = sum(len(tokens_of(model, text)) for text in TEXTS)
    assert usage["prompt_tokens"] == usage["total_tokens"] == tokens


@pytest.mark.parametrize(
    ("dtype", "endianness", "read"),
    [("float32", "native", "<f4"), ("float32", "big", ">f4"), ("float16", "little", "<f2"), ("bfloat16", "little", "<u2")],
)
def test_base64(http: httpx.Client, dtype: str, endianness: str, read: str) -> None:
    plain = np.array(embeddings(http, TEXTS[0])[0], np.float32)
    form = {"encoding_format": "base64", "embed_dtype": dtype, "endianness": endianness}
    values = np.frombuffer(base64.b64decode(embeddings(http, TEXTS[0], **form)[0]), read)
    if dtype == "bfloat16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_allclose(values.astype(np.float32), plain, rtol=0 if dtype == "float32" else 2**-8, atol=1e-7)


def test_dimensions_cut_and_normalize_again(http: httpx.Client, model: Path) -> None:
    whole = transformers_embedding(model, tokens_of(model, TEXTS[0]), normalize=False)[:8]
    np.testing.assert_allclose(embeddings(http, TEXTS[0], dimensions=8)[0], whole / np.linalg.norm(whole), atol=1e-5)


def test_activation_can_be_left_out(http: httpx.Client, model: Path) -> None:
    whole = transformers_embedding(model, tokens_of(model, TEXTS[0]), normalize=False)
    for name in ("normalize", "use_activation"):
        np.testing.assert_allclose(embeddings(http, TEXTS[0], **{name: False})[0], whole, atol=1e-4)


@pytest.mark.parametrize(("side", "kept"), [(None, slice(0, 5)), ("right", slice(0, 5)), ("left", slice(-5, None))])
def test_truncation(http: httpx.Client, model: Path, side: str | None, kept: slice) -> None:
    ids = tokens_of(model, TEXTS[3])
    expected = transformers_embedding(model, ids[kept])
    more = {"truncate_prompt_tokens": 5} | ({} if side is None else {"truncation_side": side})
    for given in (TEXTS[3], ids):
        np.testing.assert_allclose(embeddings(http, given, **more)[0], expected, atol=1e-5)


def test_a_long_text_is_truncated_to_what_fits(http: httpx.Client, model: Path) -> None:
    text = "the lazy dog " * 500_000
    ids = tokens_of(model, text[:10_000])[:LONGEST]
    np.testing.assert_allclose(
        embeddings(http, text, truncate_prompt_tokens=-1)[0], transformers_embedding(model, ids), atol=1e-5
    )


def test_messages_are_embedded_as_the_template_writes_them(http: httpx.Client, model: Path) -> None:
    answer = http.post("/v1/embeddings", json={"messages": [{"role": "user", "content": "a page"}]}).json()
    expected = transformers_embedding(model, tokens_of(model, "<user>a page</s>"))
    np.testing.assert_allclose(answer["data"][0]["embedding"], expected, atol=1e-5)


def test_the_most_inputs(http: httpx.Client) -> None:
    vectors = embeddings(http, [TEXTS[i % 4] for i in range(MAX_INPUTS)])
    np.testing.assert_allclose(vectors[:4], vectors[-4:], atol=1e-5)
    assert "2048" in error_of(http.post("/v1/embeddings", json={"input": ["a"] * (MAX_INPUTS + 1)}))["message"]


def test_the_official_client(http: httpx.Client, model: Path) -> None:
    expected = [transformers_embedding(model, tokens_of(model, text)) for text in TEXTS]
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="unused", max_retries=0) as client:
        for form in ({}, {"encoding_format": "float"}):  # base64 is its default
            answer = client.embeddings.create(model=NAME, input=TEXTS, user="somebody", **form)
            np.testing.assert_allclose([one.embedding for one in answer.data], expected, atol=1e-5)
        with pytest.raises(openai.BadRequestError, match="dimensions must be at most 32"):
            client.embeddings.create(model=NAME, input="a", dimensions=33)


# what LangChain's OpenAIEmbeddings and LlamaIndex's OpenAIEmbedding send
@pytest.mark.parametrize(
    "body",
    [
        {"input": [[0, 5, 6], [7, 8]], "model": NAME, "encoding_format": "base64"},
        {"input": ["the quick\nbrown"], "model": NAME, "dimensions": 16, "user": "u"},
    ],
)
def test_clients_of_frameworks(http: httpx.Client, body: dict[str, Any]) -> None:
    assert len(http.post("/v1/embeddings", json=body).json()["data"]) == len(body["input"])


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({}, "input", "missing"),
        ({"input": ""}, "input", "empty"),
        ({"input": []}, "input", "empty"),
        ({"input": ["a", ""]}, "input", r"input[1] is empty"),
        ({"input": [[]]}, "input", "empty"),
        ({"input": ["a", [1]]}, "body.input", "list of either"),
        ({"input": ["a", 1]}, "body.input", "list of either"),
        ({"input": [1, "a"]}, "body.input", "list of either"),
        ({"input": {"a": 1}}, "body.input", "list of either"),
        ({"input": [1, 320]}, "input", "token id 320 is out of vocabulary"),
        ({"input": [-1]}, "input", "token id -1 is out of vocabulary"),
        ({"input": "a", "dimensions": 0}, "body.dimensions", "greater than or equal to 1"),
        ({"input": "a", "dimensions": 33}, "dimensions", "at most 32"),
        ({"input": "a", "encoding_format": "hex"}, "body.encoding_format", "base64"),
        ({"input": "a", "encoding_format": "bytes"}, "body.encoding_format", "base64"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
        ({"input": "a", "truncate_prompt_tokens": 257}, "truncate_prompt_tokens", "at most the model's context of 256"),
        ({"input": "a", "truncate_prompt_tokens": -2}, "body.truncate_prompt_tokens", "-1"),
        ({"input": "the lazy dog " * 200}, "input", "truncate_prompt_tokens"),
        ({"input": ["a", [5] * 257][1]}, "input", "truncate_prompt_tokens"),
        ({"input": "a", "priority": 1}, "priority", "priority"),
        ({"input": "a", "temperature": 1}, "temperature", "/v1/completions"),
        ({"messages": []}, "messages", "empty"),
        ({"messages": [{"role": "user", "content": "dog " * 300}]}, "messages", "truncate_prompt_tokens"),
    ],
)
def test_bad_requests_name_the_field(http: httpx.Client, body: dict[str, Any], field: str, words: str) -> None:
    error = error_of(http.post("/v1/embeddings", json=body))
    assert (error["code"], error["param"]) == (400, field)
    assert words in error["message"]


def test_a_bad_request_does_not_disturb_others(http: httpx.Client) -> None:
    def send(i: int) -> int:
        return http.post("/v1/embeddings", json={"input": [TEXTS[i % 4], [999]][i % 2]}).status_code

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(send, range(40))) == [200, 400] * 20


def test_an_unknown_model(http: httpx.Client) -> None:
    assert error_of(http.post("/v1/embeddings", json={"input": "a", "model": "other"}))["code"] == 404


# ---- /v2/embed


def test_cohere_embed(http: httpx.Client) -> None:
    vectors = np.array(embeddings(http, TEXTS[:2]), np.float32)
    body = {"model": NAME, "texts": TEXTS[:2], "input_type": "search_query", "truncate": "END"}
    kinds = ["float", "base64", "binary", "ubinary"]
    answer = http.post("/v2/embed", json=body | {"embedding_types": kinds}).json()
    np.testing.assert_allclose(answer["embeddings"]["float"], vectors, atol=1e-6)
    for text, vector in zip(answer["embeddings"]["base64"], vectors, strict=True):
        np.testing.assert_allclose(np.frombuffer(base64.b64decode(text), "<f4"), vector, atol=1e-6)
    bits = np.packbits(vectors >= 0, axis=1)
    assert answer["embeddings"]["ubinary"] == bits.tolist()
    assert answer["embeddings"]["binary"] == (bits.astype(int) - 128).tolist()
    assert answer["texts"] == TEXTS[:2] and answer["meta"]["billed_units"]["input_tokens"] > 0
    parts = [{"content": [{"type": "text", "text": text}]} for text in TEXTS[:2]]
    other = http.post("/v2/embed", json={"model": NAME, "inputs": parts, "output_dimension": 32}).json()
    np.testing.assert_allclose(other["embeddings"]["float"], vectors, atol=1e-6)
    first = http.post("/v1/embed", json=body).json()  # of Cohere's older clients
    assert (first["response_type"], first["meta"]["api_version"]["version"]) == ("embeddings_floats", "1")
    np.testing.assert_allclose(first["embeddings"], vectors, atol=1e-6)
    named = http.post("/v1/embed", json=body | {"embedding_types": ["float"]}).json()
    assert named["response_type"] == "embeddings_by_type" and named["embeddings"]["float"] == first["embeddings"]


@pytest.mark.parametrize("truncate", ["START", "END"])
def test_cohere_truncation(http: httpx.Client, truncate: str) -> None:
    side = {"truncate_prompt_tokens": 4, "truncation_side": "left" if truncate == "START" else "right"}
    answer = http.post("/v2/embed", json={"texts": [TEXTS[3]], "max_tokens": 4, "truncate": truncate}).json()
    np.testing.assert_allclose(answer["embeddings"]["float"], embeddings(http, TEXTS[3], **side), atol=1e-6)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"texts": []}, "texts"),
        ({}, "texts"),
        ({"texts": [""]}, "texts"),
        ({"texts": ["a"] * (MAX_INPUTS + 1)}, "texts"),
        ({"texts": ["a"], "inputs": []}, "inputs"),
        ({"images": ["data:"]}, "images"),
        ({"texts": ["a"], "input_type": "poetry"}, "input_type"),
        ({"texts": ["a"], "input_type": "image"}, "input_type"),
        ({"texts": ["a"], "embedding_types": ["int8"]}, "body.embedding_types.0"),
        ({"texts": ["a"], "output_dimension": 64}, "output_dimension"),
        ({"texts": [TEXTS[3]], "truncate": "NONE", "max_tokens": 3}, "texts"),
        ({"texts": ["dog " * 300], "truncate": "NONE"}, "texts"),
        ({"inputs": [{"content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "inputs"),
    ],
)
def test_bad_cohere_requests(http: httpx.Client, body: dict[str, Any], field: str) -> None:
    error = error_of(http.post("/v2/embed", json=body))
    assert (error["code"], error["param"]) == (400, field)


# ---- /pooling


def test_pooling_of_prompts_and_of_tokens(http: httpx.Client, model: Path) -> None:
    ids = tokens_of(model, TEXTS[0])
    whole = http.post("/pooling", json={"input": TEXTS[0]}).json()["data"][0]["data"]
    np.testing.assert_allclose(whole, transformers_embedding(model, ids), atol=1e-5)
    each = http.post("/pooling", json={"input": TEXTS[0], "task": "token_embed"}).json()["data"][0]["data"]
    expected = [transformers_embedding(model, ids[: i + 1]) for i in range(len(ids))]
    np.testing.assert_allclose(each, expected, atol=1e-5)
    error = error_of(http.post("/pooling", json={"input": "a", "task": "classify"}))
    assert (error["code"], error["param"]) == (400, "task")


# ---- /score and /rerank


@pytest.mark.parametrize("fields", [("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items")])
def test_scores_of_an_embedder_are_cosines(http: httpx.Client, fields: tuple[str, str]) -> None:
    vectors = np.array(embeddings(http, TEXTS))
    one_to_many = http.post("/score", json={fields[0]: TEXTS[0], fields[1]: TEXTS}).json()
    np.testing.assert_allclose([one["score"] for one in one_to_many["data"]], vectors @ vectors[0], atol=1e-5)
    pairs = http.post("/score", json={fields[0]: TEXTS[:2], fields[1]: TEXTS[2:]}).json()
    np.testing.assert_allclose([one["score"] for one in pairs["data"]], (vectors[:2] * vectors[2:]).sum(1), atol=1e-5)


def test_scores_of_a_cross_encoder(reranker: Running) -> None:
    answer = reranker.http.post("/score", json={"text_1": TEXTS[0], "text_2": TEXTS[1:]}).json()
    for text, one in zip(TEXTS[1:], answer["data"], strict=True):
        ids = tokens_of(folder(reranker), TEXTS[0]) + tokens_of(folder(reranker), text)
        assert one["score"] == pytest.approx(torch.sigmoid(transformers_logits(folder(reranker), ids))[0].item(), abs=1e-5)
    raw = reranker.http.post("/score", json={"text_1": TEXTS[0], "text_2": TEXTS[1], "use_activation": False}).json()
    ids = tokens_of(folder(reranker), TEXTS[0]) + tokens_of(folder(reranker), TEXTS[1])
    assert raw["data"][0]["score"] == pytest.approx(transformers_logits(folder(reranker), ids)[0].item(), abs=1e-4)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_reranking(reranker: Running, path: str) -> None:
    body = {"model": NAME, "query": TEXTS[0], "documents": [TEXTS[1], {"text": TEXTS[2]}, TEXTS[3]]}
    whole = reranker.http.post(path, json=body).json()
    scores = [
        one["score"] for one in reranker.http.post("/score", json={"text_1": TEXTS[0], "text_2": TEXTS[1:]}).json()["data"]
    ]
    order = sorted(range(3), key=lambda i: -scores[i])
    assert [one["index"] for one in whole["results"]] == order
    assert [one["document"]["text"] for one in whole["results"]] == [TEXTS[1:][i] for i in order]
    np.testing.assert_allclose([one["relevance_score"] for one in whole["results"]], sorted(scores)[::-1], atol=1e-6)
    assert whole["usage"]["total_tokens"] > 0 and whole["meta"]["billed_units"] == {"search_units": 1}
    best = reranker.http.post(path, json=body | {"top_n": 1, "return_documents": False}).json()["results"]
    assert [set(one) for one in best] == [{"index", "relevance_score"}] and best[0]["index"] == order[0]


def test_truncated_pairs_lose_tokens_of_the_longer_text(reranker: Running) -> None:
    query, document = (tokens_of(folder(reranker), text) for text in (TEXTS[0], TEXTS[3]))
    most = 2 * len(query) + 1
    assert len(document) > len(query) + 1
    body = {"query": TEXTS[0], "documents": [TEXTS[3]], "use_activation": False}
    for more, kept in (({"truncate_prompt_tokens": most}, len(query) + 1), ({"max_tokens_per_doc": 3}, 3)):
        [result] = reranker.http.post("/rerank", json=body | more).json()["results"]
        expected = transformers_logits(folder(reranker), query + document[:kept])[0].item()
        assert result["relevance_score"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/rerank", {"query": "a"}, "body.documents"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/rerank", {"query": "a", "documents": ["b", ""]}, "documents"),
        ("/rerank", {"documents": ["a"]}, "body.query"),
        ("/rerank", {"query": "dog " * 300, "documents": ["a"]}, "query"),
        ("/rerank", {"query": "a", "documents": ["b", "dog " * 300]}, "documents"),
        ("/rerank", {"query": "a", "documents": [{"image": "b"}]}, "body.documents"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "body.top_n"),
        ("/rerank", {"query": "a", "documents": ["b"] * (MAX_INPUTS + 1)}, "documents"),
        ("/score", {"text_1": "a"}, "text_1"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/score", {"text_1": ["a", "b"], "text_2": "c"}, "text_1"),
        ("/score", {"text_1": "a", "text_2": "b", "data_1": "c", "data_2": "d"}, "text_1"),
        ("/score", {"queries": "a", "documents": "b", "items": "c"}, "queries"),
        ("/score", {"text_1": [], "text_2": "b"}, "text_1"),
        ("/score", {"text_1": 1, "text_2": "b"}, "body.text_1"),
    ],
)
def test_bad_pairs(reranker: Running, path: str, body: dict[str, Any], field: str) -> None:
    error = error_of(reranker.http.post(path, json=body))
    assert (error["code"], error["param"]) == (400, field), error


# ---- /classify


def test_classes(classifier: Running) -> None:
    answer = classifier.http.post("/classify", json={"input": TEXTS}).json()
    for text, one in zip(TEXTS, answer["data"], strict=True):
        logits = transformers_logits(folder(classifier), tokens_of(folder(classifier), text))
        np.testing.assert_allclose(one["probs"], torch.softmax(logits, 0).numpy(), atol=1e-5)
        assert (one["label"], one["num_classes"]) == (f"class {int(logits.argmax())}", 3)
    raw = classifier.http.post("/classify", json={"input": TEXTS[0], "use_activation": False}).json()["data"][0]
    logits = transformers_logits(folder(classifier), tokens_of(folder(classifier), TEXTS[0]))
    np.testing.assert_allclose(raw["probs"], logits.numpy(), atol=1e-4)


# ---- what a model answers


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
def test_an_embedder_does_not_chat(http: httpx.Client, path: str) -> None:
    response = http.post(path, json={"model": NAME, "messages": [{"role": "user", "content": "a"}], "prompt": "a"})
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert message.startswith(
        f"{path} is not available: the model `tiny` makes embeddings. It answers /v1/embeddings, /v2/embed"
    )


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v2/embed"])
def test_a_reranker_makes_no_embeddings(reranker: Running, path: str) -> None:
    error = error_of(reranker.http.post(path, json={"input": "a"}))
    assert (error["code"], error["param"]) == (400, "model")
    assert "scores pairs of texts. It answers /score, /rerank" in error["message"]


def test_a_classifier_with_several_classes_scores_nothing(classifier: Running) -> None:
    for path in ("/score", "/rerank", "/v1/embeddings"):
        assert "classifies texts" in error_of(classifier.http.post(path, json={}))["message"]


def test_an_unknown_path_names_what_the_model_answers(http: httpx.Client) -> None:
    message = error_of(http.post("/v1/nothing", json={}))["message"]
    assert "/v1/embeddings" in message and "/v1/chat/completions" not in message
    schema = http.get("/openapi.json").json()["paths"]
    assert "/v1/embeddings" in schema and "/v1/chat/completions" not in schema and "/classify" not in schema


# ---- quire bench serve


@pytest.mark.parametrize(("kind", "endpoint"), [("embeddings", "/v1/embeddings"), ("rerank", "/rerank")])
def test_a_benchmark_of_pooling_requests(http: httpx.Client, kind: Any, endpoint: str) -> None:
    dataset = DatasetOptions(count=20, random_input_len=30)
    settings = ServeSettings(Origin.parse(str(http.base_url)), endpoint, kind, dataset=dataset, disable_tqdm=True)
    outcome = asyncio.run(bench_serve(settings))
    summary = summarize(outcome.records, outcome.duration, metrics=("e2el",))
    assert (summary.completed, summary.failed, summary.total_output_tokens) == (20, 0, 0)
    assert summary.total_input_tokens >= 20 * 30
    assert "generated" not in table(summary, "Result", {})


def test_the_endpoint_of_a_benchmark() -> None:
    assert endpoint_of(None, "embeddings") == ("embeddings", "/v1/embeddings")
    assert endpoint_of(None, "rerank") == endpoint_of("vllm-rerank", None) == ("rerank", "/rerank")
    assert endpoint_of("openai-embeddings", "/mine") == ("embeddings", "/mine")
    assert endpoint_of(None, None) == ("completions", "/v1/completions")
    assert endpoint_of(None, "/v1/chat/completions") == ("chat", "/v1/chat/completions")
    with pytest.raises(ConfigError, match="does not match --endpoint"):
        endpoint_of("vllm-rerank", "/v1/embeddings")


def test_request_ids(running: Running) -> None:
    with running.serve(ServerArgs(enable_request_id_headers=True)) as http:
        answer = http.post("/v1/embeddings", json={"input": "a"}, headers={"X-Request-Id": "mine"})
        assert answer.json()["id"] == "embd-mine" and answer.headers["x-request-id"] == "mine"
