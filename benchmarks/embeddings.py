"""Embeddings per second of Quire, sentence-transformers and ONNX Runtime on this machine, all in one run.

    python benchmarks/embeddings.py FOLDER [--documents 1 32 512] [--tokens 16 512] [--tries 3] [--only NAME ...]

FOLDER: a model with the files of sentence-transformers, such as all-MiniLM-L6-v2. Each batch has documents of lengths spread
evenly over `--tokens`, in a fixed random order. The systems take turns, so that a busy machine slows all of them, and the
processor time of all threads and processes is shown beside the wall time. Every system
normalizes, computes in float32 with as many threads, and gets the same token ids; the vectors must agree. "served" is Quire
behind `/v1/embeddings`: all documents in one request, vectors in base64. sentence-transformers and onnxruntime (with onnx,
which exports the model) are measured if they are installed. Linux only: processor times come from /proc.
"""

import argparse
import atexit
import base64
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from front_end import free_port, processor_seconds, stat

Texts = Sequence[Sequence[int]]
Embed = Callable[[Texts], np.ndarray]
BATCH = 32  # documents that sentence-transformers and ONNX Runtime pad to one length: their usual batch, sorted by length
OPSET = 17


def make_documents(count: int, low: int, high: int, vocabulary: int) -> list[list[int]]:
    """Return `count` documents as token ids; a single one has the middle length."""
    shuffle = random.Random(0)
    lengths = [(low + high) // 2] if count == 1 else [low + (high - low) * i // (count - 1) for i in range(count)]
    shuffle.shuffle(lengths)
    return [[101, *(shuffle.randrange(1000, vocabulary) for _ in range(length - 2)), 102] for length in lengths]


def quire_embedder(folder: Path, threads: int) -> Embed:  # noqa: ARG001 - it uses the threads of OMP_NUM_THREADS
    from quire import LLM

    llm = LLM(model=str(folder), max_model_len=512)

    def embed(texts: Texts) -> np.ndarray:
        outputs = llm.embed([{"prompt_token_ids": list(text)} for text in texts], use_tqdm=False)
        return np.array([output.outputs.embedding for output in outputs], np.float32)

    return embed


def served_embedder(folder: Path, threads: int) -> Embed:  # noqa: ARG001 - as `quire_embedder`
    port = free_port()
    command = [sys.executable, "-m", "quire.cli.main", "serve", str(folder), "--max-model-len", "512", "--port", str(port)]
    server = subprocess.Popen([*command, "--disable-uvicorn-access-log"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    atexit.register(server.wait, 60)
    atexit.register(server.terminate)  # runs first

    def embed(texts: Texts) -> np.ndarray:
        body = json.dumps({"input": texts, "encoding_format": "base64"}).encode()
        headers = {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}/v1/embeddings", body, headers)) as answer:
            entries = json.load(answer)["data"]
        return np.array([np.frombuffer(base64.b64decode(entry["embedding"]), np.float32) for entry in entries])

    while True:
        try:
            embed([[101, 102]])
            return embed
        except OSError:
            if server.poll() is not None:
                raise
            time.sleep(0.5)


def padded(texts: Texts) -> list[tuple[list[int], torch.Tensor, torch.Tensor]]:
    """Return batches of similar length: their indices, ids and mask."""
    order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
    batches = []
    for first in range(0, len(order), BATCH):
        some = order[first : first + BATCH]
        ids = torch.zeros(len(some), len(texts[some[0]]), dtype=torch.long)
        for row, index in enumerate(some):
            ids[row, : len(texts[index])] = torch.tensor(texts[index])
        batches.append((some, ids, (ids != 0).long()))
    return batches


def joined(texts: Texts, run: Callable[[torch.Tensor, torch.Tensor], np.ndarray]) -> np.ndarray:
    parts = [(some, run(ids, mask)) for some, ids, mask in padded(texts)]
    out = np.empty((len(texts), parts[0][1].shape[1]), np.float32)
    for some, values in parts:
        out[some] = values
    return out


def sentence_transformers_embedder(folder: Path, threads: int) -> Embed:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu")
    torch.set_num_threads(threads)

    def run(ids: torch.Tensor, mask: torch.Tensor) -> np.ndarray:
        with torch.inference_mode():
            found = model({"input_ids": ids, "attention_mask": mask})["sentence_embedding"]
        return torch.nn.functional.normalize(found, dim=1).numpy()

    return lambda texts: joined(texts, run)


def onnx_embedder(folder: Path, threads: int) -> Embed:
    import onnxruntime
    from transformers import AutoModel

    class Mean(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            states = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            weights = attention_mask.unsqueeze(-1).to(states.dtype)
            return torch.nn.functional.normalize((states * weights).sum(1) / weights.sum(1), dim=1)

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "model.onnx")
        example = torch.ones(2, 8, dtype=torch.long)
        axes = {0: "batch", 1: "length"}
        torch.onnx.export(
            Mean(), (example, example), str(path), input_names=["input_ids", "attention_mask"], output_names=["embedding"],
            dynamic_axes={"input_ids": axes, "attention_mask": axes, "embedding": {0: "batch"}}, opset_version=OPSET,
            dynamo=False,
        )  # fmt: skip
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(ids: torch.Tensor, mask: torch.Tensor) -> np.ndarray:
        found: np.ndarray = session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})[0]
        return found

    return lambda texts: joined(texts, run)


def processor_time() -> float:
    """Return the processor seconds of this process and of all its descendants so far."""
    found = {int(entry.name): stat(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    family = {os.getpid()}
    while more := {pid for pid, fields in found.items() if fields and int(fields[1]) in family} - family:
        family |= more
    return time.process_time() + sum(processor_seconds(pid) for pid in family - {os.getpid()})


SYSTEMS: dict[str, tuple[Callable[[Path, int], Embed], tuple[str, ...]]] = {
    "quire": (quire_embedder, ()),
    "served": (served_embedder, ()),
    "sentence-transformers": (sentence_transformers_embedder, ("sentence_transformers",)),
    "onnxruntime": (onnx_embedder, ("onnxruntime", "onnx")),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--documents", type=int, nargs="+", default=[1, 32, 512])
    parser.add_argument("--tokens", type=int, nargs=2, default=[16, 512], metavar=("LOW", "HIGH"))
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    options = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    systems: dict[str, Embed] = {}
    for name in options.only:
        make, needs = SYSTEMS[name]
        missing = [package for package in needs if importlib.util.find_spec(package) is None]
        if missing:
            print(f"{name}: not measured; {', '.join(missing)} is not installed")
            continue
        systems[name] = make(options.folder, threads)
    print(f"{threads} threads, documents of {options.tokens[0]} to {options.tokens[1]} tokens, best of {options.tries}")
    columns = f"{'seconds':>9}{'documents/s':>13}{'tokens/s':>11}{'CPU ms/document':>17}"
    print(f"{'documents':>10}  {'system':24}{columns}  cosine with the first")
    for count in options.documents:
        texts = make_documents(count, *options.tokens, vocabulary=30000)
        total, vectors = sum(map(len, texts)), dict[str, np.ndarray]()
        best, processor = dict.fromkeys(systems, float("inf")), dict.fromkeys(systems, float("inf"))
        for name, embed in systems.items():
            vectors[name] = embed(texts[: min(count, BATCH)])
        for _ in range(options.tries):
            for name, embed in systems.items():
                start, used = time.perf_counter(), processor_time()
                vectors[name] = embed(texts)
                best[name] = min(best[name], time.perf_counter() - start)
                processor[name] = min(processor[name], processor_time() - used)
        first = next(iter(vectors.values()))
        for name, seconds in best.items():
            cosine = float((first * vectors[name]).sum(1).min())
            used = 1000 * processor[name] / count
            columns = f"{seconds:9.3f}{count / seconds:13.1f}{total / seconds:11.0f}{used:17.1f}"
            print(f"{count:10}  {name:24}{columns}  {cosine:.7f}")
            if cosine < 0.99999:
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
