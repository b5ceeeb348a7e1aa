"""Encoders on several ranks and in several engines: the vectors are those of one process."""

from pathlib import Path

import numpy as np
import pytest
from test_encoders_pool import TEXTS, normal, opened, write_sentence_files

from encoder_families import ENCODERS, logits_of, save_encoder, states_of

NAMES = ["BERT", "RoBERTa", "MPNet", "DistilBERT, classes", "ModernBERT", "Nomic", "GTE, classes", "Jina v3"]


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_have_the_vectors_of_one(name: str, tmp_path: Path, quick: None) -> None:
    model = save_encoder(ENCODERS[name], tmp_path)
    prompts = [{"prompt_token_ids": text} for text in TEXTS]
    if name.endswith("classes"):
        with opened(tmp_path, tensor_parallel_size=2) as llm:
            found = [one.outputs.probs for one in llm.classify(prompts, use_tqdm=False)]
        expected = [logits_of(model, text).softmax(-1).numpy() for text in TEXTS]
    else:
        write_sentence_files(tmp_path, "mean_tokens")
        with opened(tmp_path, tensor_parallel_size=2) as llm:
            found = [one.outputs.embedding for one in llm.embed(prompts, use_tqdm=False)]
        expected = [normal(states_of(model, text).mean(0)) for text in TEXTS]
    for one, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, right, atol=1e-5)


def test_two_engines_have_the_vectors_of_one(tmp_path: Path, quick: None) -> None:
    save_encoder(ENCODERS["BERT"], tmp_path)
    prompts = [{"prompt_token_ids": text} for text in TEXTS]
    with opened(tmp_path) as llm:
        alone = [one.outputs.embedding for one in llm.embed(prompts, use_tqdm=False)]
    with opened(tmp_path, data_parallel_size=2) as llm:
        found = [one.outputs.embedding for one in llm.embed(prompts, use_tqdm=False)]
    np.testing.assert_allclose(found, alone, atol=1e-6)
