"""Adapters with rows of their own for some tokens (`trainable_token_indices`), in embedding and head: what PEFT makes of it."""

import copy
import json
import shutil
import warnings

import pytest
import torch
from tiny import open_model
from transformers import AutoModelForCausalLM

from adapters import open_cache, put, write_with_peft
from oracle import Sequences
from quire import SamplingParams
from quire.config.server_args import ServerArgs
from quire.lora.request import LoRARequest
from serving import Running, error_of
from tiny_model import make_model

peft = pytest.importorskip("peft")

IDS = [5 + i * 7 % 180 for i in range(21)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SOME = {"target_modules": ["q_proj"]}
CASES = {  # family -> what its adapters have
    "llama": (
        SOME | {"trainable_token_indices": [IDS[3], IDS[1], 7]},
        SOME | {"trainable_token_indices": {"lm_head": [9, 3], "embed_tokens": [IDS[0]]}},
    ),
    "llama-biases-tied": (  # a head that has the embedding's rows, and one that has its own beside what is added to it
        {"target_modules": ["q_proj", "lm_head"], "trainable_token_indices": [IDS[5], IDS[2]]},
        SOME | {"trainable_token_indices": {"lm_head": [IDS[1], 4], "embed_tokens": [IDS[1]]}},
    ),
    "gemma": (  # whose embedding is scaled
        SOME | {"trainable_token_indices": {"embed_tokens": [IDS[4], 0, IDS[6]], "lm_head": [IDS[4], 0, IDS[6]]}},
        {"target_modules": ["embed_tokens"], "trainable_token_indices": {"lm_head": [8]}},
    ),
}


@pytest.mark.parametrize("family", CASES)
@pytest.mark.filterwarnings("ignore")
def test_logits_are_those_of_peft(checkpoint, tmp_path, family):
    case = checkpoint(family)
    model, cache = open_cache(case)
    expected = [case.reference]
    for place, config in enumerate(CASES[family], 1):
        written = write_with_peft(copy.deepcopy(case.reference), tmp_path / str(place), place, r=2, **config)
        expected.append(written)
        put(cache, tmp_path / str(place), place)
    sequences = Sequences(model, 3, 21)
    sequences.adapters = [1, 0, 2]
    found = sequences.step([(row, IDS) for row in range(3)])
    with torch.inference_mode():
        wanted = [expected[place](torch.tensor([IDS])).logits[0].float() for place in (1, 0, 2)]
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)
    assert not torch.allclose(wanted[0], wanted[1], atol=1e-3)


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


@pytest.fixture(scope="module")
def made(tied, tmp_path_factory):
    """Directories of adapters, and what PEFT says with each and without one. One has grown the vocabulary, too."""
    folder, paths, answers = tmp_path_factory.mktemp("tokens"), {}, {}
    prompts = {"none": IDS, "rows": IDS, "low": IDS, "grown": [*IDS, 321, 70]}
    configs = {
        "rows": {"target_modules": ["v_proj"], "trainable_token_indices": IDS[1::4]},
        "low": {"target_modules": ["q_proj"]},
        "grown": {"target_modules": ["q_proj"], "trainable_token_indices": [321, IDS[2], 320, 322]},
    }
    for seed, (name, prompt) in enumerate(prompts.items()):
        model = AutoModelForCausalLM.from_pretrained(tied, dtype=torch.float32)
        with warnings.catch_warnings(action="ignore"):
            if name == "grown":
                model.resize_token_embeddings(323, mean_resizing=False)
            if name in configs:
                paths[name] = str(folder / name)
                model = write_with_peft(model, folder / name, seed, r=2, lora_alpha=6, **configs[name])
            with torch.inference_mode():
                told = model.generate(input_ids=torch.tensor([prompt]), max_new_tokens=12, min_new_tokens=12, do_sample=False)
        answers[name] = told[0, len(prompt) :].tolist()
    assert len(set(map(tuple, answers.values()))) == 4
    return prompts, paths, answers


def test_through_llm_beside_others_and_from_the_prefix_cache(tied, made):
    prompts, paths, answers = made
    loras = {name: LoRARequest(name, i, path) for i, (name, path) in enumerate(paths.items(), 1)} | {"none": None}
    llm = open_model(
        tied, dtype="float32", enable_lora=True, max_loras=3, lora_extra_vocab_size=4, block_size=4, num_gpu_blocks_override=200
    )
    order, hits = ["low", "rows", "none", "grown", "rows"], 0
    for _ in range(2):
        asked = [{"prompt_token_ids": prompts[name]} for name in order]
        outputs = llm.generate(asked, GREEDY, use_tqdm=False, lora_request=[loras[name] for name in order])
        assert [output.outputs[0].token_ids for output in outputs] == [answers[name] for name in order]
        hits += sum(output.num_cached_tokens for output in outputs)
    assert hits >= 5 * 20  # all of the second turn, of the same adapter each
    llm.llm_engine.core.adapters.check()
    llm.llm_engine.shutdown()


def test_served_by_two_ranks(tied, made, tmp_path, quick):
    prompts, paths, answers = made
    running = Running(tied, dtype="float32", enable_lora=True, max_loras=3, lora_extra_vocab_size=4, tensor_parallel_size=2)
    try:
        with running.serve(ServerArgs(allow_runtime_lora_updating=True)) as http:
            for name, path in paths.items():
                assert http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path}).status_code == 200
            body = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "max_tokens": 12}
            for name in ("rows", "none", "grown", "low", "rows"):
                model = name if name in paths else "tiny"
                told = http.post("/v1/completions", json=body | {"model": model, "prompt": prompts[name]}).json()
                assert told["choices"][0]["token_ids"] == answers[name]
            bad = shutil.copytree(paths["rows"], tmp_path / "bad")
            said = json.loads((bad / "adapter_config.json").read_text())
            said["trainable_token_indices"].append(3)
            (bad / "adapter_config.json").write_text(json.dumps(said))
            error = error_of(http.post("/v1/load_lora_adapter", json={"lora_name": "bad", "lora_path": str(bad)}))
            assert error["code"] == 400 and "token_adapter.trainable_tokens_delta" in error["message"]
        running.wait_idle()
    finally:
        running.close()
