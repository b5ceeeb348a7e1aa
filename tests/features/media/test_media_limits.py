"""Rotary positions at the end of the context: a video whose last frame is later than the model's positions."""

import pytest
from media_models import NEW_TOKENS, MediaCase, clip

from quire import LLM, SamplingParams
from quire.types.errors import PromptTooLong

GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
FILM, TEXT = clip(4, 33, 40), "and?"
FRAMES_PER_SECOND = 0.05  # each second frame is a grid's, and each of those has tokens_per_second * 2 / 0.05 positions

pytestmark = pytest.mark.usefixtures("processed_here")


def ask(case, llm, fps):
    prompt = {"prompt": case.family.placeholder("video") + TEXT, "multi_modal_data": {"video": (FILM, {"fps": fps})}}
    return llm.generate([prompt], GREEDY, use_tqdm=False)[0]


def engine(case, **more):
    return LLM(str(case.directory), device="cpu", dtype="float32", kv_cache_memory_bytes=8 << 20, **more)


def test_a_video_longer_than_the_positions_is_refused_and_one_that_just_fits_is_read(tmp_path):
    case = MediaCase("qwen2.5-vl", tmp_path)
    with engine(case, max_model_len=512) as llm:
        roomy = ask(case, llm, FRAMES_PER_SECOND)
        core = llm.llm_engine.core
        highest = []
        add, core.add = core.add, lambda request: (highest.append(request.highest_position), add(request))
        assert ask(case, llm, FRAMES_PER_SECOND).outputs[0].token_ids == roomy.outputs[0].token_ids
    [highest] = highest
    assert highest > len(roomy.prompt_token_ids) + NEW_TOKENS
    with engine(case, max_model_len=highest + 1) as llm:
        assert ask(case, llm, FRAMES_PER_SECOND).outputs[0].token_ids == roomy.outputs[0].token_ids
    with engine(case, max_model_len=highest) as llm:
        with pytest.raises(PromptTooLong, match=rf"positions up to {highest}; the longest context is {highest}\. Send shorter"):
            ask(case, llm, FRAMES_PER_SECOND)
        assert len(ask(case, llm, 1.0).outputs[0].token_ids) == NEW_TOKENS  # the same frames within less time
