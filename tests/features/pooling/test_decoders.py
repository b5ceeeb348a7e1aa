"""Decoders that pool: their values are those of transformers, whatever else runs and however their prompts are cut."""

import itertools
import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quire import LLM, PoolingParams, SamplingParams
from quire.ops.native import run_decoders
from quire.types.errors import ConfigError, InvalidParameter, NotSupported, PromptTooLong
from tiny_model import make_tokenizer

SIZES = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
PROMPTS = [[5 + i * 7 % 300 for i in range(count)] for count in (21, 1, 2, 40, 33, 64)]
TAG = PROMPTS[0][2]


def made(directory, kind="LlamaModel", config="LlamaConfig", **changes):
    """A checkpoint of a class of transformers, and its model."""
    directory.mkdir(exist_ok=True)
    make_tokenizer(directory)
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**SIZES | changes, initializer_range=0.3)).eval()
    model.save_pretrained(directory)
    return model


def opened(directory, **args) -> LLM:
    defaults = {"device": "cpu", "dtype": "float32", "block_size": 4, "max_num_seqs": 4, "num_gpu_blocks_override": 64}
    return LLM(str(directory), **defaults | args)


@torch.inference_mode()
def states(model, ids) -> torch.Tensor:
    return model(torch.tensor([ids])).last_hidden_state[0]


def normal(x):
    return torch.nn.functional.normalize(x, dim=-1)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    directory = tmp_path_factory.mktemp("embedder")
    return directory, made(directory, is_matryoshka=True)


@pytest.mark.parametrize("kind", ["LAST", "CLS", "MEAN"])
def test_vectors_are_transformers_in_any_batch_and_any_chunks(embedder, kind):
    directory, model = embedder
    right = {"LAST": lambda x: x[-1], "CLS": lambda x: x[0], "MEAN": lambda x: x.mean(0)}[kind]
    with opened(directory, pooler_config={"pooling_type": kind}, max_num_batched_tokens=16) as llm:
        assert llm.supported_tasks == ("embed", "token_embed", "score")
        together = llm.embed(PROMPTS, use_tqdm=False)
        alone = [llm.embed(ids, use_tqdm=False)[0] for ids in reversed(PROMPTS)][::-1]
        llm.llm_engine.core.scheduler.roster.check()
    with opened(directory, pooler_config={"pooling_type": kind}, num_gpu_blocks_override=40, max_num_batched_tokens=9) as llm:
        engine, steps = llm.llm_engine, itertools.count()
        step = engine.step_requests
        engine.step_requests = lambda: (next(steps) in (2, 7) and engine.reset_prefix_cache(True), step())[1]
        tight = llm.embed(PROMPTS, use_tqdm=False)
        assert engine.core.stats.preemptions
    for ids, *found in zip(PROMPTS, together, alone, tight, strict=True):
        for one in found:
            np.testing.assert_allclose(one.outputs.embedding, normal(right(states(model, ids))).numpy(), atol=1e-5)
            if run_decoders():  # the CPU's kernels are batch-invariant
                assert one.outputs.embedding == found[0].outputs.embedding
    assert [one.num_cached_tokens > 0 for one in alone] == [kind == "LAST" and len(ids) > 4 for ids in PROMPTS]


def test_every_token_has_a_vector(embedder):
    directory, model = embedder
    with opened(directory, max_num_batched_tokens=16) as llm:
        raw = PoolingParams(task="token_embed", use_activation=False)
        for ids, found in zip(PROMPTS, llm.encode(PROMPTS, raw, use_tqdm=False), strict=True):
            assert found.outputs.data.dtype == np.float32
            np.testing.assert_allclose(found.outputs.data, states(model, ids).numpy(), atol=2e-5)


def test_vectors_are_cut_and_normalized_as_asked(embedder):
    directory, model = embedder
    ids, last = PROMPTS[0], states(model, PROMPTS[0])[-1]
    with opened(directory) as llm:
        ways = [PoolingParams(dimensions=8), PoolingParams(use_activation=False), PoolingParams(normalize=False, dimensions=4)]
        cut, raw, both = (one.outputs.embedding for one in llm.embed([ids] * 3, pooling_params=ways, use_tqdm=False))
        np.testing.assert_allclose(cut, normal(last[:8]).numpy(), atol=1e-5)
        np.testing.assert_allclose(raw, last.numpy(), atol=1e-5)
        np.testing.assert_allclose(both, last[:4].numpy(), atol=1e-5)
        begin, whole = llm.embed([ids, ids[:5]], pooling_params=[PoolingParams(truncate_prompt_tokens=5), PoolingParams()],
                                 use_tqdm=False)  # fmt: skip
        assert begin.outputs.embedding == whole.outputs.embedding and begin.prompt_token_ids == ids[:5]
        scores = [one.outputs.score for one in llm.score("a page", ["a page", "the lazy dog"], use_tqdm=False)]
        assert scores[0] == pytest.approx(1.0) and scores[1] < 0.99
        assert llm.llm_engine.model_config.runner_type == "pooling"


