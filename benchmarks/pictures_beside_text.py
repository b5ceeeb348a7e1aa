"""Load a server with pictures and, beside them, streams of text; print one table of TTFT, ITL, throughput and GPU idle time.

    python benchmarks/pictures_beside_text.py         # Qwen2.5-VL-7B's shape, random weights, 1,024 x 1,024 pictures
    python benchmarks/pictures_beside_text.py tiny    # two layers and small pictures, for machines without a GPU
    python benchmarks/pictures_beside_text.py --model MODEL --serve-args "--load-format dummy" | --url URL

Nothing is downloaded: the model's configuration, image processor, tokenizer and chat template are written to a temporary
directory, and the server is started and stopped here. It ends within `--limit` seconds. Rows of the table:

    first, repeated        one request at a time: a new picture, then the same with another question (prefix cache hit)
    repeated after text    the same pictures after other text: the prefix cache misses, the encoder cache hits
    text of that length    prompts of text with as many tokens
    text alone             8 streams of text
    N pictures             N requests with a new picture each at any time, beside 8 streams of text
    text beside N          those streams

GPU idle: share of time in which no kernel ran on the first GPU, by nvidia-smi, or "-". Waits for pixels are a part of it.
"""

import argparse
import asyncio
import base64
import contextlib
import io
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

TEXT_STREAMS, TEXT_WORDS, TEXT_TOKENS = 8, 150, 100
ANSWER_TOKENS, ONE_BY_ONE, SAMPLES_PER_SECOND = 64, 25, 10
QUESTION, OTHER_QUESTION = "What is this?", "And what else is there?"
COLUMNS = (
    "done", "failed", "prompt_tokens", "per_second", "ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms",
    "gpu_idle_percent",
)  # fmt: skip
Rows = dict[str, dict[str, Any]]
PRESETS: dict[str, dict[str, Any]] = {
    "7b": {"side": 1024, "concurrency": [16, 64], "seconds": 30.0, "pictures": 2000, "serve_args": ""},
    "tiny": {"side": 448, "concurrency": [2], "seconds": 4.0, "pictures": 40,
             "serve_args": "--device cpu --kv-cache-memory-bytes 256M"},
}  # fmt: skip

# ---- the model

SHAPE: dict[str, Any] = {
    "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4,
    "num_hidden_layers": 28,
}  # fmt: skip
VISION: dict[str, Any] = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584}
TINY_SHAPE = {
    "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 2,
}  # fmt: skip
TINY_VISION = {"depth": 2, "hidden_size": 64, "intermediate_size": 96, "out_hidden_size": 128, "fullatt_block_indexes": [1]}
MARKS = {
    "<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645, "<|vision_start|>": 151652,
    "<|vision_end|>": 151653, "<|image_pad|>": 151655, "<|video_pad|>": 151656,
}  # fmt: skip
TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}\
{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}""".replace("\\\n", "")


def write_model(directory: Path, tiny: bool) -> None:
    """Write all files of Qwen2.5-VL-7B but the weights, with a tokenizer of single bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vision = {
        "num_heads": 1 if tiny else 16, "hidden_act": "silu", "in_chans": 3, "patch_size": 14, "spatial_merge_size": 2,
        "spatial_patch_size": 14, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2,
        "temporal_patch_size": 2, "model_type": "qwen2_5_vl", **(TINY_VISION if tiny else VISION),
    }  # fmt: skip
    config = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "torch_dtype": "bfloat16",
        "vocab_size": 152064, "max_position_embeddings": 128000, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu",
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "tie_word_embeddings": False,
        "bos_token_id": 151643, "eos_token_id": 151645, "image_token_id": 151655, "video_token_id": 151656,
        "vision_start_token_id": 151652, "vision_end_token_id": 151653, "vision_config": vision,
        **(TINY_SHAPE if tiny else SHAPE),
    }  # fmt: skip
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
        "min_pixels": 3136, "max_pixels": 12845056, "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }  # fmt: skip
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": TEMPLATE}
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: at for at, letter in enumerate(letters)} | MARKS, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(list(MARKS))
    tokenizer.save(str(directory / "tokenizer.json"))
    for name, value in (("config", config), ("preprocessor_config", processor), ("tokenizer_config", names)):
        (directory / f"{name}.json").write_text(json.dumps(value))


