"""Engines next to each other in one process, and what `del llm` leaves."""

import gc
import weakref

import numpy as np
from test_decoders import PROMPTS, made, normal, opened, states

from encoder_families import ENCODERS, random_texts, save_encoder, states_of
from quire import SamplingParams


def test_a_generating_engine_and_two_pooling_engines_in_one_process(tmp_path):
    model = made(tmp_path / "decoder", "LlamaForCausalLM")
    encoder = save_encoder(ENCODERS["BERT"], tmp_path / "encoder")
    texts = random_texts([7, 30])
    greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    with opened(tmp_path / "decoder") as alone:
        expected = [one.outputs[0].token_ids for one in alone.generate(PROMPTS, greedy, use_tqdm=False)]
    generating = opened(tmp_path / "decoder")
    embedding = opened(tmp_path / "decoder", runner="pooling")
    encoding = opened(tmp_path / "encoder", skip_tokenizer_init=True)
    for _ in range(2):
        found = [one.outputs[0].token_ids for one in generating.generate(PROMPTS, greedy, use_tqdm=False)]
        assert found == expected
        for ids, one in zip(PROMPTS, embedding.embed(PROMPTS, use_tqdm=False), strict=True):
            np.testing.assert_allclose(one.outputs.embedding, normal(states(model.model, ids)[-1]).numpy(), atol=1e-5)
        prompts = [{"prompt_token_ids": text} for text in texts]
        for text, one in zip(texts, encoding.embed(prompts, use_tqdm=False), strict=True):
            np.testing.assert_allclose(one.outputs.embedding, normal(states_of(encoder, text)[0]).numpy(), atol=1e-5)
    executor = weakref.ref(embedding.llm_engine.core)
    embedding.close()
    del embedding, one
    gc.collect()
    assert executor() is None
    assert [one.outputs[0].token_ids for one in generating.generate(PROMPTS, greedy, use_tqdm=False)] == expected
    encoding.close()
    generating.close()


def test_an_engine_that_is_deleted_is_freed(tmp_path):
    save_encoder(ENCODERS["BERT"], tmp_path)
    llm = opened(tmp_path, skip_tokenizer_init=True)
    llm.embed([{"prompt_token_ids": [5, 6, 7]}], use_tqdm=False)
    core = weakref.ref(llm.llm_engine.core)
    del llm
    gc.collect()
    assert core() is None
