"""LoRA adapters of pooling models, as PEFT saves them: the scores and vectors are PEFT's."""

import shutil

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_decoders import PROMPTS, made, normal, opened

from adapters import halves, write_adapter
from encoder_families import ENCODERS, random_texts, save_encoder
from quire import LoRARequest, PoolingParams
from quire.types.errors import AdapterError

TEXTS = random_texts([7, 40, 1, 12])


def adapted(model, directory, task_type, *, seed=3, **config):
    """Return PEFT's model with random values in everything that the adapter saves to `directory`."""
    from peft import LoraConfig, get_peft_model

    peft = get_peft_model(model, LoraConfig(task_type=task_type, r=2, **config)).eval()
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, values in peft.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                values.copy_((0.2 if "lora_" in name else 0.4) * torch.randn(values.shape, generator=random))
    peft.save_pretrained(directory, save_embedding_layers=False)
    return peft


@torch.inference_mode()
def logits(model, ids):
    return model(torch.tensor([ids])).logits[0].numpy()


def probabilities(model, ids):
    return torch.from_numpy(logits(model, ids)).softmax(-1).numpy()


SIZES = [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}]


@pytest.mark.parametrize("sizes", SIZES, ids=["alone", "ranks", "stages"])
def test_a_classifier_takes_the_adapters_own_head(tmp_path, sizes, quick):
    """PEFT saves `score` of task type SEQ_CLS as a whole matrix."""
    model = made(tmp_path / "model", "Qwen2ForSequenceClassification", "Qwen2Config", num_labels=3)
    plain = [probabilities(model, ids) for ids in PROMPTS]
    paths, expected = [], []
    for seed in (3, 4):
        fresh = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
        paths.append(tmp_path / f"adapter{seed}")
        peft = adapted(fresh, paths[-1], "SEQ_CLS", seed=seed, target_modules=["q_proj", "v_proj", "down_proj"])
        expected.append([probabilities(peft, ids) for ids in PROMPTS])
    requests = [LoRARequest(path.name, number, str(path)) for number, path in enumerate(paths, 1)]
    args = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "max_num_batched_tokens": 16}
    with opened(tmp_path / "model", **args, **sizes) as llm:
        each = [None, requests[0], requests[1]] * 2
        found = llm.classify(PROMPTS, lora_request=each, use_tqdm=False)
    for index, one in enumerate(found):
        right = plain[index] if index % 3 == 0 else expected[index % 3 - 1][index]
        np.testing.assert_allclose(one.outputs.probs, right, atol=1e-5)
    assert max(np.abs(one - other).max() for one, other in zip(plain, expected[0], strict=True)) > 0.1


@pytest.mark.parametrize("activated", [True, False])
def test_requests_of_one_step_have_their_own_classes(tmp_path, activated):
    """With adapters the head is packed, and every packed product reuses the memory of its result."""
    model = made(tmp_path / "model", "Qwen2ForSequenceClassification", "Qwen2Config", num_labels=3)
    params = PoolingParams(use_activation=activated)
    with opened(tmp_path / "model", enable_lora=True) as llm:
        found = llm.classify(PROMPTS, pooling_params=params, use_tqdm=False)
    for ids, one in zip(PROMPTS, found, strict=True):
        right = probabilities(model, ids) if activated else logits(model, ids)
        np.testing.assert_allclose(one.outputs.probs, right, atol=1e-4)


def test_a_head_of_other_classes_is_refused_by_name(tmp_path):
    made(tmp_path / "model", "Qwen2ForSequenceClassification", "Qwen2Config", num_labels=3)
    tensors = {"base_model.model.score.weight": torch.randn(5, 64)}
    other = write_adapter(tmp_path / "other", tensors, task_type="SEQ_CLS")
    whole = write_adapter(tmp_path / "whole", {"base_model.model.model.layers.0.self_attn.q_proj.weight": torch.randn(64, 64)})
    with opened(tmp_path / "model", enable_lora=True) as llm:
        for path, message in ((other, r"has shape \[5, 64\], where the model needs \[3, 64\]"), (whole, "is a whole matrix")):
            with pytest.raises(AdapterError, match=message):
                llm.classify(PROMPTS, lora_request=LoRARequest(path, 1, path), use_tqdm=False)


@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "lm_head"]], ids=["layers", "head"])
def test_a_reranker_scores_with_the_adapters_head(tmp_path, targets):
    model = made(tmp_path / "model", "Qwen3ForCausalLM", "Qwen3Config", head_dim=16, tie_word_embeddings=False)
    peft = adapted(model, tmp_path / "adapter", "CAUSAL_LM", target_modules=targets)
    overrides = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["q", "z"],
                 "method": "from_2_way_softmax"}  # fmt: skip
    with opened(tmp_path / "model", hf_overrides=overrides, enable_lora=True, max_lora_rank=8) as llm:
        no, yes = (llm.get_tokenizer().encode(token, add_special_tokens=False)[0] for token in "qz")
        adapter = LoRARequest("a", 1, str(tmp_path / "adapter"))
        for ids, one in zip(PROMPTS, llm.classify(PROMPTS, lora_request=adapter, use_tqdm=False), strict=True):
            with torch.inference_mode():
                right = peft(torch.tensor([ids])).logits[0, -1, [no, yes]].softmax(-1)[1]
            np.testing.assert_allclose(one.outputs.probs, [right], atol=1e-5)