@contextlib.contextmanager
def server_of(options: argparse.Namespace) -> Iterator[str]:
    """Yield the URL of a server, which is started and stopped unless one was named."""
    if options.url is not None:
        yield options.url
        return
    with tempfile.TemporaryDirectory() as directory, socket.socket() as held:
        if options.model is None:
            write_model(Path(directory), options.shape == "tiny")
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        held.close()
        arguments = ["--max-model-len", "8192"] + ([] if options.model else ["--load-format", "dummy"])
        command = [sys.executable, "-m", "quire.cli.main", "serve", options.model or directory, "--port", str(port)]
        source = str(Path(__file__).absolute().parent.parent / "src")
        path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
        log = Path(directory) / "log"
        with log.open("w") as file:
            command += [*arguments, *shlex.split(options.serve_args)]
            process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, stderr=file, stdout=file)
        try:
            url = f"http://127.0.0.1:{port}"
            wait_ready(url, process, log)
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def wait_ready(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    while process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/readyz").status_code == 200:
                return
        time.sleep(0.5)
    raise SystemExit(f"the server ended:\n{log.read_text()[-3000:]}")


# ---- clients


@dataclass
class Answer:
    error: str
    ttft: float  # seconds
    gaps: list[float]  # between tokens
    prompt_tokens: int = 0


def picture(seed: int, side: int) -> str:
    """Return a data URL of smooth noise in JPEG, about as large as a photograph."""
    colors = np.random.default_rng(seed).integers(0, 256, (side // 20, side // 20, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(colors).resize((side, side), Image.Resampling.BICUBIC).save(buffer, "JPEG")
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def words(seed: int, count: int) -> str:
    return " ".join(map(str, np.random.default_rng(seed).integers(0, 1000, count)))


class Client:
    def __init__(self, http: httpx.AsyncClient, model: str) -> None:
        self._http, self._model = http, model

    async def ask(self, content: Any, tokens: int) -> Answer:
        body = {
            "model": self._model, "messages": [{"role": "user", "content": content}], "max_tokens": tokens, "temperature": 0,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True,
        }  # fmt: skip
        began, arrivals, prompt_tokens = time.perf_counter(), list[float](), 0
        async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                return Answer(f"{response.status_code}: {(await response.aread())[:200].decode(errors='replace')}", 0.0, [])
            async for line in response.aiter_lines():
                chunk = json.loads(line[6:]) if line.startswith("data: {") else {}
                prompt_tokens = (chunk.get("usage") or {}).get("prompt_tokens", prompt_tokens)
                if any(choice.get("token_ids") for choice in chunk.get("choices", ())):
                    arrivals.append(time.perf_counter())
        if not arrivals:
            return Answer("no tokens came", 0.0, [])
        gaps = [later - sooner for sooner, later in pairwise(arrivals)]
        return Answer("", arrivals[0] - began, gaps, prompt_tokens)


def parts(url: str, question: str) -> list[Any]:
    return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]


async def keep_busy(ask: Any, inputs: Iterator[Any], concurrency: int, seconds: float) -> list[Answer]:
    """Run a closed loop: that many requests at any time, until the time or the inputs are over."""
    answers, end = list[Answer](), time.perf_counter() + seconds

    async def one() -> None:
        while time.perf_counter() < end and (each := next(inputs, None)) is not None:
            answers.append(await ask(each))

    await asyncio.gather(*(one() for _ in range(concurrency)))
    return answers


def figures(answers: list[Answer], seconds: float | None = None) -> dict[str, Any]:
    """seconds: that all of them took together; None: others were between them."""
    good = [answer for answer in answers if not answer.error]
    failed = [answer.error for answer in answers if answer.error]
    found: dict[str, Any] = {"done": len(good), "failed": len(failed)}
    if seconds is not None:
        found["per_second"] = round(len(good) / seconds, 2)
    for name, values in (("ttft", [answer.ttft for answer in good]), ("itl", [gap for each in good for gap in each.gaps])):
        if values:
            found |= {f"{name}_p{cut}_ms": round(1000 * float(np.percentile(values, cut)), 1) for cut in (50, 99)}
    if good:
        found["prompt_tokens"] = round(float(np.mean([answer.prompt_tokens for answer in good])))
    return found | ({"first_error": failed[0]} if failed else {})


class Utilization:
    """Shares of time in which the first GPU ran kernels, sampled while the context lasts."""

    def __enter__(self) -> "Utilization":
        command = ["nvidia-smi", "-i", "0", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "100"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True) if shutil.which(command[0]) else None
        return self

    def __exit__(self, *_: object) -> None:
        self.idle = None
        if self._process is not None:
            self._process.kill()
            samples = [int(each) for each in self._process.communicate()[0].split()[SAMPLES_PER_SECOND:]]
            self.idle = round(100 - float(np.mean(samples)), 1) if samples else None


async def one_by_one(client: Client, pictures: list[str], rows: Rows) -> None:
    """Measure requests that are alone: their time to the first token. The kinds take turns."""

    def after_text(at: int, url: str) -> list[Any]:
        return [{"type": "text", "text": f"{words(at, 20)}."}, *parts(url, OTHER_QUESTION)]

    tokens = (await client.ask(after_text(0, pictures[0]), 8)).prompt_tokens
    sample = await client.ask(words(0, tokens)[:tokens], 8)  # also compiles kernels
    characters = tokens * tokens // max(1, sample.prompt_tokens)
    found: dict[str, list[Answer]] = {"first": [], "repeated": [], "repeated after text": [], "text of that length": []}
    for at, url in enumerate(pictures[1:], 1):
        text = words(at, tokens)[:characters]
        contents = parts(url, QUESTION), parts(url, OTHER_QUESTION), after_text(at, url), text
        for answers, content in zip(found.values(), contents, strict=True):
            answers.append(await client.ask(content, 8))
    for name, answers in found.items():
        rows[name] = figures(answers)


async def run(options: argparse.Namespace, url: str, pictures: list[str]) -> Rows:
    rows, unused = Rows(), iter(pictures)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=httpx.Limits(max_connections=None)) as http:
        client = Client(http, (await http.get("/v1/models")).json()["data"][0]["id"])
        await one_by_one(client, [next(unused) for _ in range(ONE_BY_ONE)], rows)

        def look(picture: str) -> Any:
            return client.ask(parts(picture, QUESTION), ANSWER_TOKENS)

        def texts(seed: int) -> Any:
            prompts = (words(seed + at, TEXT_WORDS) for at in count())
            return keep_busy(lambda each: client.ask(each, TEXT_TOKENS), prompts, TEXT_STREAMS, options.seconds)

        rows["text alone"] = figures(await texts(1 << 20), options.seconds)
        for concurrency in options.concurrency:
            began = time.perf_counter()
            with Utilization() as gpu:
                seen, beside = await asyncio.gather(
                    keep_busy(look, unused, concurrency, options.seconds), texts(concurrency << 21)
                )
            seconds = time.perf_counter() - began
            rows[f"{concurrency} pictures"] = figures(seen, seconds) | {"gpu_idle_percent": gpu.idle}
            rows[f"text beside {concurrency}"] = figures(beside, seconds)
    return rows


def show(rows: Rows, concurrency: list[int]) -> None:
    """Print the table and the ratios."""
    print("".join([f"{'':20}", *(f"{name:>17}" for name in COLUMNS)]))
    for name, row in rows.items():
        print(f"{name:20}" + "".join(f"{'-' if row.get(column) is None else row[column]:>17}" for column in COLUMNS))

    def ratio(name: str, over: str, column: str) -> str:
        values = [rows[each].get(column) for each in (name, over)]
        return "-" if None in values else f"{values[0] / values[1]:.2f}"

    for name, over, column in (
        ("repeated", "first", "ttft_p50_ms"),
        ("repeated", "text of that length", "ttft_p50_ms"),
        ("repeated after text", "text of that length", "ttft_p50_ms"),
        *((f"text beside {each}", "text alone", "itl_p99_ms") for each in concurrency),
    ):
        print(f"{column} of {name!r} over that of {over!r}: {ratio(name, over, column)}")
    for name, row in rows.items():
        if "first_error" in row:
            print(f"error of {name!r}: {row['first_error']}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", nargs="?", choices=PRESETS, default="7b")
    parser.add_argument("--url", help="of a running server whose model reads images; default: one is started")
    parser.add_argument("--model", help="its checkpoint; default: Qwen2.5-VL-7B's shape with random weights")
    parser.add_argument("--serve-args", help="further arguments of quire serve")
    parser.add_argument("--side", type=int, help="pixels of a picture's side")
    parser.add_argument("--concurrency", type=int, nargs="+", help="pictures at a time")
    parser.add_argument("--seconds", type=float, help="of each row with several clients")
    parser.add_argument("--pictures", type=int, help="different ones; a row ends when they are used up")
    parser.add_argument("--limit", type=float, default=350.0, help="seconds after which it is given up")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name, value in PRESETS[options.shape].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, options.limit)
    with ProcessPoolExecutor() as pool:
        seeds = range(options.seed, options.seed + options.pictures)
        pictures = list(pool.map(picture, seeds, [options.side] * options.pictures, chunksize=8))
    with server_of(options) as url:
        rows = asyncio.run(run(options, url, pictures))
    show(rows, options.concurrency)
    return int(any(row["failed"] for row in rows.values()))


def give_up(number: int, frame: object) -> None:  # noqa: ARG001
    raise SystemExit("the time is over: raise --limit")


if __name__ == "__main__":
    sys.exit(main())
