"""Checkpoints that also see or hear: their text, through the whole engine, is what transformers makes of it."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from family import Family
from oracle import CLIP, COMPOSITES, UNMADE, make_checkpoint, open_checkpoint
from quire import LLM, SamplingParams
from quire.config import families
from quire.config.facts import read_facts
from quire.config.families import composites
from quire.files.resolve import resolve_model
from quire.models.registry import build_model
from quire.types.errors import ModelError

IDS = torch.randint(3, 180, (30,), generator=torch.Generator().manual_seed(1)).tolist()
NEW_TOKENS = 12


def answer(directory, **args) -> list[int]:
    defaults = {"skip_tokenizer_init": True, "dtype": "float32", "device": "cpu", "block_size": 4, "max_num_seqs": 2,
                "kv_cache_memory_bytes": 8 << 20, "long_prefill_token_threshold": 7}  # fmt: skip
    llm = LLM(str(directory), **(defaults | args))
    greedy = SamplingParams(temperature=0.0, repetition_penalty=1.5, max_tokens=NEW_TOKENS, ignore_eos=True)
    return list(llm.generate(IDS, greedy, use_tqdm=False)[0].outputs[0].token_ids)


def expected(reference) -> list[int]:
    with torch.inference_mode():
        ids = reference.generate(
            torch.tensor([IDS]), attention_mask=torch.ones(1, len(IDS), dtype=torch.long), do_sample=False,
            min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS, eos_token_id=None, pad_token_id=0, repetition_penalty=1.5,
        )  # fmt: skip
    return ids[0, len(IDS) :].tolist()


@pytest.mark.parametrize("architecture", sorted({*composites.COMPOSITES} - UNMADE))
def test_text(tmp_path, architecture):
    make_checkpoint(COMPOSITES[architecture], tmp_path)
    case = open_checkpoint(tmp_path)
    assert answer(tmp_path) == expected(case.reference)


def test_every_composite_is_tested_and_has_a_family():
    assert {*COMPOSITES, *UNMADE} == set(composites.COMPOSITES)
    known = families.model_types()
    assert all(composite.text in known[composite.text].text for composite in composites.COMPOSITES.values())


def test_as_newer_versions_keep_it_in_memory(tmp_path):
    """`model.language_model.layers...` instead of the published `language_model.model.layers...`."""
    make_checkpoint(COMPOSITES["LlavaForConditionalGeneration"], tmp_path)
    known = answer(tmp_path)
    renamed = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        text = name.replace("language_model.model.", "model.language_model.").replace("language_model.lm_head.", "lm_head.")
        renamed[text if text != name else f"model.{name}"] = tensor
    assert {"lm_head.weight", "model.language_model.norm.weight", "model.multi_modal_projector.linear_1.bias"} <= set(renamed)
    save_file(renamed, tmp_path / "model.safetensors")
    assert answer(tmp_path) == known


def test_what_is_neither_text_nor_declared_is_an_error(tmp_path):
    make_checkpoint(COMPOSITES["LlavaForConditionalGeneration"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors") | {"model.third_eye.weight": torch.ones(2)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"unknown \(1\): model.third_eye.weight"):
        answer(tmp_path)


def test_a_flat_configuration_of_qwen2_vl(tmp_path):
    """As its checkpoints were published: the text model's fields beside the vision's, `mrope`, tensors without a prefix."""
    make_checkpoint(COMPOSITES["Qwen2VLForConditionalGeneration"], tmp_path)
    known = answer(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    text = config.pop("text_config")
    del text["rope_parameters"]
    rope = {"rope_theta": 1e4, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    (tmp_path / "config.json").write_text(json.dumps(text | config | rope))
    tensors = load_file(tmp_path / "model.safetensors")
    strip = {"model.language_model.": "model.", "model.visual.": "visual."}
    for old, new in strip.items():
        tensors = {new + name.removeprefix(old) if name.startswith(old) else name: value for name, value in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    assert answer(tmp_path) == known


@pytest.mark.parametrize(("config", "tied"), [(True, True), (False, True), (True, False)])
def test_the_head_is_tied_where_the_file_has_none(tmp_path, config, tied):
    """The two configurations contradict each other in checkpoints of different age; the tensors cannot."""
    make_checkpoint(COMPOSITES["LlavaForConditionalGeneration"], tmp_path)
    path, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    fields = json.loads(path.read_text())
    fields["text_config"]["tie_word_embeddings"] = fields["tie_word_embeddings"] = config
    tensors = load_file(weights)
    [head], [embedding] = (
        [name for name in tensors if name.endswith(f"{what}.weight")] for what in ("lm_head", "embed_tokens")
    )
    if tied:
        tensors[head] = tensors[embedding].clone()
    save_file(tensors, weights)
    known = answer(tmp_path)
    path.write_text(json.dumps(fields))
    if tied:
        del tensors[head]
    save_file(tensors, weights)
    assert answer(tmp_path) == known


def test_a_text_model_that_no_family_serves(tmp_path):
    make_checkpoint(Family("LlavaConfig", "LlavaForConditionalGeneration", {}, "cohere", CLIP), tmp_path)
    with pytest.raises(ModelError, match=r"LlavaForConditionalGeneration is multimodal.*'cohere' is not supported"):
        answer(tmp_path)


def test_nested_configurations_leave_out_what_their_class_says(tmp_path):
    """As LLaVA 1.5's does."""
    text = {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "vocab_size": 32064}
    config = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config | {"torch_dtype": "float16"}))
    facts = read_facts(resolve_model(tmp_path, weights=False))
    model = build_model(facts)
    assert sum(parameter.numel() for parameter in model.parameters()) == 6_738_939_904