ENCODER_CASES = [
    ("BERT", ["query", "value"]), ("MPNet", ["q", "v", "intermediate.dense"]), ("ModernBERT", ["Wqkv", "Wi", "Wo"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "targets"), ENCODER_CASES)
def test_an_encoder_has_the_vectors_of_peft(name, targets, tmp_path):
    model = save_encoder(ENCODERS[name], tmp_path / "model")
    peft = adapted(model, tmp_path / "adapter", "FEATURE_EXTRACTION", target_modules=targets)
    adapter = LoRARequest("a", 1, str(tmp_path / "adapter"))
    args = {"skip_tokenizer_init": True, "enable_lora": True, "max_lora_rank": 8, "pooler_config": {"pooling_type": "MEAN"}}
    with opened(tmp_path / "model", **args) as llm:
        prompts = [{"prompt_token_ids": text} for text in TEXTS]
        found = llm.embed(prompts, lora_request=adapter, use_tqdm=False)
        plain = llm.embed(prompts, use_tqdm=False)
    for text, one, without in zip(TEXTS, found, plain, strict=True):
        with torch.inference_mode():
            right = normal(peft(torch.tensor([text])).last_hidden_state[0].mean(0)).numpy()
            with peft.disable_adapter():
                base = normal(peft(torch.tensor([text])).last_hidden_state[0].mean(0)).numpy()
        np.testing.assert_allclose(one.outputs.embedding, right, atol=1e-5)
        np.testing.assert_allclose(without.outputs.embedding, base, atol=1e-5)
        assert np.abs(right - base).max() > 1e-3


@pytest.mark.parametrize(("name", "module"), [("Nomic", "encoder.layers.1.attn.Wqkv"), ("Nomic", "encoder.layers.1.mlp.fc12"),
                                              ("GTE", "encoder.layer.1.mlp.up_gate_proj")])  # fmt: skip
@pytest.mark.parametrize("sizes", [{}, {"tensor_parallel_size": 2}], ids=["alone", "ranks"])
def test_adapters_name_modules_as_the_checkpoint_does(name, module, sizes, tmp_path, quick):
    save_encoder(ENCODERS[name], tmp_path / "model")
    shutil.copytree(tmp_path / "model", tmp_path / "merged")
    weights = load_file(tmp_path / "merged" / "model.safetensors")
    outputs, inputs = weights[f"{module}.weight"].shape
    tensors = halves(f"base_model.model.{module}", outputs, inputs)
    down, up = (tensors[f"base_model.model.{module}.lora_{half}.weight"] for half in "AB")
    weights[f"{module}.weight"] += 2.0 * up @ down
    save_file(weights, tmp_path / "merged" / "model.safetensors", metadata={"format": "pt"})
    adapter = LoRARequest("a", 1, write_adapter(tmp_path / "adapter", tensors))
    args = {"skip_tokenizer_init": True, "pooler_config": {"pooling_type": "MEAN"}}
    prompts = [{"prompt_token_ids": text} for text in TEXTS]
    with opened(tmp_path / "model", enable_lora=True, max_lora_rank=8, **args, **sizes) as llm:
        found = [one.outputs.embedding for one in llm.embed(prompts, lora_request=adapter, use_tqdm=False)]
        plain = [one.outputs.embedding for one in llm.embed(prompts, use_tqdm=False)]
    with opened(tmp_path / "merged", **args) as llm:
        merged = [one.outputs.embedding for one in llm.embed(prompts, use_tqdm=False)]
    np.testing.assert_allclose(found, merged, atol=1e-5)
    assert np.abs(np.subtract(plain, merged)).max() > 1e-3


@pytest.mark.parametrize(("name", "saved"), [("XLM-R, classes", None), ("DistilBERT, classes", ["pre_classifier"])])
def test_an_encoder_takes_the_adapters_own_head(name, saved, tmp_path):
    model = save_encoder(ENCODERS[name], tmp_path / "model")
    targets = ["q_lin", "v_lin"] if saved else ["query", "value"]
    peft = adapted(model, tmp_path / "adapter", "SEQ_CLS", target_modules=targets, modules_to_save=saved)
    adapter = LoRARequest("a", 1, str(tmp_path / "adapter"))
    with opened(tmp_path / "model", skip_tokenizer_init=True, enable_lora=True, max_lora_rank=8) as llm:
        prompts = [{"prompt_token_ids": text} for text in TEXTS]
        found = llm.classify(prompts, lora_request=adapter, use_tqdm=False)
        raw = PoolingParams(use_activation=False)  # two requests of one step
        mixed = llm.classify(prompts[:2], pooling_params=raw, lora_request=[adapter, None], use_tqdm=False)
    for text, one in zip(TEXTS, found, strict=True):
        np.testing.assert_allclose(one.outputs.probs, probabilities(peft, text), atol=1e-5)
    np.testing.assert_allclose(mixed[0].outputs.probs, logits(peft, TEXTS[0]), atol=1e-4)
    with peft.disable_adapter():
        np.testing.assert_allclose(mixed[1].outputs.probs, logits(peft, TEXTS[1]), atol=1e-4)
