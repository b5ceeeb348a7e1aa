"""Encoders in the engine: their vectors and scores are those of transformers, in any batch; their files decide the pooling."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from encoder_families import ENCODERS, SIZES, Encoder, logits_of, random_texts, save_encoder, states_of
from quire import LLM, PoolingParams, SamplingParams
from quire.device.cpu.autotune import runtime_for_floats
from quire.features.pooling import device
from quire.features.pooling.device import ORDERED_STATES, Group, PoolingPart
from quire.types.errors import ConfigError, NotSupported, PromptTooLong
from tiny_model import make_tokenizer

TEXTS = random_texts([7, 40, 1, 40, 12, 64, 3])


def opened(directory: Path, **args: object) -> LLM:
    defaults = {"device": "cpu", "dtype": "float32", "max_num_seqs": 4, "skip_tokenizer_init": True}
    return LLM(str(directory), **defaults | args)


def normal(x: Tensor) -> np.ndarray:
    return torch.nn.functional.normalize(x, dim=-1).numpy()


def write_sentence_files(folder: Path, pooling: str, length: int | None = None) -> None:
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modules = [{"idx": i, "path": path, "type": f"sentence_transformers.models.{kind}"} for i, (path, kind) in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{pooling}": True}))
    if length is not None:
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": length}))


@pytest.mark.parametrize("name", ["BERT", "MPNet", "ModernBERT", "Nomic"])
def test_vectors_have_the_same_bits_in_any_batch(name: str, tmp_path: Path) -> None:
    model = save_encoder(ENCODERS[name], tmp_path)
    write_sentence_files(tmp_path, "mean_tokens")
    with opened(tmp_path) as llm:
        assert llm.supported_tasks == ("embed", "token_embed", "score")
        together = llm.embed([{"prompt_token_ids": text} for text in TEXTS], use_tqdm=False)
        alone = [llm.embed({"prompt_token_ids": text}, use_tqdm=False)[0] for text in TEXTS[:4]]
        llm.llm_engine.core.scheduler.roster.check()
    for text, found in zip(TEXTS, together, strict=True):
        np.testing.assert_allclose(found.outputs.embedding, normal(states_of(model, text).mean(0)), atol=1e-5)
    if runtime_for_floats() is not None:  # the CPU's matrix products are batch-invariant
        assert [one.outputs.embedding for one in alone] == [one.outputs.embedding for one in together[:4]]


def test_the_fixed_order_pools_as_many_states_at_a_time_for_any_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_encoder(ENCODERS["BERT"], tmp_path)
    monkeypatch.setattr(device, "order_is_fixed", lambda: True)
    together, counts = PoolingPart._activate_together, set()

    def counted(part: PoolingPart, group: Group, states: Tensor) -> Tensor:
        counts.add(len(states))
        return together(part, group, states)

    monkeypatch.setattr(PoolingPart, "_activate_together", counted)
    texts = random_texts([7, 90, 64, 1])
    with opened(tmp_path) as llm:
        params = PoolingParams(task="token_embed", use_activation=False)
        found = llm.encode([{"prompt_token_ids": text} for text in texts], params, use_tqdm=False)
    assert counts == {ORDERED_STATES}
    for text, one in zip(texts, found, strict=True):
        np.testing.assert_allclose(one.outputs.data, states_of(model, text).numpy(), atol=1e-5)


def test_without_any_file_the_first_token_is_the_vector(tmp_path: Path) -> None:
    model = save_encoder(ENCODERS["BERT"], tmp_path)
    with opened(tmp_path, max_num_batched_tokens=96) as llm:
        found = llm.embed([{"prompt_token_ids": text} for text in TEXTS], use_tqdm=False)
        raw = PoolingParams(task="token_embed", use_activation=False)
        tokens = llm.encode([{"prompt_token_ids": text} for text in TEXTS], raw, use_tqdm=False)
        with pytest.raises(NotSupported):
            llm.generate([{"prompt_token_ids": TEXTS[0]}], SamplingParams(max_tokens=1), use_tqdm=False)
        with pytest.raises(PromptTooLong, match="maximum context length is 96"):
            llm.embed({"prompt_token_ids": [5] * 97}, use_tqdm=False)
        [whole] = llm.embed({"prompt_token_ids": [5] * 96}, use_tqdm=False)
    np.testing.assert_allclose(whole.outputs.embedding, normal(states_of(model, [5] * 96)[0]), atol=1e-5)
    for text, vector, states in zip(TEXTS, found, tokens, strict=True):
        np.testing.assert_allclose(vector.outputs.embedding, normal(states_of(model, text)[0]), atol=1e-5)
        np.testing.assert_allclose(states.outputs.data, states_of(model, text).numpy(), atol=1e-5)


def test_the_longest_text_is_that_of_sentence_transformers_unless_another_is_asked_for(tmp_path: Path) -> None:
    save_encoder(ENCODERS["BERT"], tmp_path)
    write_sentence_files(tmp_path, "cls_token", length=20)
    with opened(tmp_path) as llm, pytest.raises(PromptTooLong, match="maximum context length is 20"):
        llm.embed({"prompt_token_ids": TEXTS[1]}, use_tqdm=False)
    with opened(tmp_path, max_model_len=64) as llm:
        assert len(llm.embed({"prompt_token_ids": TEXTS[1]}, use_tqdm=False)) == 1


@pytest.mark.parametrize("name", ["XLM-R, classes", "DistilBERT, classes", "ModernBERT, classes", "GTE, classes"])
def test_classes(name: str, tmp_path: Path) -> None:
    model = save_encoder(ENCODERS[name], tmp_path)
    with opened(tmp_path) as llm:
        found = llm.classify([{"prompt_token_ids": text} for text in TEXTS], use_tqdm=False)
    for text, one in zip(TEXTS, found, strict=True):
        np.testing.assert_allclose(one.outputs.probs, logits_of(model, text).softmax(-1).numpy(), atol=1e-5)


def test_classes_of_tokens(tmp_path: Path) -> None:
    model = save_encoder(ENCODERS["BERT, tokens"], tmp_path)
    with opened(tmp_path) as llm:
        assert llm.supported_tasks == ("token_classify",)
        found = llm.encode([{"prompt_token_ids": text} for text in TEXTS], use_tqdm=False)
    for text, one in zip(TEXTS, found, strict=True):
        np.testing.assert_allclose(one.outputs.data, logits_of(model, text).softmax(-1).numpy(), atol=1e-5)


def test_a_cross_encoder_distinguishes_the_two_texts(tmp_path: Path) -> None:
    """The second text's tokens have type 1, as the tokenizer's template for pairs says."""
    from tokenizers import Tokenizer, processors

    options = {**SIZES, "vocab_size": 320, "num_labels": 1}
    model = save_encoder(Encoder("BertForSequenceClassification", "BertConfig", options), tmp_path)
    make_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    special = [(tokenizer.id_to_token(index), index) for index in (0, 1)]
    (cls, _), (sep, _) = special
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}", pair=f"{cls} $A {sep} $B:1 {sep}:1", special_tokens=special
    )
    tokenizer.save(str(path))
    pairs = [("which animal", "a cat sat there"), ("which", "the longest of all these texts is this one")]
    with opened(tmp_path, skip_tokenizer_init=False) as llm:
        found = llm.score([query for query, _ in pairs], [text for _, text in pairs], use_tqdm=False)
        cut = llm.score(*pairs[1], pooling_params=PoolingParams(truncate_prompt_tokens=12), use_tqdm=False)[0]
    for (query, text), one in zip(pairs, found, strict=True):
        encoded = tokenizer.encode(query, text)
        assert 1 in encoded.type_ids
        assert one.prompt_token_ids == encoded.ids
        expected = logits_of(model, encoded.ids, encoded.type_ids).sigmoid().item()
        assert one.outputs.score == pytest.approx(expected, abs=1e-5)
    tokenizer.enable_truncation(12, strategy="longest_first")
    assert cut.prompt_token_ids == tokenizer.encode(*pairs[1]).ids


def test_texts_are_lower_cased_where_sentence_transformers_does_so(tmp_path: Path) -> None:
    save_encoder(Encoder("BertModel", "BertConfig", {**SIZES, "vocab_size": 320}), tmp_path)
    make_tokenizer(tmp_path)
    write_sentence_files(tmp_path, "mean_tokens")
    with opened(tmp_path, skip_tokenizer_init=False) as llm:
        upper, lower = (one.prompt_token_ids for one in llm.embed(["The CAT", "the cat"], use_tqdm=False))
        assert upper != lower
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": True}))
    with opened(tmp_path, skip_tokenizer_init=False) as llm:
        found = [one.prompt_token_ids for one in llm.embed(["The CAT", {"prompt": "The CAT"}], use_tqdm=False)]
        assert found == [lower, lower]
        assert len({one.outputs.score for one in llm.score(["The CAT", "the cat"], ["A cat", "a CAT"], use_tqdm=False)}) == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"runner": "generate"}, "requires an LM head"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2 is not supported with BertModel, an encoder. Divide the"),
        ({"max_num_batched_tokens": 50}, "a whole prompt must fit in one step"),
        ({"model_impl": "transformers"}, "transformers"),
    ],
)
def test_what_encoders_cannot_do_is_refused_at_the_start(args: dict[str, object], message: str, tmp_path: Path) -> None:
    save_encoder(ENCODERS["BERT"], tmp_path)
    with pytest.raises(ConfigError, match=message):
        opened(tmp_path, **args)


@pytest.mark.parametrize("name", ["RoBERTa", "MPNet"])
def test_a_padding_token_in_a_text_has_no_position_of_its_own(name: str, tmp_path: Path) -> None:
    model = save_encoder(ENCODERS[name], tmp_path)
    texts = [[5, 1, 6, 1, 1, 7], [1], [1, 8, 9], [4, 5, 6]]
    with opened(tmp_path) as llm:
        raw = PoolingParams(task="token_embed", use_activation=False)
        found = llm.encode([{"prompt_token_ids": text} for text in texts], raw, use_tqdm=False)
    for text, one in zip(texts, found, strict=True):
        np.testing.assert_allclose(one.outputs.data, states_of(model, text).numpy(), atol=1e-4)
