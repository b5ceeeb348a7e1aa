"""Embedding and reranking classes of LangChain, LlamaIndex and Cohere against a server, where they are installed."""

import gc
from typing import Any

import numpy as np
import openai
import pytest

from serving import NAME, Running
from tiny_model import make_model

pytestmark = pytest.mark.filterwarnings("ignore")  # of other packages
TEXTS = ["the quick brown fox", "a page is a page", "jumps over the lazy dog"]


@pytest.fixture(autouse=True)
def _free_clients():
    """Free clients that keep connections open while warnings are ignored."""
    yield
    gc.collect()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory):
    served = Running(make_model(tmp_path_factory.mktemp("embedder")), runner="pooling", hf_overrides={"is_matryoshka": True})
    yield served
    served.close()


@pytest.fixture(scope="module")
def base(running: Running) -> str:
    return str(running.http.base_url).rstrip("/")


@pytest.fixture(scope="module")
def vectors(base: str) -> np.ndarray:
    with openai.OpenAI(base_url=f"{base}/v1", api_key="unused") as client:
        return np.array([one.embedding for one in client.embeddings.create(model=NAME, input=TEXTS).data])


def check(found: Any, vectors: np.ndarray) -> None:
    np.testing.assert_allclose(np.array(found), vectors, atol=1e-6)


def test_langchain_openai(base: str, vectors: np.ndarray) -> None:
    langchain = pytest.importorskip("langchain_openai")
    # by default the class sends token ids of OpenAI's vocabulary
    embedder = langchain.OpenAIEmbeddings(model=NAME, base_url=f"{base}/v1", api_key="unused", check_embedding_ctx_length=False)
    check(embedder.embed_documents(TEXTS), vectors)
    check(embedder.embed_query(TEXTS[1]), vectors[1])
    short = langchain.OpenAIEmbeddings(
        model=NAME, base_url=f"{base}/v1", api_key="unused", check_embedding_ctx_length=False, dimensions=8
    )
    assert len(short.embed_query(TEXTS[0])) == 8


def test_langchain_jina(base: str, vectors: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    rerank = pytest.importorskip("langchain_community.document_compressors.jina_rerank")
    embeddings = pytest.importorskip("langchain_community.embeddings.jina")
    monkeypatch.setattr(rerank, "JINA_API_URL", f"{base}/v1/rerank")
    monkeypatch.setattr(embeddings, "JINA_API_URL", f"{base}/v1/embeddings")
    found = rerank.JinaRerank(jina_api_key="unused", model=NAME, top_n=2).rerank(TEXTS, TEXTS[1])
    assert len(found) == 2 and found[0]["index"] == 1 and found[0]["relevance_score"] == pytest.approx(1.0)
    check(embeddings.JinaEmbeddings(jina_api_key="unused", model_name=NAME).embed_documents(TEXTS), vectors)


def test_langchain_cohere(base: str, vectors: np.ndarray) -> None:
    langchain = pytest.importorskip("langchain_cohere")
    ranker = langchain.CohereRerank(cohere_api_key="unused", base_url=base, model=NAME, top_n=2)
    assert ranker.rerank(TEXTS, TEXTS[1])[0]["index"] == 1
    check(langchain.CohereEmbeddings(cohere_api_key="unused", base_url=base, model=NAME).embed_documents(TEXTS), vectors)


@pytest.mark.parametrize("module, name", [("openai", "OpenAIEmbedding"), ("openai_like", "OpenAILikeEmbedding")])
def test_llama_index(base: str, vectors: np.ndarray, module: str, name: str) -> None:
    llama_index = pytest.importorskip(f"llama_index.embeddings.{module}")
    embedder = getattr(llama_index, name)(model_name=NAME, api_base=f"{base}/v1", api_key="unused")
    check(embedder.get_text_embedding_batch(TEXTS), vectors)
    check(embedder.get_query_embedding(TEXTS[1]), vectors[1])


def test_cohere(base: str, vectors: np.ndarray) -> None:
    cohere = pytest.importorskip("cohere")
    client = cohere.ClientV2(api_key="unused", base_url=base)
    kinds = ["float", "base64", "binary", "ubinary"]
    found = client.embed(model=NAME, texts=TEXTS, input_type="search_document", embedding_types=kinds)
    check(found.embeddings.float_, vectors)
    assert found.embeddings.ubinary == np.packbits(vectors >= 0, axis=1).tolist()
    assert found.meta.billed_units.input_tokens > 0 and len(found.embeddings.base64) == len(TEXTS)
    ranked = client.rerank(model=NAME, query=TEXTS[1], documents=TEXTS, top_n=2)
    assert [ranked.results[0].index, len(ranked.results)] == [1, 2]
    older = cohere.Client(api_key="unused", base_url=base)
    check(older.embed(model=NAME, texts=TEXTS, input_type="search_query").embeddings, vectors)
    [best] = older.rerank(model=NAME, query=TEXTS[1], documents=TEXTS, top_n=1, return_documents=True).results
    assert best.document.text == TEXTS[1]