def test_what_an_embedder_cannot_do_is_refused_by_name(embedder):
    directory, _ = embedder
    with opened(directory, hf_overrides={"is_matryoshka": False}) as llm:
        for params, field, error in (
            (PoolingParams(dimensions=8), "dimensions", InvalidParameter),
            (PoolingParams(task="classify"), "task", InvalidParameter),
            (PoolingParams(step_tag_id=3), "step_tag_id", InvalidParameter),
            (PoolingParams(truncate_prompt_tokens=1000), "truncate_prompt_tokens", InvalidParameter),
        ):
            with pytest.raises(error, match=field) as caught:
                llm.encode(PROMPTS, params, use_tqdm=False)
            assert caught.value.parameter == field
        for prompt, error in (([], InvalidParameter), ([[320]], InvalidParameter), ([[7] * 129], PromptTooLong)):
            with pytest.raises(error):
                llm.embed(prompt, use_tqdm=False)
        with pytest.raises(InvalidParameter, match="data_1"):
            llm.score(["a", "b"], ["a", "b", "c"], use_tqdm=False)
        for call in (
            lambda: llm.generate("a", SamplingParams(), use_tqdm=False),
            lambda: llm.chat([{"role": "user", "content": "a"}]),
        ):
            with pytest.raises(NotSupported, match="generates no text"):
                call()
        assert len(llm.embed([[7] * 128], use_tqdm=False)[0].outputs.embedding) == 64  # the whole context
    with opened(directory, hf_overrides={"is_matryoshka": True}) as llm, pytest.raises(InvalidParameter, match="at most 64"):
        llm.embed(PROMPTS, pooling_params=PoolingParams(dimensions=65), use_tqdm=False)


@pytest.mark.parametrize(
    "args, match",
    [
        ({"runner": "generate"}, "requires an LM head"),
        ({"convert": "classify"}, "has a head of its own"),
        ({"pooler_config": {"pooling_type": "SUM"}}, "LAST, CLS, MEAN"),
        ({"pooler_config": {"enable_chunked_processing": True}}, "enable_chunked_processing is not supported"),
        ({"pooler_config": {"poling": 1}}, "has no 'poling'"),
        ({"pooler_config": {"tok_pooling_type": "STEP"}}, "requires step_tag_id"),
        ({"task": "embed", "convert": "embed"}, "stands for runner and convert"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "speculative_config is not supported"),
    ],
)
def test_settings_that_do_not_suit_are_refused(embedder, args, match):
    with pytest.raises(ConfigError, match=match):
        opened(embedder[0], **args)


def test_a_generating_model_pools_if_asked(tmp_path):
    model = made(tmp_path, "LlamaForCausalLM")
    for args in ({"runner": "pooling"}, {"convert": "embed"}, {"task": "embed"}):
        with opened(tmp_path, **args) as llm:
            found = llm.embed(PROMPTS[:2], use_tqdm=False)
            for ids, one in zip(PROMPTS, found, strict=False):
                np.testing.assert_allclose(one.outputs.embedding, normal(states(model.model, ids)[-1]).numpy(), atol=1e-5)
    with opened(tmp_path) as llm:
        assert llm.supported_tasks == ("generate",) and llm.generate([PROMPTS[0]], use_tqdm=False)[0].outputs[0].token_ids
        with pytest.raises(NotSupported, match="runner='pooling'"):
            llm.embed(PROMPTS, use_tqdm=False)


def test_files_of_sentence_transformers_decide(tmp_path):
    model = made(tmp_path, "Qwen3ForCausalLM", "Qwen3Config", head_dim=16)
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Dense", "Dense"), ("3_Normalize", "Normalize")]
    listed = [
        {"idx": i, "path": path, "type": f"sentence_transformers.models.{kind}"} for i, (path, kind) in enumerate(modules)
    ]
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    (tmp_path / "2_Dense").mkdir()
    dense = {"in_features": 64, "out_features": 6, "bias": True, "activation_function": "torch.nn.modules.activation.Tanh"}
    (tmp_path / "2_Dense/config.json").write_text(json.dumps(dense))
    weight, bias = torch.randn(6, 64), torch.randn(6)
    save_file({"linear.weight": weight, "linear.bias": bias}, tmp_path / "2_Dense/model.safetensors")
    with opened(tmp_path, max_num_batched_tokens=16) as llm:
        for ids, one in zip(PROMPTS, llm.embed(PROMPTS, use_tqdm=False), strict=True):
            right = normal(torch.tanh(states(model.model, ids).mean(0) @ weight.T + bias))
            np.testing.assert_allclose(one.outputs.embedding, right.numpy(), atol=1e-5)


