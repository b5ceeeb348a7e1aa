"""Prompts that the files of sentence-transformers put before texts: which of them, and what the mean leaves out."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from encoder_families import states_of
from quire import LLM, PoolingParams
from quire.types.errors import InvalidParameter
from sentence_models import CLS, SEP, save_text_encoder, write_modules
from serving import Running, error_of

PROMPTS = {"query": "a question: ", "document": "", "passage": "not read, ", "s2s": "which page "}
TEXTS = ["the quick brown fox", "a page is a page", "jumps"]


class Model:
    """A checkpoint, and its vectors as sentence-transformers makes them."""

    def __init__(self, folder: Path, pooling: str, default: str | None, include_prompt: bool) -> None:
        self.folder, self.pooling, self.include = folder, pooling, include_prompt
        self.model, self.tokenizer = save_text_encoder(folder)
        config = {"pooling_mode": pooling, "include_prompt": include_prompt}
        write_modules(
            folder,
            [("1_Pooling", "sentence_transformers.models.Pooling", config),
             ("2_Normalize", "sentence_transformers.models.Normalize", None)],
            {"prompts": PROMPTS, "default_prompt_name": default},
        )  # fmt: skip

    def vector(self, text: str, before: str = "") -> np.ndarray:
        ids = self.tokenizer.encode(before + text).ids
        assert (ids[0], ids[-1]) == (CLS, SEP)
        left_out = 0 if self.include or not before else len(self.tokenizer.encode(before).ids) - 1
        states = states_of(self.model, ids)[left_out:].numpy()
        vector = states.mean(0) if self.pooling == "mean" else states[0]
        return vector / np.linalg.norm(vector)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("plain"), "mean", None, True)


def opened(model: Model, **args: Any) -> LLM:
    return LLM(str(model.folder), device="cpu", dtype="float32", max_num_seqs=4, **args)


def embed(llm: LLM, texts: Any, name: str | None = None) -> list[list[float]]:
    done = llm.embed(texts, pooling_params=PoolingParams(prompt_name=name), use_tqdm=False)
    return [one.outputs.embedding for one in done]


def check(found: Any, model: Model, before: str, texts: list[str] = TEXTS) -> None:
    np.testing.assert_allclose(found, [model.vector(text, before) for text in texts], atol=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_the_default_prompt_and_what_is_left_out(tmp_path: Path, pooling: str) -> None:
    model = Model(tmp_path, pooling, "s2s", include_prompt=False)
    with opened(model) as llm:
        check(embed(llm, TEXTS), model, PROMPTS["s2s"])
        check(embed(llm, TEXTS, "query"), model, PROMPTS["query"])
        check(embed(llm, [{"prompt": text} for text in TEXTS], "query"), model, PROMPTS["query"])
        for name in ("", "document"):
            check(embed(llm, TEXTS, name), model, "")
        ids = [model.tokenizer.encode(text).ids for text in TEXTS]
        check(embed(llm, [{"prompt_token_ids": one} for one in ids]), model, "")
        [score] = llm.score(TEXTS[0], TEXTS[1], use_tqdm=False)
        right = model.vector(TEXTS[0], PROMPTS["s2s"]) @ model.vector(TEXTS[1], PROMPTS["s2s"])
        assert score.outputs.score == pytest.approx(right, abs=1e-5)
        short = PoolingParams(truncate_prompt_tokens=4)  # only tokens of the prompt are left
        assert len(llm.embed(TEXTS, pooling_params=short, use_tqdm=False)[0].prompt_token_ids) == 4


def test_bad_names_are_refused(plain: Model, tmp_path: Path) -> None:
    with opened(plain) as llm:
        check(embed(llm, TEXTS), plain, "")
        check(embed(llm, TEXTS, "s2s"), plain, PROMPTS["s2s"])
        with pytest.raises(InvalidParameter, match="prompt_name must be one of query, document, passage, s2s, or empty"):
            embed(llm, TEXTS, "other")
        with pytest.raises(InvalidParameter, match="prompt_name requires a text"):
            embed(llm, [{"prompt_token_ids": [3, 4]}], "query")
    save_text_encoder(tmp_path)
    with (
        LLM(str(tmp_path), device="cpu", dtype="float32") as llm,
        pytest.raises(InvalidParameter, match="prompt_name is not supported by this model"),
    ):
        embed(llm, TEXTS, "query")
    with pytest.raises(InvalidParameter, match="prompt_name must be the name"):
        PoolingParams(prompt_name=1)  # type: ignore[arg-type]


def test_over_http(tmp_path: Path) -> None:
    model = Model(tmp_path, "mean", "s2s", include_prompt=False)
    served = Running(tmp_path, max_num_batched_tokens=128)
    try:
        http = served.http

        def post(path: str, **body: Any) -> Any:
            answer = http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()

        def vectors(**body: Any) -> Any:
            return [one["embedding"] for one in post("/v1/embeddings", input=TEXTS, **body)["data"]]

        check(vectors(), model, PROMPTS["s2s"])
        check(vectors(prompt_name="query"), model, PROMPTS["query"])
        check(vectors(prompt_name=""), model, "")
        each = post("/pooling", input=TEXTS, prompt_name="query", task="embed")["data"]
        check([one["data"] for one in each], model, PROMPTS["query"])
        for kind, before in ((None, "s2s"), ("search_query", "query"), ("search_document", "document"), ("s2s", "s2s")):
            body = {} if kind is None else {"input_type": kind}
            check(post("/v2/embed", texts=TEXTS, **body)["embeddings"]["float"], model, PROMPTS[before])
        for body, names in (({}, ("query", "document")), ({"prompt_name": "s2s"}, ("s2s", "document")),
                            ({"prompt_name": ""}, ("document", "document"))):  # fmt: skip
            query, document = (model.vector(text, PROMPTS[name]) for text, name in zip(TEXTS, names, strict=False))
            [found] = post("/rerank", query=TEXTS[0], documents=[TEXTS[1]], **body)["results"]
            assert found["relevance_score"] == pytest.approx(query @ document, abs=1e-5)
        [found] = post("/score", text_1=TEXTS[0], text_2=TEXTS[1], prompt_name="query")["data"]
        right = model.vector(TEXTS[0], PROMPTS["query"]) @ model.vector(TEXTS[1], PROMPTS["query"])
        assert found["score"] == pytest.approx(right, abs=1e-5)
        ids = model.tokenizer.encode(TEXTS[0]).ids
        for body in ({"input": TEXTS, "prompt_name": "other"}, {"input": ids, "prompt_name": "query"},
                     {"messages": [{"role": "user", "content": "a"}], "prompt_name": "query"}):  # fmt: skip
            error = error_of(http.post("/v1/embeddings", json=body))
            assert (error["code"], error["param"]) == (400, "prompt_name"), error
    finally:
        served.close()
