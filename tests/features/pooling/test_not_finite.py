"""Values that are NaN or infinite: their input is refused by name, and the other inputs are not disturbed."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from encoder_families import SIZES, Encoder
from quire import LLM
from quire.types.errors import EngineError
from sentence_models import save_text_encoder
from serving import Running, error_of

GOOD = ["the quick brown fox", "a page is a page"]
BAD = "a dog q"  # has the token of q, which the others have not


def break_token(folder: Path, tokenizer: Any, value: float) -> None:
    """Fill the embedding of a token that only BAD has."""
    [token] = set(tokenizer.encode(BAD).ids) - set(tokenizer.encode("a dog ").ids)
    assert not any(token in tokenizer.encode(text).ids for text in GOOD)
    path = folder / "model.safetensors"
    weights = load_file(path)
    [name] = [name for name in weights if name.endswith("word_embeddings.weight")]
    weights[name][token] = value
    save_file(weights, path, {"format": "pt"})


@pytest.mark.parametrize("value", [float("nan"), 1e30])
def test_offline(tmp_path: Path, value: float) -> None:
    _, tokenizer = save_text_encoder(tmp_path)
    break_token(tmp_path, tokenizer, value)
    with LLM(str(tmp_path), device="cpu", dtype="float32", max_num_seqs=4) as llm:
        right = [one.outputs.embedding for one in llm.embed(GOOD, use_tqdm=False)]
        with pytest.raises(EngineError, match=r"prompts\[1\]: the model's values for it are NaN or infinite.*dtype=float32"):
            llm.embed([GOOD[0], BAD, GOOD[1]], use_tqdm=False)
        done = llm.encode([GOOD[0], BAD, GOOD[1]], use_tqdm=False)
        assert [one.error is None for one in done] == [True, False, True] and not done[1].outputs.data.size
        np.testing.assert_array_equal([done[0].outputs.data, done[2].outputs.data], np.float32(right))
        with pytest.raises(EngineError, match="'a dog q': the model's values"):
            llm.score(GOOD[0], [GOOD[1], BAD], use_tqdm=False)


def test_served(tmp_path: Path) -> None:
    _, tokenizer = save_text_encoder(tmp_path)
    break_token(tmp_path, tokenizer, float("nan"))
    served = Running(tmp_path, max_num_batched_tokens=128)
    try:
        http = served.http
        right = http.post("/v1/embeddings", json={"input": GOOD}).json()["data"]
        cases: list[tuple[str, dict[str, Any], str]] = [
            ("/v1/embeddings", {"input": [*GOOD, BAD]}, "input[2]"),
            ("/v1/embeddings", {"input": BAD, "encoding_format": "base64"}, "input"),
            ("/v2/embed", {"texts": [BAD, *GOOD]}, "texts[0]"),
            ("/pooling", {"input": BAD, "task": "token_embed"}, "input"),
            ("/rerank", {"query": GOOD[0], "documents": [GOOD[1], BAD]}, "documents[1]"),
            ("/score", {"text_1": BAD, "text_2": GOOD}, "text_1"),
        ]

        def send(i: int) -> Any:
            path, body, _ = cases[i % len(cases)] if i % 2 else ("/v1/embeddings", {"input": GOOD}, "")
            return http.post(path, json=body)

        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(send, range(4 * len(cases))))
        for i, answer in enumerate(answers):
            if not i % 2:
                assert answer.json()["data"] == right
                continue
            name, error = cases[i % len(cases)][2], error_of(answer)
            assert (error["code"], error["param"]) == (400, name.partition("[")[0]), error
            assert error["message"].startswith(f"{name}: the model's values for it are NaN or infinite. Start"), error
    finally:
        served.close()


def test_a_cross_encoder(tmp_path: Path) -> None:
    options = {**SIZES, "vocab_size": 320, "num_labels": 1}
    _, tokenizer = save_text_encoder(tmp_path, Encoder("BertForSequenceClassification", "BertConfig", options))
    break_token(tmp_path, tokenizer, float("nan"))
    served = Running(tmp_path, max_num_batched_tokens=128)
    try:
        error = error_of(served.http.post("/rerank", json={"query": GOOD[0], "documents": [GOOD[1], BAD]}))
        assert (error["code"], error["param"]) == (400, "documents") and error["message"].startswith("documents[1]: "), error
        assert error_of(served.http.post("/classify", json={"input": BAD}))["param"] == "input"
        assert served.http.post("/rerank", json={"query": GOOD[0], "documents": GOOD}).status_code == 200
    finally:
        served.close()


def test_what_a_16_bit_answer_cannot_hold(tmp_path: Path) -> None:
    save_text_encoder(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    for name in weights:
        if name.endswith("encoder.layer.2.output.LayerNorm.weight"):
            weights[name] *= 1e6
    save_file(weights, path, {"format": "pt"})
    served = Running(tmp_path, max_num_batched_tokens=128)
    try:
        body = {"input": "a", "use_activation": False, "encoding_format": "base64"}
        error = error_of(served.http.post("/v1/embeddings", json={**body, "embed_dtype": "float16"}))
        assert (error["code"], error["param"]) == (400, "embed_dtype")
        assert served.http.post("/v1/embeddings", json={**body, "embed_dtype": "bfloat16"}).status_code == 200
    finally:
        served.close()
