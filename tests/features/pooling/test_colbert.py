"""Late interaction: vectors of queries and documents, and their scores, from all formats of checkpoints."""

import json
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from encoder_families import MODERN, Encoder
from quire import LLM, PoolingParams
from quire.types.errors import InvalidParameter
from sentence_models import save_text_encoder, write_modules
from serving import Running

QUERY = "the quick brown"
DOCUMENTS = ["a page, is a page.", "jumps over the lazy dog", "..."]
SIZE = 6
Q, D, MASK = 318, 319, 317  # token ids
DENSE = {"in_features": 32, "out_features": SIZE, "bias": False, "activation_function": "torch.nn.modules.linear.Identity"}
MODERNBERT = Encoder("ModernBertModel", "ModernBertConfig", {**MODERN, "vocab_size": 320, "local_attention": 6})


@dataclass
class Model:
    """A checkpoint, and what it makes of texts: [CLS] marker text [SEP], queries filled with mask tokens."""

    model: Any
    tokenizer: Any
    weight: torch.Tensor
    fill: int = 0
    most: tuple[int | None, int | None] = (None, None)
    attended: bool = False
    skips: bool = True

    def ids(self, text: str, query: bool) -> list[int]:
        body, most = self.tokenizer.encode(text, add_special_tokens=False).ids, self.most[0 if query else 1]
        return [0, Q if query else D, *(body if most is None else body[: most - 3]), 1]

    @torch.no_grad()
    def vectors(self, text: str, query: bool) -> np.ndarray:
        ids = self.ids(text, query)
        added = max(0, self.fill - len(ids)) if query else 0
        seen = [1] * len(ids) + [int(self.attended)] * added
        inputs = {"input_ids": torch.tensor([ids + [MASK] * added]), "attention_mask": torch.tensor([seen])}
        states = self.model(**inputs).last_hidden_state[0] @ self.weight.T
        skipped = {self.tokenizer.token_to_id(sign) for sign in string.punctuation} if self.skips and not query else set()
        kept = [i for i, token in enumerate(ids + [MASK] * added) if token not in skipped]
        return torch.nn.functional.normalize(states[kept], dim=-1).numpy()

    def score(self, query: str, document: str) -> float:
        return float((self.vectors(query, True) @ self.vectors(document, False).T).max(1).sum())


def save(folder: Path, family: Encoder | None = None) -> tuple[Any, Any, torch.Tensor]:
    """Save an encoder, and a tokenizer with markers and a mask token."""
    from tokenizers import Tokenizer

    model, tokenizer = save_text_encoder(folder, family)
    content = json.loads(tokenizer.to_str())
    names = {Q: "[Q] ", D: "[D] ", MASK: "[MASK]"}
    content["added_tokens"] += [
        {"id": index, "content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for index, name in sorted(names.items())
    ]  # fmt: skip
    vocabulary = content["model"]["vocab"]
    by_id = {index: token for token, index in vocabulary.items()}
    merged = {by_id.get(index) for index in names}
    for index in names:
        vocabulary.pop(by_id[index], None)
    content["model"]["merges"] = [pair for pair in content["model"]["merges"] if "".join(pair) not in merged]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "mask_token": "[MASK]"}))
    torch.manual_seed(3)
    return model, Tokenizer.from_file(str(folder / "tokenizer.json")), torch.randn(SIZE, 32)


def save_pylate(folder: Path, family: Encoder | None = None, **settings: Any) -> Model:
    model, tokenizer, weight = save(folder, family)
    markers = {"query_prefix": "[Q] ", "document_prefix": "[D] "}
    write_modules(folder, [("1_Dense", "pylate.models.Dense.Dense", DENSE)], {"model_type": "ColBERT", **markers, **settings})
    save_file({"linear.weight": weight}, folder / "1_Dense/model.safetensors")
    fill = settings.get("query_length") or 32
    return Model(model, tokenizer, weight, fill, (fill, settings.get("document_length")))


def opened(folder: Path, **args: Any) -> LLM:
    return LLM(str(folder), device="cpu", dtype="float32", max_num_seqs=4, **args)


def vectors(llm: LLM, texts: list[str], role: str) -> list[np.ndarray]:
    params = PoolingParams(task="token_embed", prompt_name=role)
    return [one.outputs.data for one in llm.encode(texts, params, use_tqdm=False)]


