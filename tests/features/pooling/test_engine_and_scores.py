"""Pooling requests of LLMEngine, and LLM.score: templates, and how its texts are tokenized."""

from pathlib import Path

import numpy as np
import pytest

from encoder_families import SIZES, Encoder, logits_of, states_of
from quire import LLM, EngineArgs, LLMEngine, PoolingParams, PoolingRequestOutput
from quire.types.errors import InvalidParameter, NotSupported
from sentence_models import save_text_encoder
from serving import Running

TEXTS = ["the quick brown fox", "a page is a page", "jumps over"]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }} {% endfor %}"


def test_an_engine_that_the_caller_steps(tmp_path: Path) -> None:
    model, tokenizer = save_text_encoder(tmp_path)
    engine = LLMEngine.from_engine_args(EngineArgs(model=str(tmp_path), device="cpu", dtype="float32", max_num_seqs=2))
    try:
        assert engine.get_supported_tasks() == ("embed", "token_embed", "score")
        for i, text in enumerate(TEXTS):
            engine.add_request(str(i), text, PoolingParams(task="token_embed" if i == 2 else "embed", use_activation=False))
        engine.add_request("cut", TEXTS[0], PoolingParams(), tokenization_kwargs={"truncation": True, "max_length": 5})
        engine.add_request("gone", TEXTS[0], PoolingParams())
        engine.abort_request("gone")
        with pytest.raises(InvalidParameter, match="dimensions is not supported"):
            engine.add_request("bad", TEXTS[0], PoolingParams(dimensions=3))
        done = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                assert isinstance(output, PoolingRequestOutput) and output.finished and output.error is None
                done[output.request_id] = output
    finally:
        engine.shutdown()
    assert sorted(done) == ["0", "1", "2", "cut"]
    for i, text in enumerate(TEXTS):
        ids = tokenizer.encode(text).ids
        states = states_of(model, ids).numpy()
        assert done[str(i)].prompt_token_ids == ids
        np.testing.assert_allclose(done[str(i)].outputs.data, states if i == 2 else states[0], atol=1e-4)
    assert len(done["cut"].prompt_token_ids) == 5


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory):
    options = {**SIZES, "vocab_size": 320, "num_labels": 1}
    folder = tmp_path_factory.mktemp("pairs")
    model, tokenizer = save_text_encoder(folder, Encoder("BertForSequenceClassification", "BertConfig", options))
    return folder, model, tokenizer


def opened(folder: Path, **args: str) -> LLM:
    return LLM(str(folder), device="cpu", dtype="float32", max_num_seqs=4, **args)


def by_template(model, tokenizer, query: str, document: str) -> float:
    ids = tokenizer.encode(f"<query>{query} <document>{document} ").ids
    return logits_of(model, ids).sigmoid().item()


def test_a_template_writes_the_pair(pairs) -> None:
    folder, model, tokenizer = pairs
    with opened(folder) as llm:
        found = llm.score(TEXTS[0], TEXTS[1:], chat_template=TEMPLATE, use_tqdm=False)
        for document, one in zip(TEXTS[1:], found, strict=True):
            assert one.outputs.score == pytest.approx(by_template(model, tokenizer, TEXTS[0], document), abs=1e-5)
        with pytest.raises(NotSupported, match="truncate_prompt_tokens is not supported with chat_template"):
            llm.score("a", "b", chat_template=TEMPLATE, pooling_params=PoolingParams(truncate_prompt_tokens=5), use_tqdm=False)
        cut = llm.score(*TEXTS[:2], tokenization_kwargs={"truncation": True, "max_length": 8}, use_tqdm=False)[0]
        assert cut.prompt_token_ids == tokenizer_cut(tokenizer, 8)
        with pytest.raises(NotSupported, match="only truncation and max_length"):
            llm.score("a", "b", tokenization_kwargs={"add_special_tokens": False}, use_tqdm=False)


def tokenizer_cut(tokenizer, count: int) -> list[int]:
    tokenizer.enable_truncation(count, strategy="longest_first")
    ids = tokenizer.encode(*TEXTS[:2]).ids
    tokenizer.no_truncation()
    return ids


def test_a_template_of_the_engine(pairs) -> None:
    folder, model, tokenizer = pairs
    served = Running(folder, max_num_batched_tokens=128, chat_template=TEMPLATE)
    try:
        results = served.http.post("/rerank", json={"query": TEXTS[0], "documents": TEXTS[1:]}).json()["results"]
        for one in results:
            right = by_template(model, tokenizer, TEXTS[0], TEXTS[1:][one["index"]])
            assert one["relevance_score"] == pytest.approx(right, abs=1e-5)
    finally:
        served.close()


def test_an_embedder_has_no_pairs_to_write(tmp_path: Path) -> None:
    save_text_encoder(tmp_path)
    with opened(tmp_path) as llm:
        with pytest.raises(NotSupported, match="chat_template requires a model that reads both texts"):
            llm.score("a", "b", chat_template=TEMPLATE, use_tqdm=False)
        cut = llm.score(*TEXTS[:2], tokenization_kwargs={"truncation": True, "max_length": 5}, use_tqdm=False)[0]
        assert len(cut.prompt_token_ids) == 10
