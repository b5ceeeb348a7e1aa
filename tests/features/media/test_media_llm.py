"""A trained model that reads digits, through `LLM`: only what was seen is answered."""

import json
from pathlib import Path

import numpy as np
import pytest
from media_files import READER
from PIL import Image
from random_conversations import ASK, Conversation, Oracle

from quire import LLM, SamplingParams, llm_engine
from quire.features.determinism import host as determinism_host
from quire.features.determinism.device import FixedOrder
from quire.features.media import encoder
from quire.features.media import reader as reader_module
from quire.features.media.towers.llava import LlavaTower
from quire.types.errors import InvalidParameter, ModelError, NotSupported
from quire.types.sampling import BeamSearchParams

EXPECTED = json.loads((READER / "expected_png.json").read_text())
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


def picture(number: int) -> Image.Image:
    return Image.open(READER / "pictures" / f"{number:02d}.png")


def prompt(number: int, text: str = "<image>?"):
    return {"prompt": text, "multi_modal_data": {"image": picture(number)}}


def answers(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def reader():
    with LLM(str(READER), device="cpu", dtype="float32", max_num_seqs=8, disable_log_stats=False) as made:
        yield made


def test_all_pictures_are_read_as_transformers_reads_them(reader, monkeypatch):
    """A repeated picture is neither processed nor encoded a second time."""
    greedy, processed = [each["greedy"] for each in EXPECTED], []
    monkeypatch.setattr(reader.llm_engine.media, "on_processed", processed.append)
    for _ in range(2):  # the second time from the prefix cache
        outputs = reader.generate([prompt(number) for number in range(len(EXPECTED))], GREEDY, use_tqdm=False)
        assert answers(outputs) == greedy
        assert [output.prompt_token_ids for output in outputs] == [each["prompt"] for each in EXPECTED]
    assert sum(output.num_cached_tokens for output in outputs) > 0
    assert len(processed) == len(EXPECTED) == reader.llm_engine.core.stats.encoder.encoded
    counted = {metric.name: metric.value for metric in reader.get_metrics() if hasattr(metric, "value")}
    assert counted["vllm:mm_cache_queries"] >= 2 * len(EXPECTED) and counted["vllm:mm_cache_hits"] >= len(EXPECTED)
    assert counted["vllm:mm_encoder_cache_queries"] - counted["vllm:mm_encoder_cache_hits"] == len(EXPECTED)
    assert counted["vllm:mm_encoder_embeddings"] == 16 * len(EXPECTED)


def test_logits_are_those_of_transformers(reader):
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=-1)
    outputs = reader.generate([prompt(number) for number in range(4)], params, use_tqdm=False)
    for output, each in zip(outputs, EXPECTED, strict=False):
        [found] = output.outputs[0].logprobs
        logits = np.array(each["last_logits"])
        expected = logits - np.log(np.exp(logits).sum())
        assert np.abs([found[token].logprob for token in range(len(logits))] - expected).max() < 1e-4


def test_conversations(reader):
    text = {"type": "text", "text": "?"}

    def ask(number):
        return [{"role": "user", "content": [{"type": "image_pil", "image_pil": picture(number)}, text]}]

    found = reader.chat([ask(number) for number in range(3)], GREEDY, use_tqdm=False)
    data = [{"prompt_token_ids": [12, 13], "multi_modal_data": {"image": picture(number)}} for number in range(3)]
    assert answers(found) == answers(reader.generate(data, GREEDY, use_tqdm=False))
    assert [output.outputs[0].text for output in found] == [each["text"] for each in EXPECTED[:3]]


def test_deterministic_engines_encode_images_one_by_one(monkeypatch):
    """So that the bits of one do not depend on the others."""
    counts, encode = [], LlavaTower.encode

    def noted(self, modality, items):
        counts.append(len(items))
        return encode(self, modality, items)

    monkeypatch.setattr(LlavaTower, "encode", noted)
    monkeypatch.setattr(determinism_host, "_unsupported", lambda config: "")  # this model's layer sizes, and perhaps this CPU
    monkeypatch.setattr(FixedOrder, "check_prepared", lambda self, prepared: None)
    for deterministic, expected in ((False, [4]), (True, [1] * 4)):
        del counts[:]
        with LLM(str(READER), device="cpu", dtype="float32", deterministic=deterministic) as llm:
            outputs = llm.generate([prompt(number) for number in range(4)], GREEDY, use_tqdm=False)
        assert answers(outputs) == [each["greedy"] for each in EXPECTED[:4]]
        assert counts == expected


def test_several_answers_to_one_picture(reader):
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=4)
    alone = reader.generate([prompt(3)], params, use_tqdm=False)
    among = reader.generate([prompt(1), prompt(3), prompt(2)], params, use_tqdm=False)
    assert [one.token_ids for one in alone[0].outputs] == [one.token_ids for one in among[1].outputs]


