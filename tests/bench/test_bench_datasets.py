import asyncio
import base64
import io
import json
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from quire.bench.datasets import DatasetOptions
from quire.bench.openai import request_body
from quire.bench.samples import WORDS, RandomPrompts, Sample
from quire.bench.sources import SOURCES
from quire.cli.bench_serve import DATASETS
from quire.cli.main import main
from quire.types.errors import ConfigError


class Words:
    """Counts words; whoever asks is seen."""

    def __init__(self) -> None:
        self.asked = 0

    async def count(self, text: str) -> int:
        self.asked += 1
        return len(text.split())


def load(name: str, vocab: int | None = 5000, **options: object) -> list[Sample]:
    return asyncio.run(SOURCES[name](DatasetOptions(name, **options), RandomPrompts(vocab), Words()))


def lines(path: Path, *objects: object) -> str:
    path.write_text("\n".join(json.dumps(item) for item in objects) + "\n\n")
    return str(path)


def test_every_name_is_a_flag() -> None:
    assert set(SOURCES) == set(DATASETS)


def test_random_prompts() -> None:
    made = load("random", count=20, random_input_len=50, random_output_len=7)
    assert len(made) == 20
    assert {(len(one.prompt), one.prompt_tokens, one.output_tokens) for one in made} == {(50, 50, 7)}
    ids = np.concatenate([one.prompt for one in made])
    assert ids.min() >= 100
    assert ids.max() < 4900
    assert len({one.prompt.tobytes() for one in made}) == 20
    again = load("random", count=30, random_input_len=50, random_output_len=7)
    assert [one.prompt.tolist() for one in again[:20]] == [one.prompt.tolist() for one in made]
    other = load("random", count=20, random_input_len=50, random_output_len=7, seed=1)
    assert other[0].prompt.tolist() != made[0].prompt.tolist()


def test_random_lengths_and_prefix() -> None:
    made = load("random", count=400, random_input_len=100, random_output_len=10, random_range_ratio=0.2, random_prefix_len=30)
    inputs, outputs = [len(one.prompt) - 30 for one in made], [one.output_tokens for one in made]
    assert (min(inputs), max(inputs), min(outputs), max(outputs)) == (80, 120, 8, 12)
    assert len({tuple(one.prompt[:30]) for one in made}) == 1
    assert len({tuple(one.prompt[30:60]) for one in made}) == 400


def test_random_prompts_as_text() -> None:
    made = load("random", vocab=None, count=3, random_input_len=25)
    assert all(len(one.prompt.split()) == 25 and set(one.prompt.split()) <= set(WORDS) for one in made)


def test_a_small_vocabulary() -> None:
    ids = load("random", vocab=20, count=1, random_input_len=500)[0].prompt
    assert (ids.min(), ids.max()) == (2, 17)
    with pytest.raises(ConfigError, match="vocab-size"):
        RandomPrompts(1)


def test_prefix_repetition() -> None:
    options = {
        "prefix_repetition_num_prefixes": 4,
        "prefix_repetition_prefix_len": 16,
        "prefix_repetition_suffix_len": 8,
        "prefix_repetition_output_len": 5,
    }
    made = load("prefix_repetition", count=20, **options)
    prefixes = [tuple(one.prompt[:16]) for one in made]
    assert sorted(prefixes.count(prefix) for prefix in set(prefixes)) == [5, 5, 5, 5]
    assert len({tuple(one.prompt[16:]) for one in made}) == 20
    assert {(len(one.prompt), one.output_tokens) for one in made} == {(24, 5)}
    kept = load("prefix_repetition", count=20, shuffle=False, **options)
    assert [tuple(one.prompt[:16]) for one in kept[:4]] == [tuple(one.prompt[:16]) for one in kept[4:8]]
    assert [tuple(one.prompt) for one in made] != [tuple(one.prompt) for one in kept]


