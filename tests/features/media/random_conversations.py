"""Random conversations with pictures of the small trained model, the engines that run them, and transformers as the oracle.

Conversations go on, go back and go another way: pictures repeat, change order and are replaced by others among the same tokens.
"""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Any

import numpy as np
import torch
from media_files import READER
from PIL import Image
from transformers import AutoImageProcessor, LlavaForConditionalGeneration

from quire import LLM, SamplingParams

START, IMAGE, ASK = 10, 12, 13
PICTURE_TOKENS = 16
MAX_TOKENS = 160
ENGINE = {
    "model": str(READER), "device": "cpu", "dtype": "float32",
    "hf_overrides": {"text_config": {"max_position_embeddings": MAX_TOKENS}},  # more than it was trained for
}  # fmt: skip
MAX_PICTURES, MAX_TEXT, MOST_ANSWERED = 6, 40, 20
TOLERANCE = 1e-4  # of logprobs
Part = int | str  # a token of text, or the name of a picture


@cache
def pictures() -> dict[str, Image.Image]:
    """Return the digits, and for some of them the same with one other pixel."""
    found = {path.stem: Image.open(path).convert("RGB") for path in sorted((READER / "pictures").iterdir())}
    for name in list(found)[:8]:
        values = np.array(found[name])
        values[5, 7] ^= 255
        found[name + "'"] = Image.fromarray(values)
    return found


@dataclass(frozen=True)
class Conversation:
    """A prompt that ends with a question."""

    parts: tuple[Part, ...]

    @property
    def names(self) -> list[str]:
        return [part for part in self.parts if isinstance(part, str)]

    @property
    def ids(self) -> list[int]:
        """Return the tokens with one for each picture, as a user gives them."""
        return [START, *(IMAGE if isinstance(part, str) else part for part in self.parts)]

    @property
    def prompt(self) -> dict[str, Any]:
        data = {"multi_modal_data": {"image": [pictures()[name] for name in self.names]}} if self.names else {}
        return {"prompt_token_ids": self.ids, **data}

    @property
    def fits(self) -> bool:
        count = len(self.names)
        return count <= MAX_PICTURES and len(self.parts) - count <= MAX_TEXT


def conversations(number: int, rng: random.Random) -> list[Conversation]:
    """Return random conversations, most of which change an earlier one."""
    found = [Conversation((*_parts(rng), ASK))]
    while len(found) < number:
        begun = list(rng.choice(found[-12:]).parts) if rng.random() < 0.8 else []
        one = Conversation((*_changed(begun, rng), ASK))
        if one.fits:
            found.append(one)
    return found


def _changed(parts: list[Part], rng: random.Random) -> list[Part]:
    places = [place for place, part in enumerate(parts) if isinstance(part, str)]
    match rng.choice(("go on", "go on", "go back", "swap", "replace", "repeat")):
        case "go back":
            return parts[: rng.randrange(len(parts) + 1)] + _parts(rng)
        case "swap" if len(places) > 1:
            one, other = rng.sample(places, 2)
            parts[one], parts[other] = parts[other], parts[one]
            return parts
        case "replace" if places:
            place = rng.choice(places)
            near = str(parts[place]).rstrip("'") + ("" if str(parts[place]).endswith("'") else "'")
            parts[place] = near if near in pictures() and rng.random() < 0.5 else rng.choice(list(pictures()))
            return parts
        case "repeat":
            return [*parts, rng.choice([parts[place] for place in places]) if places else _picture(rng)]
    return parts + _parts(rng)


def _parts(rng: random.Random) -> list[Part]:
    return [
        _picture(rng) if rng.random() < 0.3 else rng.randrange(10) if rng.random() < 0.3 else rng.randrange(2)
        for _ in range(rng.randrange(1, 9))
    ]


def _picture(rng: random.Random) -> str:
    names = list(pictures())
    return rng.choice(names[:6] if rng.random() < 0.5 else names)


def engine(**args: Any) -> LLM:
    return LLM(**ENGINE, **args)


@dataclass
class Answer:
    """What an engine gave."""

    ids: Sequence[int]
    logprobs: np.ndarray  # [tokens, vocabulary]
    cached: int


def run(llm: LLM, asked: Sequence[Conversation], rng: random.Random, together: int) -> list[Answer]:
    """Return the answers of conversations that arrive at random among `together` open ones. Some are aborted and asked again,
    and sometimes running ones lose all that is cached."""
    core, rest, running = llm.llm_engine, deque(range(len(asked))), dict[str, int]()
    found, serials = dict[int, Answer](), count()
    while rest or running:
        while rest and len(running) < together and (not running or rng.random() < 0.5):
            params = SamplingParams(temperature=0.0, max_tokens=rng.randrange(1, MOST_ANSWERED), ignore_eos=True, logprobs=-1)
            running[name := f"{next(serials)}"] = rest.popleft()
            core.add_request(name, asked[running[name]].prompt, params)
        match rng.random():
            case chance if chance < 0.01:
                core.abort_request(name := rng.choice(list(running)))
                rest.append(running.pop(name))
            case chance if chance < 0.015:
                assert core.reset_prefix_cache(reset_running_requests=True)
        for output in core.step():
            if output.finished:
                found[running.pop(output.request_id)] = answer_of(output)
    return [found[number] for number in range(len(asked))]


def answer_of(output: Any) -> Answer:
    [one] = output.outputs
    assert one.finish_reason == "length", one.error
    logprobs = np.array([[each[token].logprob for token in sorted(each)] for each in one.logprobs])
    return Answer(list(one.token_ids), logprobs, output.num_cached_tokens)


class Oracle:
    """transformers, which runs a prompt with its answer once."""

    def __init__(self) -> None:
        self._model = LlavaForConditionalGeneration.from_pretrained(READER, dtype=torch.float32).eval()
        processor = AutoImageProcessor.from_pretrained(READER, backend="pil")
        self._pixels = {
            name: processor(images=[image], return_tensors="pt")["pixel_values"] for name, image in pictures().items()
        }

    def difference(self, one: Conversation, answer: Answer) -> float:
        """Return the largest difference of a logprob of the answer, whose tokens must be the likeliest."""
        logprobs = self.logprobs(one, answer.ids[:-1])
        chosen = np.take_along_axis(logprobs, np.array(answer.ids)[:, None], -1)[:, 0]
        assert (logprobs.max(-1) - chosen < TOLERANCE).all(), (one, answer.ids)
        return float(np.abs(logprobs - answer.logprobs).max())

    @torch.inference_mode()
    def logprobs(self, one: Conversation, ids: Sequence[int]) -> np.ndarray:
        """Return what follows the prompt and each token of an answer, [1 + ids, vocabulary]."""
        prompt = [token for part in one.ids for token in [part] * (PICTURE_TOKENS if part == IMAGE else 1)]
        pixels = torch.cat([self._pixels[name] for name in one.names]) if one.names else None
        logits = self._model(input_ids=torch.tensor([[*prompt, *ids]]), pixel_values=pixels).logits
        return logits[0, len(prompt) - 1 :].log_softmax(-1).numpy()
