"""Load a server with pictures and, beside them, streams of text; print throughput, TTFT and ITL of both.

    quire serve MODEL --load-format dummy
    python benchmarks/pictures_beside_text.py --url http://127.0.0.1:8000 --side 1024 --concurrency 16 64

MODEL reads images; weights may be random. Rows, one JSON object each:

    one at a time    TTFT of new pictures, of the same pictures with another question, of text of the same length
    text alone       8 streams of text
    N pictures       N requests with a new picture each at any time, beside 8 streams of text; on an NVIDIA GPU its utilization
"""

import argparse
import asyncio
import base64
import io
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import httpx
import numpy as np
from PIL import Image

TEXT_STREAMS, TEXT_WORDS, TEXT_TOKENS = 8, 150, 100
ANSWER_TOKENS, ALONE, SAMPLES_PER_SECOND = 64, 6, 10


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

    async def see(self, url: str, question: str, tokens: int) -> Answer:
        return await self.ask([{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}], tokens)


async def keep_busy(ask: Any, inputs: Iterator[Any], concurrency: int, seconds: float) -> list[Answer]:
    """Run a closed loop: that many requests at any time, until the time or the inputs are over."""
    answers, end = list[Answer](), time.perf_counter() + seconds

    async def one() -> None:
        while time.perf_counter() < end and (each := next(inputs, None)) is not None:
            answers.append(await ask(each))

    await asyncio.gather(*(one() for _ in range(concurrency)))
    return answers


def figures(answers: list[Answer], seconds: float) -> dict[str, Any]:
    good = [answer for answer in answers if not answer.error]
    failed = [answer.error for answer in answers if answer.error]
    found: dict[str, Any] = {"done": len(good), "failed": len(failed), "per_second": round(len(good) / seconds, 2)}
    for name, values in (("ttft", [answer.ttft for answer in good]), ("itl", [gap for each in good for gap in each.gaps])):
        if values:
            found |= {f"{name}_p{cut}_ms": round(1000 * float(np.percentile(values, cut)), 1) for cut in (50, 99)}
    return found | ({"first_error": failed[0]} if failed else {})


class Utilization:
    """Shares of time in which the first GPU ran kernels, sampled while the context lasts."""

    def __enter__(self) -> "Utilization":
        command = ["nvidia-smi", "-i", "0", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "100"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True) if shutil.which(command[0]) else None
        return self

    def __exit__(self, *_: object) -> None:
        self.mean = None
        if self._process is not None:
            self._process.kill()
            samples = [int(each) for each in self._process.communicate()[0].split()[SAMPLES_PER_SECOND:]]
            self.mean = round(float(np.mean(samples)), 1) if samples else None


def median_ms(answers: list[Answer]) -> float:
    return round(1000 * float(np.median([answer.ttft for answer in answers])), 1)


async def run(args: argparse.Namespace, pictures: list[str]) -> None:
    taken = iter(pictures)
    async with httpx.AsyncClient(base_url=args.url, timeout=300, limits=httpx.Limits(max_connections=None)) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        client = Client(http, model)
        await client.see(next(taken), "What is this?", 8)
        some = [next(taken) for _ in range(ALONE)]
        new = [await client.see(url, "What is this?", 8) for url in some]
        again = [await client.see(url, "And what else is there?", 8) for url in some]
        length = max(answer.prompt_tokens for answer in new) // 2  # a number is about two tokens
        text = [await client.ask(words(index, length), 8) for index in range(ALONE)]
        show("one at a time", new_ms=median_ms(new), repeated_ms=median_ms(again), text_ms=median_ms(text),
             tokens=new[0].prompt_tokens, text_tokens=text[0].prompt_tokens)  # fmt: skip

        def look(url: str) -> Any:
            return client.see(url, "What is this?", ANSWER_TOKENS)

        def texts(seed: int) -> Any:
            prompts = (words(seed + index, TEXT_WORDS) for index in range(1 << 20))
            return keep_busy(lambda each: client.ask(each, TEXT_TOKENS), prompts, TEXT_STREAMS, args.seconds)

        show("text alone", **figures(await texts(1 << 20), args.seconds))
        for concurrency in args.concurrency:
            began = time.perf_counter()
            with Utilization() as gpu:
                seen = keep_busy(
                    lambda each: client.see(each, "What is this?", ANSWER_TOKENS), taken, concurrency, args.seconds
                )
                with_pictures, beside = await asyncio.gather(seen, texts(concurrency << 21))
            seconds = time.perf_counter() - began
            show(f"{concurrency} pictures", **figures(with_pictures, seconds), gpu_percent=gpu.mean)
            show("text beside them", **figures(beside, seconds))


def show(row: str, **values: Any) -> None:
    print(json.dumps({"row": row, **values}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--side", type=int, default=1024, help="pixels of a picture's side")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--seconds", type=float, default=20.0, help="of each row")
    parser.add_argument("--pictures", type=int, default=1000, help="different ones; a row ends when they are used up")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with ProcessPoolExecutor() as pool:
        seeds = range(args.seed, args.seed + args.pictures)
        pictures = list(pool.map(picture, seeds, [args.side] * args.pictures, chunksize=8))
    asyncio.run(run(args, pictures))


if __name__ == "__main__":
    main()