def test_custom(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    path = lines(tmp_path / "a.jsonl", {"prompt": "one"}, {"prompt": [4, 5], "output_tokens": 9}, {"messages": messages})
    made = load("custom", path=path, count=5, shuffle=False, custom_output_len=33)
    assert [one.output_tokens for one in made] == [33, 9, 33, 33, 9]
    assert (made[0].prompt, made[1].prompt.tolist(), made[2].messages) == ("one", [4, 5], messages)
    assert len(load("custom", path=path, count=5, oversample=False)) == 3
    assert len(load("custom", path=path, count=2)) == 2


@pytest.mark.parametrize(
    "line",
    ["[1]", "{", "{}", '{"prompt": ""}', '{"prompt": [1, "a"]}', '{"prompt": "a", "output_tokens": 0}', '{"messages": 3}'],
)
def test_custom_lines_that_are_wrong(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    with pytest.raises(ConfigError, match="line 2"):
        load("custom", path=str(path))


def test_files_that_are_wrong(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="no lines"):
        load("custom", path=str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match="cannot read"):
        load("custom", path=str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="is not JSON"):
        load("sharegpt", path=str(tmp_path / "empty"))


def conversation(question: int, answer: int) -> dict[str, object]:
    turns = [("human", "q " * question), ("gpt", "a " * answer), ("human", "more")]
    return {"id": "x", "conversations": [{"from": who, "value": said} for who, said in turns]}


def test_sharegpt(tmp_path: Path) -> None:
    too_short, too_long, endless = conversation(3, 50), conversation(1025, 10), conversation(900, 1200)
    path = tmp_path / "s.json"
    path.write_text(
        json.dumps(
            [
                too_short,
                conversation(10, 20),
                too_long,
                {"conversations": []},
                conversation(11, 3),
                endless,
                conversation(12, 40),
            ]
        )
    )
    made = load("sharegpt", path=str(path), count=9, shuffle=False, oversample=False)
    assert [(one.prompt_tokens, one.output_tokens) for one in made] == [(10, 20), (12, 40)]
    made = load("sharegpt", path=str(path), count=9, shuffle=False, oversample=False, sharegpt_output_len=2)
    assert [(one.prompt_tokens, one.output_tokens) for one in made] == [(10, 2), (11, 2), (900, 2), (12, 2)]
    path.write_text(json.dumps([too_short]))
    with pytest.raises(ConfigError, match="no conversation"):
        load("sharegpt", path=str(path))


def test_timed_trace(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "t.jsonl",
        {"timestamp": 1000, "input_length": 20, "output_length": 5, "hash_ids": [7, 8, 9]},
        {"timestamp": 1500, "input_length": 12, "output_length": 0, "hash_ids": [7, 8]},
        {"timestamp": 1500, "input_length": 12, "output_length": 2, "hash_ids": [1]},
        {"timestamp": 4000, "prompt": "hello", "output_length": 3},
    )
    made = load("timed_trace", path=path, timed_trace_chunk_hash_size=8)
    assert [one.at for one in made] == [0.0, 0.5, 0.5, 3.0]
    assert [one.output_tokens for one in made] == [5, 1, 2, 3]
    assert [one.prompt_tokens for one in made] == [20, 12, 12, None]
    first, second, third, fourth = (one.prompt for one in made)
    assert first[:12].tolist() == second.tolist()
    assert first[:8].tolist() != third[:8].tolist()
    assert fourth == "hello"
    again = load("timed_trace", path=path, timed_trace_chunk_hash_size=8, timed_trace_sec_multiplier=1.0, count=3)
    assert again[2].prompt.tolist() == third.tolist()
    assert again[2].at == 500.0


def test_traces_that_are_wrong(tmp_path: Path) -> None:
    fine = {"timestamp": 5, "input_length": 2, "output_length": 1}
    for wrong in ({"timestamp": 4}, {"timestamp": None}, {"output_length": "x"}, {"hash_ids": "x"}, {"input_length": 0}):
        path = lines(tmp_path / "t.jsonl", fine, {**fine, **wrong})
        with pytest.raises(ConfigError, match="line 2"):
            load("timed_trace", path=path)


def test_options_that_are_wrong() -> None:
    for wrong in (
        {"count": 0}, {"random_range_ratio": 1.0}, {"random_input_len": 0}, {"random_output_len": 0}, {"path": "x"},
        {"name": "custom"}, {"prefix_repetition_num_prefixes": 0}, {"timed_trace_sec_multiplier": 0.0},
        {"sharegpt_output_len": 0},
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            DatasetOptions(**wrong)
    assert DatasetOptions(random_input_len=0, random_prefix_len=5).random_input_len == 0


def test_random_pictures() -> None:
    sizes = "{(40, 60, 1): 0.8, (30, 31, 3): 0.2, (9, 9, 1): 0}"
    options: dict[str, Any] = {
        "count": 30, "random_input_len": 12, "random_mm_base_items_per_request": 4, "random_mm_num_mm_items_range_ratio": 0.5,
        "random_mm_limit_mm_per_prompt": '{"video": 1}', "random_mm_bucket_config": sizes,
    }  # fmt: skip
    made = load("random-mm", None, **options)
    assert [sample.messages for sample in made] == [sample.messages for sample in load("random-mm", None, **options)]
    counts, pictures = set(), set()
    for sample in made:
        assert sample.messages is not None
        *media, text = sample.messages[0]["content"]
        assert text["type"] == "text" and len(text["text"].split()) == 12
        kinds = [part["type"] for part in media]
        counts.add(len(kinds))
        assert kinds.count("video_url") <= 1
        for part in media:
            kind, _, data = part[part["type"]]["url"].partition(";base64,")
            if kind == "data:image/jpeg":
                assert Image.open(io.BytesIO(base64.b64decode(data))).size == (60, 40)
                pictures.add(data)
            else:
                assert kind == "data:video/mp4"
                with av.open(io.BytesIO(base64.b64decode(data))) as video:
                    assert len(list(video.decode(video=0))) == 3
    assert counts == {2, 3, 4, 5, 6} and len(pictures) > 80
    none = load("random-mm", None, count=1, random_mm_base_items_per_request=0)
    assert [part["type"] for part in none[0].messages[0]["content"]] == ["text"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"random_mm_bucket_config": "{(1, 2): 1}"}, {"random_mm_bucket_config": "{(0, 2, 1): 1}"},
        {"random_mm_bucket_config": "[1]"}, {"random_mm_bucket_config": "{(9, 9, 1): 0}"},
        {"random_mm_bucket_config": "{(9, 9, 1): -1}"}, {"random_mm_bucket_config": "__import__('os')"},
        {"random_mm_bucket_config": "{(99999, 9, 1): 1}"}, {"random_mm_limit_mm_per_prompt": '{"audio": 1}'},
        {"random_mm_num_mm_items_range_ratio": 2}, {"random_mm_base_items_per_request": -1},
    ],
)  # fmt: skip
def test_random_pictures_that_are_wrong(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="--random-mm"):
        load("random-mm", None, count=1, **wrong)


def test_flags_belong_to_data_sets(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--dataset-name", "--dataset"):
        assert main(["bench", "serve", flag, "random", "--random-mm-base-items-per-request", "2"]) == 2
        assert "--random-mm-base-items-per-request does not belong to --dataset-name random" in capsys.readouterr().err
    assert main(["bench", "serve", "--dataset-name", "random-mm", "--prefix-repetition-num-prefixes", "2"]) == 2
    assert "does not belong to --dataset-name random-mm" in capsys.readouterr().err


def test_bodies() -> None:
    ids, words = Sample(np.asarray([1, 2], dtype=np.int32), 5), Sample("é", 5)
    body = json.loads(request_body(ids, kind="completions", model="m", fields={"temperature": 0, "max_tokens": 6}))
    assert body == {
        "model": "m", "prompt": [1, 2], "max_tokens": 6, "stream": True, "temperature": 0,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    body = json.loads(request_body(words, kind="chat", model="m", fields={}))
    assert body["messages"] == [{"role": "user", "content": "é"}]
    assert body["max_completion_tokens"] == 5
    with pytest.raises(ConfigError, match="not token ids"):
        request_body(ids, kind="chat", model="m", fields={})
    with pytest.raises(ConfigError, match="openai-chat"):
        request_body(Sample(None, 5, messages=[{}]), kind="completions", model="m", fields={})