@pytest.mark.parametrize("labels", [1, 3])
def test_sequences_are_classified(tmp_path, labels):
    model = made(tmp_path, "Qwen2ForSequenceClassification", "Qwen2Config", num_labels=labels)
    with torch.inference_mode():
        logits = [model(torch.tensor([ids])).logits[0] for ids in PROMPTS]
        right = [x.sigmoid() if labels == 1 else x.softmax(-1) for x in logits]
    with opened(tmp_path, max_num_batched_tokens=16) as llm:
        assert llm.supported_tasks == ("classify", "token_classify", *(["score"] if labels == 1 else []))
        for one, values in zip(llm.classify(PROMPTS, use_tqdm=False), right, strict=True):
            np.testing.assert_allclose(one.outputs.probs, values.numpy(), atol=1e-5)
        for one, values in zip(llm.reward(PROMPTS, use_tqdm=False), logits, strict=True):
            np.testing.assert_allclose(one.outputs.data, values.numpy(), atol=1e-5, rtol=1e-5)
        if labels == 1:
            query, document = (llm.get_tokenizer().encode(text) for text in ("a page", "the lazy dog"))
            [scored] = llm.score("a page", "the lazy dog", use_tqdm=False)
            [joined] = llm.classify([query + document], use_tqdm=False)
            assert scored.outputs.score == joined.outputs.probs[0]


def test_tokens_are_classified(tmp_path):
    model = made(tmp_path, "LlamaForTokenClassification", num_labels=3)
    with opened(tmp_path, max_num_batched_tokens=16) as llm:
        assert llm.supported_tasks == ("token_classify",)
        some = PoolingParams(returned_token_ids=[2, 0])
        whole, chosen = llm.encode([PROMPTS[3]] * 2, [PoolingParams(), some], use_tqdm=False)
        with torch.inference_mode():
            right = model(torch.tensor([PROMPTS[3]])).logits[0].softmax(-1).numpy()
        np.testing.assert_allclose(whole.outputs.data, right, atol=1e-5)
        np.testing.assert_allclose(chosen.outputs.data, right[:, [2, 0]], atol=1e-5)
        with pytest.raises(InvalidParameter, match="below 3"):
            llm.encode([PROMPTS[3]], PoolingParams(returned_token_ids=[3]), use_tqdm=False)


def test_rewards_of_steps(tmp_path):
    """Qwen2.5-Math-PRM's shape: two layers with a ReLU, scores after each step's tag."""
    model = made(tmp_path, "Qwen2Model", "Qwen2Config")
    head = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
    tensors = {f"model.{name}": value for name, value in load_file(tmp_path / "model.safetensors").items()}
    save_file(tensors | {f"score.{name}": value for name, value in head.state_dict().items()}, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["Qwen2ForProcessRewardModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ids = [TAG if i % 9 == 4 else token for i, token in enumerate(PROMPTS[4])]
    with torch.inference_mode():
        right = head(states(model, ids)).softmax(-1).numpy()
    with opened(tmp_path, pooler_config={"step_tag_id": TAG}, max_num_batched_tokens=16) as llm:
        [steps] = llm.reward([ids], use_tqdm=False)
        np.testing.assert_allclose(steps.outputs.data, right[[i for i, token in enumerate(ids) if token == TAG]], atol=1e-5)
    with opened(tmp_path, max_num_batched_tokens=16) as llm:
        np.testing.assert_allclose(llm.reward([ids], use_tqdm=False)[0].outputs.data, right, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_qwen3_reranker_scores_by_two_tokens(tmp_path, tied):
    model = made(tmp_path, "Qwen3ForCausalLM", "Qwen3Config", head_dim=16, tie_word_embeddings=tied)
    overrides = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["q", "z"],
                 "is_original_qwen3_reranker": True}  # fmt: skip
    with opened(tmp_path, hf_overrides=overrides, max_model_len=128, max_num_batched_tokens=32) as llm:
        no, yes = (llm.get_tokenizer().encode(token, add_special_tokens=False)[0] for token in "qz")
        assert llm.supported_tasks == ("classify", "token_classify", "score")
        for ids, one in zip(PROMPTS, llm.classify(PROMPTS, use_tqdm=False), strict=True):
            with torch.inference_mode():
                logits = model(torch.tensor([ids])).logits[0, -1, [no, yes]]
            np.testing.assert_allclose(one.outputs.probs, [logits.softmax(-1)[1]], atol=1e-5)
        with pytest.raises(PromptTooLong):  # its template is longer than this model's context
            llm.score("a page", "the lazy dog", use_tqdm=False)
    with pytest.raises(ConfigError, match="classifier_from_token"):
        opened(tmp_path, convert="classify")