def check(llm: LLM, model: Model) -> None:
    assert llm.supported_tasks == ("token_embed", "score")
    for role, texts in (("query", [QUERY, DOCUMENTS[1], "a"]), ("document", DOCUMENTS[:2])):
        for text, found in zip(texts, vectors(llm, texts, role), strict=True):
            np.testing.assert_allclose(found, model.vectors(text, role == "query"), atol=1e-5)
    scores = [one.outputs.score for one in llm.score(QUERY, DOCUMENTS[:2], use_tqdm=False)]
    np.testing.assert_allclose(scores, [model.score(QUERY, text) for text in DOCUMENTS[:2]], atol=1e-4)


@pytest.mark.parametrize("family", [None, MODERNBERT], ids=["BERT", "ModernBERT"])
def test_pylate(tmp_path: Path, family: Encoder | None) -> None:
    model = save_pylate(tmp_path, family, query_length=12, document_length=9, attend_to_expansion_tokens=False)
    with opened(tmp_path) as llm:
        check(llm, model)
        plain = llm.encode(QUERY, PoolingParams(task="token_embed"), use_tqdm=False)[0]  # neither query nor document
        assert len(plain.outputs.data) == len(model.tokenizer.encode(QUERY).ids)
        with pytest.raises(InvalidParameter, match="prompt_name must be one of query, document"):
            vectors(llm, [QUERY], "other")
        assert llm.score(QUERY, DOCUMENTS[1], use_tqdm=False)[0].prompt_token_ids[:2] == [0, Q]


def test_mask_tokens_that_are_attended_to_and_no_expansion(tmp_path: Path) -> None:
    model = save_pylate(tmp_path, query_length=12, attend_to_expansion_tokens=True, skiplist_words=[])
    model.attended, model.skips = True, False
    with opened(tmp_path) as llm:
        check(llm, model)
    settings = json.loads((tmp_path / "config_sentence_transformers.json").read_text())
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({**settings, "do_query_expansion": False}))
    model.fill = 0
    with opened(tmp_path) as llm:
        check(llm, model)


def test_stanford(tmp_path: Path) -> None:
    model, tokenizer, weight = save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["HF_ColBERT"]}))
    weights = {f"bert.{name}": value for name, value in load_file(tmp_path / "model.safetensors").items()}
    save_file({**weights, "linear.weight": weight}, tmp_path / "model.safetensors", {"format": "pt"})
    metadata = {"query_maxlen": 14, "doc_maxlen": 9, "query_token_id": "[Q] ", "doc_token_id": "[D] ", "mask_punctuation": True}
    (tmp_path / "artifact.metadata").write_text(json.dumps(metadata))
    with opened(tmp_path) as llm:
        check(llm, Model(model, tokenizer, weight, 14, (14, 9)))


def test_sentence_transformers(tmp_path: Path) -> None:
    model, tokenizer, weight = save(tmp_path)
    kinds = "sentence_transformers.multi_vector_encoder.modules.MultiVectorMask"
    write_modules(
        tmp_path,
        [("1_Dense", "sentence_transformers.base.modules.Dense", {**DENSE, "module_input_name": "token_embeddings"}),
         ("2_Mask", kinds, {"skiplist_words": [".", ","], "skiplist_tasks": ["document"]}),
         ("3_Normalize", "sentence_transformers.base.modules.Normalize", None)],
        {"model_type": "MultiVectorEncoder", "prompts": {"query": "[Q] ", "document": "[D] "}},
    )  # fmt: skip
    save_file({"linear.weight": weight}, tmp_path / "1_Dense/model.safetensors")
    expansion = {"strategy": "min", "attend": False, "length": 10}
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"query_expansion": expansion, "document_length": 30}))
    with opened(tmp_path) as llm:
        check(llm, Model(model, tokenizer, weight, 10, (None, 30)))


def test_served(tmp_path: Path) -> None:
    model = save_pylate(tmp_path, query_length=12, document_length=9)
    served = Running(tmp_path, max_num_batched_tokens=128)
    try:
        right = [model.score(QUERY, text) for text in DOCUMENTS[:2]]
        found = served.http.post("/score", json={"text_1": QUERY, "text_2": DOCUMENTS[:2]}).json()
        np.testing.assert_allclose([one["score"] for one in found["data"]], right, atol=1e-4)
        results = served.http.post("/rerank", json={"query": QUERY, "documents": DOCUMENTS[:2]}).json()["results"]
        assert [one["index"] for one in results] == np.argsort(right)[::-1].tolist()
        np.testing.assert_allclose([one["relevance_score"] for one in results], sorted(right)[::-1], atol=1e-4)
        for role in ("query", "document"):
            body = {"input": DOCUMENTS[1], "task": "token_embed", "prompt_name": role}
            data = served.http.post("/pooling", json=body).json()["data"][0]["data"]
            np.testing.assert_allclose(data, model.vectors(DOCUMENTS[1], role == "query"), atol=1e-5)
    finally:
        served.close()