def test_beams_of_pictures_are_the_likeliest(reader):
    """Every beam continues with the pictures of its prompt."""
    oracle = Oracle()
    for parts in (("03", ASK), ("05", 1, "06'", ASK)):
        one, beams = Conversation(parts), [((), 0.0)]
        for _ in range(3):
            following = [(ids, score, oracle.logprobs(one, ids)[-1]) for ids, score in beams]
            every = [((*ids, token), score + scores[token]) for ids, score, scores in following for token in range(16)]
            beams = sorted(every, key=lambda beam: -beam[1])[:3]
        [found] = reader.beam_search([one.prompt], BeamSearchParams(beam_width=3, max_tokens=3, ignore_eos=True))
        assert [tuple(each.tokens[-3:]) for each in found.sequences] == [ids for ids, _ in beams]
        assert [each.cum_logprob for each in found.sequences] == pytest.approx([score for _, score in beams], abs=1e-4)


@pytest.mark.parametrize("key", ["prompt_embeds", "mutli_modal_uuids", "max_tokens"])
def test_unknown_keys_of_a_prompt_are_refused(reader, key):
    with pytest.raises(InvalidParameter, match=rf"a prompt dict has no '{key}'; it has prompt, "):
        reader.generate({**prompt(0), key: []}, GREEDY, use_tqdm=False)


def test_a_uuid_names_content_and_is_no_key(reader):
    """Two pictures with one uuid are two pictures, and one picture with two is encoded once."""

    def ask(image, uuid):
        prompt = {"prompt": "<image>?", "multi_modal_data": {"image": image}, "multi_modal_uuids": {"image": uuid}}
        return reader.generate([prompt], GREEDY, use_tqdm=False)

    reader.reset_prefix_cache()
    encoded = reader.llm_engine.core.stats.encoder.encoded
    asked = [(picture(0), "a"), (picture(1), "a"), (picture(0), "b"), (None, "a"), (None, "b")]
    found = [answers(ask(*each))[0] for each in asked]
    assert found == [EXPECTED[number]["greedy"] for number in (0, 1, 0, 1, 0)]
    assert reader.llm_engine.core.stats.encoder.encoded == encoded + 2


def test_a_picture_that_cannot_be_encoded_fails_its_request_only(reader, monkeypatch):
    numbers, read = [4, 5, 6], encoder.read_array
    outputs = reader.generate([prompt(number) for number in numbers], GREEDY, use_tqdm=False)
    reader.reset_prefix_cache()
    broken = list[str]()

    def refuse(array):
        if not broken:
            broken.append(array.path)
        if array.path in broken:
            raise FileNotFoundError(array.path)
        return read(array)

    monkeypatch.setattr(encoder, "read_array", refuse)
    found = reader.generate([prompt(number) for number in numbers], GREEDY, use_tqdm=False)
    [failed] = [index for index, output in enumerate(found) if output.outputs[0].finish_reason == "error"]
    assert answers(found)[failed] == []
    assert Path(broken[0]).exists()
    others = [index for index in range(len(numbers)) if index != failed]
    assert [answers(found)[index] for index in others] == [answers(outputs)[index] for index in others]
    monkeypatch.setattr(encoder, "read_array", read)
    assert answers(reader.generate([prompt(number) for number in numbers], GREEDY, use_tqdm=False)) == answers(outputs)


def test_a_picture_whose_file_is_gone_is_read_from_that_of_another_request(reader):
    """Of two API processes with the same picture, one was killed: its requests may be in the engine for a moment."""
    reader.reset_prefix_cache()
    prompts = []
    for _ in range(2):
        reader.reset_mm_cache()
        prompts += reader.llm_engine.read_media([prompt(7)])
    first, second = (one.extras.media[0].arrays[0].path for one in prompts)
    assert first != second and Path(first).exists()
    Path(first).unlink()
    for number, one in enumerate(prompts):
        reader.llm_engine.submit(reader.llm_engine.prepare(f"{number}", one, GREEDY))
    found = {}
    while reader.llm_engine.has_unfinished_requests():
        found |= {output.request_id: output.outputs[0].token_ids for output in reader.llm_engine.step() if output.finished}
    assert found == {"0": EXPECTED[7]["greedy"], "1": EXPECTED[7]["greedy"]}


def test_processes_start_while_the_model_is_loaded_and_end_if_it_cannot_be(monkeypatch):
    seen = []

    class Server:
        def __init__(self, *_):
            pass

        def prepare(self):
            seen.append("prepared")

        def close(self):
            seen.append("closed")

    def fail(*_):
        seen.append("loading")
        raise ModelError("broken")

    monkeypatch.setattr(reader_module, "LazyForkServer", Server)
    monkeypatch.setattr(llm_engine, "start_core", fail)
    with pytest.raises(ModelError, match="broken"):
        LLM(str(READER), device="cpu")
    assert seen == ["prepared", "loading", "closed"]


def test_without_the_encoder_pictures_are_refused():
    with LLM(str(READER), device="cpu", dtype="float32", language_model_only=True) as made:
        with pytest.raises(NotSupported, match="language_model_only"):
            made.generate([prompt(0)], GREEDY, use_tqdm=False)
        assert len(answers(made.generate(["?"], GREEDY, use_tqdm=False))[0]) > 0
