"""Injects faults into KV cache tiers and compares every answer with an engine without tiers, token by token and bit by bit.

    python benchmarks/tier_faults.py --faults 100000

Tiny random models of every cache kind run on a CPU, with few device pages, so that pages go to host memory and disk and come
back all the time. Faults are made where the bytes lie: in the memory of host records, in segment files, and in the system calls
that read and write them. Between them requests are aborted and preempted, the prefix cache is reset, the directory is deleted,
and engines are killed in the middle of a write and started again. Exit code 1: an answer differed, a request hung, or pages,
records, files or descriptors were left.
"""

import argparse
import errno
import gc
import json
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from quire import LLM, LoRARequest, SamplingParams
from quire.features.tiers.disk import HEADER_BYTES, DiskStore
from quire.ops.native import multiplies_floats
from quire.sched import disk as disk_traffic
from quire.sched.arrivals import Speeds

ANSWER_TOKENS, CONVERSATIONS, TOGETHER, MAX_ROUND_S = 4, 14, 8, 60.0
RESTART_ROUNDS = 60  # in which engines are killed twice and started again, and the directory is deleted once
FETCH_RATE, STORE_RATE, READ_RATE, WRITE_RATE = 0.75, 0.1, 0.7, 0.2  # of the pages that move
HOST_FAULTS = ("bit", "two bits", "bits", "zeros", "words swapped", "tag", "swapped", "other", "stale")
READ_TIMEOUT_S = 0.01  # in place of 10 s, so that a slow disk is given up often
SIZES = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 10, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "initializer_range": 0.12,
}  # fmt: skip
ARGS = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 128, "max_logprobs": 3}
ONE_TOKEN_STEPS = {"max_num_batched_tokens": 1, "max_num_seqs": 1}  # no sum depends on other tokens of the step
BATCHES = {"max_num_batched_tokens": 64, "max_num_seqs": 4}


@dataclass(frozen=True)
class Kind:
    """A cache kind: a model's configuration, and arguments of the engine."""

    config: str  # class of transformers
    changes: dict[str, Any] = field(default_factory=dict)
    args: dict[str, Any] = field(default_factory=dict)
    page: int = 4
    pages: int = 40  # of the device
    tenants: int = 1
    adapters: int = 0
    ranks: int = 1
    alone: bool = False  # in steps of one token, since sums depend on the other tokens of a step


KINDS: dict[str, Kind] = {
    "grouped": Kind("Llama"),
    "pages of 16": Kind("Llama", page=16, pages=12),
    "pages of 1": Kind("Llama", page=1, pages=140),
    "window": Kind("Mistral", {"sliding_window": 9}, page=2, pages=76),
    "some windows": Kind("Qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}, page=2, pages=112),
    "latent": Kind("DeepseekV2", LATENT, page=2, pages=76, alone=True),
    "fp8_e4m3": Kind("Llama", args={"kv_cache_dtype": "fp8_e4m3"}, page=2, pages=76, alone=True),
    "fp8_e5m2": Kind("Llama", args={"kv_cache_dtype": "fp8_e5m2"}, page=1, pages=140, alone=True),
    "adapters": Kind("Llama", args={"enable_lora": True, "max_loras": 2}, page=2, pages=76, adapters=2),
    "tenants": Kind("Llama", page=1, pages=140, tenants=3),
    "two ranks": Kind("Llama", args={"tensor_parallel_size": 2}, ranks=2, alone=True),
}


@dataclass(frozen=True)
class Question:
    tokens: tuple[int, ...]
    tenant: int
    adapter: int
    params: SamplingParams

    def send(self, llm: LLM, name: str, adapters: list[LoRARequest]) -> None:
        prompt: dict[str, Any] = {"prompt_token_ids": list(self.tokens)}
        if self.tenant:
            prompt["cache_salt"] = f"tenant {self.tenant}"
        adapter = adapters[self.adapter - 1] if self.adapter else None
        llm.llm_engine.add_request(name, prompt, self.params, lora_request=adapter)  # type: ignore[arg-type]


Answer = list[tuple[int, list[tuple[int, float]]]]  # tokens, each with its logprobs


class Problem(Exception):
    """An answer, a page or a file is not what it must be."""


class Faults:
    """Makes faults in the tiers of one engine, and counts them by kind."""

    def __init__(self, rng: random.Random, counts: Counter[str]) -> None:
        self.rng, self.counts = rng, counts
        self.foreign: list[Path] = []  # segments of another rank or model whose records are as long
        self.on = False
        self.writes_left: int | None = None  # until the process is killed in the middle of one; None: it is not
        self._mutex = threading.Lock()

    def attach(self, llm: LLM) -> None:
        self._arena = arena_of(llm)
        self._history: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # record -> an earlier content
        store, fetch = self._arena.store, self._arena.fetch

        def faulty_store(pages: Any, records: Any, tags: Any) -> None:
            lost = [i for i in range(len(records)) if self._happens(STORE_RATE)]
            before = [self._copy(int(records[i])) for i in lost]
            for record in records.tolist():
                self._history.setdefault(record, self._copy(record))
            store(pages, records, tags)
            for i, (content, tag) in zip(lost, before, strict=True):
                self._arena.memory[records[i]], self._arena.sums[records[i]] = content, tag
                self.counts["host: store lost"] += 1

        def faulty_fetch(records: Any, pages: Any, tags: Any) -> Any:
            kind = self.rng.choice(HOST_FAULTS)  # of one kind: a fault that is found would hide others further on in the prompt
            for record in records.tolist():
                if self._happens(FETCH_RATE):
                    self._damage_record(record, kind)
            return fetch(records, pages, tags)

        self._arena.store, self._arena.fetch = faulty_store, faulty_fetch  # type: ignore[method-assign]
        self._store: DiskStore | None = getattr(part_of(llm)._disk, "store", None)
        if self._store is not None:
            get = self._store.get

            def faulty_get(name: bytes, content: memoryview) -> bytes | None:
                if not self._happens(READ_RATE):
                    return get(name, content)
                with self._faulty_read(name, content):
                    return get(name, content)

            self._store.get = faulty_get  # type: ignore[method-assign]

    def _happens(self, rate: float) -> bool:
        return self.on and self.rng.random() < rate

    def _copy(self, record: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._arena.memory[record].clone(), self._arena.sums[record].clone()

    def _damage_record(self, record: int, kind: str) -> None:
        memory, sums, rng = self._arena.memory, self._arena.sums, self.rng
        width, page = memory.shape[1], self._arena._content.bytes
        if kind in ("bit", "two bits", "bits"):
            for _ in range({"bit": 1, "two bits": 2, "bits": rng.randrange(3, 40)}[kind]):
                at = rng.randrange(page // 8) * 8 + 7 if kind == "two bits" else rng.randrange(page)
                memory[record, at] ^= 128 if kind == "two bits" else 1 << rng.randrange(8)
        elif kind == "zeros":
            at = rng.randrange(page)
            memory[record, at : at + rng.randrange(1, width)] = 0
        elif kind == "words swapped":
            words = memory[record].view(torch.int64)
            i, j = (rng.randrange(len(words)) for _ in range(2))
            words[[i, j]] = words[[j, i]]
        elif kind == "tag":
            sums[record, rng.randrange(2)] ^= 1 << rng.randrange(63)
        elif kind == "stale":
            if record not in self._history:
                return
            memory[record], sums[record] = self._history[record]
        else:
            other = rng.randrange(len(memory))
            mine, theirs = self._copy(record), self._copy(other)
            memory[record], sums[record] = theirs
            if kind == "swapped":
                memory[other], sums[other] = mine
        self.counts[f"host: {kind}"] += 1

    @contextmanager
    def _faulty_read(self, name: bytes, content: memoryview) -> Iterator[None]:
        assert self._store is not None
        kind = self.rng.choice(("file", "file", "file", "error", "short", "slow", "late"))
        found = self._store._index.get(name)
        if kind == "file" or found is None:
            if found is not None:
                length = HEADER_BYTES + len(content)
                size = found[0].size
                damage_file(self._store._lane / found[0].name, found[1], length, size, self.rng, self.counts, self.foreign)
            yield
            return
        self.counts[f"disk: read {kind}"] += 1
        if kind in ("slow", "late"):
            time.sleep(READ_TIMEOUT_S * 1.5 if kind == "late" else 0.001)
            yield
            return
        with self._mutex, mock.patch("os.preadv", failing_read if kind == "error" else short_read):
            yield

    @contextmanager
    def writes(self) -> Iterator[None]:
        """Let writes fail: a full disk at any byte, errors, slow ones, and none after a kill."""
        write = os.pwritev

        def faulty(file: int, parts: list[Any], position: int) -> int:
            if self.writes_left is not None:
                self.writes_left -= 1
                if self.writes_left <= 0:
                    self._kill(write, file, parts, position)
            if not self._happens(WRITE_RATE):
                return write(file, parts, position)
            kind = self.rng.choice(("full", "full at a byte", "error", "short", "slow"))
            self.counts[f"disk: write {kind}"] += 1
            data = b"".join(parts)
            if kind == "slow":
                time.sleep(0.002)
                return write(file, parts, position)
            if kind in ("short", "full at a byte"):
                done = write(file, [data[: self.rng.randrange(1, len(data))]], position)
                if kind == "short":
                    return done
            raise OSError(errno.EIO if kind == "error" else errno.ENOSPC, "a fault")

        with mock.patch("os.pwritev", faulty):
            yield

    def _kill(self, write: Callable[..., int], file: int, parts: list[Any], position: int) -> None:
        """The process ends while this is written."""
        if not self.writes_left:
            data = b"".join(parts)
            write(file, [data[: self.rng.randrange(1, len(data))]], position)
            self.counts["disk: killed in a write"] += 1
        raise SystemExit("killed")

    def resume_writes(self) -> None:
        if self._store is not None:
            self._store._pause_until = 0.0


def failing_read(*_: Any) -> int:
    raise OSError(errno.EIO, "a fault")


def short_read(file: int, parts: list[Any], position: int) -> int:
    """Return part of what was asked for, or the end of the file."""
    data = os.pread(file, len(parts[0]) // 3, position)
    parts[0][: len(data)] = data
    return len(data)


def damage_file(
    path: Path, position: int, length: int, size: int, rng: random.Random, counts: Counter[str], foreign: list[Path],
    cut: bool = True,
) -> None:  # fmt: skip
    """Damage the record at a position of a segment of this size, whose records have this length."""
    try:
        with path.open("r+b") as file:
            kinds = ["bit", "bits", "zeros", "swapped", "other"] + ["foreign"] * bool(foreign) + ["truncated"] * cut
            kind = rng.choice(kinds)
            file.seek(position)
            data = bytearray(file.read(length))
            if not data or length > size:
                return
            if kind in ("bit", "bits"):
                for _ in range(1 if kind == "bit" else 9):
                    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            elif kind == "zeros":
                at = rng.randrange(len(data))
                data[at : at + 64] = bytes(len(data[at : at + 64]))
            elif kind in ("swapped", "other"):
                other = rng.randrange(size // length) * length
                file.seek(other)
                theirs = bytearray(file.read(length))
                if kind == "swapped":
                    file.seek(other)
                    file.write(data)
                data = theirs
            elif kind == "foreign":
                data = bytearray(foreign_record(data, rng.choice(foreign), length) or data)
            file.seek(position)
            file.write(data)
            if kind == "truncated":
                file.truncate(position + rng.randrange(length))
    except FileNotFoundError:  # its directory was deleted
        return
    counts[f"disk: {kind}"] += 1


def foreign_record(data: bytearray, path: Path, length: int) -> bytes | None:
    """Return the record of another rank or model with the same name, or any."""
    name, theirs = bytes(data[8:40]), path.read_bytes()
    records = [theirs[at : at + length] for at in range(0, len(theirs) - length + 1, length)]
    return next((record for record in records if record[8:40] == name), records[0] if records else None)


def part_of(llm: LLM) -> Any:
    return next(part for part in llm.llm_engine.core.executor._runner._parts if part.name == "tiers")  # type: ignore


def arena_of(llm: LLM) -> Any:
    return part_of(llm)._arena


class Trial:
    """One cache kind: its model, its questions, the right answers, and rounds of faults."""

    def __init__(self, name: str, directory: Path, seed: int) -> None:
        self.name, self.kind, self.directory = name, KINDS[name], directory
        self.rng, self.counts = random.Random(f"{seed} {name}"), Counter[str]()
        self.model, self.path = make_model(self.kind, directory / "model", 1), directory / "kv"
        self.adapters = [
            LoRARequest(f"adapter-{number}", number, make_adapter(directory / f"adapter-{number}", number))
            for number in range(1, self.kind.adapters + 1)
        ]
        self.questions = self._questions()
        self.answers = self.rounds = self.restarts = 0
        llm = self.start(tiers=False)
        self.right = [self.ask_alone(llm, question) for question in self.questions]
        if len({str(answer) for answer in self.right}) < CONVERSATIONS:
            raise Problem("answers hardly depend on the questions")
        llm.close()

    def _questions(self) -> list[Question]:
        """Conversations that share beginnings, for each tenant and adapter."""
        rng, found = random.Random(self.name), list[Question]()
        stem = [rng.randrange(3, 300) for _ in range(60)]
        for i in range(CONVERSATIONS):
            shared = rng.choice((0, 8, 16, 32, 48))
            tokens = stem[:shared] + [rng.randrange(3, 300) for _ in range(rng.randrange(20, 60 - shared // 2))]
            seeded: dict[str, Any] = {"temperature": 0.0} if i % 2 else {"temperature": 0.9, "seed": i}
            params = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True, logprobs=3, **seeded)
            found += [
                Question(tuple(tokens), tenant, adapter, params)
                for tenant in range(self.kind.tenants)
                for adapter in range(self.kind.adapters + 1)
            ]
        return found

    def start(self, tiers: bool = True) -> LLM:
        steps = ONE_TOKEN_STEPS if self.kind.alone or not multiplies_floats() else BATCHES
        args = {**ARGS, **steps, "block_size": self.kind.page, "num_gpu_blocks_override": self.kind.pages, **self.kind.args}
        if tiers:
            page = page_bytes(self.kind)
            args |= {"kv_offloading_size": 1.3 * self.kind.pages * page / 2**30, "preemption_mode": "swap"}
            args |= {"kv_disk_path": str(self.path), "kv_disk_size": 40 * self.kind.pages * (page + 300) / 2**30}
        return LLM(self.model, **args)

    def ask_alone(self, llm: LLM, question: Question) -> Answer:
        question.send(llm, "alone", self.adapters)
        while True:
            for output in llm.llm_engine.step():
                if output.finished:
                    return answer_of(output)

    def run(self, faults: int) -> None:
        """Make at least this many faults."""
        with mock.patch.object(Speeds, "pays", lambda *_: True):  # also where computing is faster
            self._run(faults)

    def _run(self, faults: int) -> None:
        if self.kind.ranks > 1:
            self._run_ranks(faults)
            return
        self._make_foreign()
        injector = Faults(self.rng, self.counts)
        injector.foreign = sorted((self.directory / "foreign").glob("*/lane-*/*.kv"))
        with injector.writes(), mock.patch.object(disk_traffic, "READ_TIMEOUT_S", READ_TIMEOUT_S):
            llm = self.start()
            injector.attach(llm)
            target = self.counts.total() + faults
            while self.counts.total() < target:
                injector.on = True
                self.round(llm, injector)
                event = self.rounds % RESTART_ROUNDS
                if event in (8, 28):
                    llm = self._restart(llm, injector, kill=True)
                elif event == 40:
                    llm = self._restart(llm, injector, kill=False)
                elif event == 16:
                    shutil.rmtree(self.path)
                    self.counts["disk: directory deleted"] += 1
                    self.round(llm, injector)
                    llm = self._restart(llm, injector, kill=False)
            injector.on = False
            self._end(llm)
        if left := open_files(self.path):
            raise Problem(f"files are still open: {left}")

    def _restart(self, llm: LLM, injector: Faults, kill: bool) -> LLM:
        if kill:
            llm.reset_prefix_cache()  # so that there is something to write
            injector.writes_left = self.rng.randrange(1, 30)
            self.round(llm, injector)
        injector.on = False
        llm.close()
        injector.writes_left = None
        self.restarts += 1
        llm = self.start()
        injector.attach(llm)
        return llm

    def round(self, llm: LLM, injector: Faults | None) -> None:
        """Ask some questions at the same time, with faults and disturbances; compare the answers."""
        if injector is not None:
            injector.resume_writes()
        asked = {f"{self.rounds}-{i}": i for i in self.rng.sample(range(len(self.questions)), TOGETHER)}
        for name, i in asked.items():
            self.questions[i].send(llm, name, self.adapters)
        began, engine, self.rounds = time.monotonic(), llm.llm_engine, self.rounds + 1
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    self._compare(answer_of(output), asked.pop(output.request_id))
            self._disturb(llm, asked)
            if time.monotonic() - began > MAX_ROUND_S:
                raise Problem(f"requests hang: {sorted(asked)}")
        if asked:
            raise Problem(f"requests have no answer: {sorted(asked)}")
        self.check(llm)

    def _disturb(self, llm: LLM, asked: dict[str, int]) -> None:
        roster, event = llm.llm_engine.core.scheduler.roster, self.rng.random()  # type: ignore[attr-defined]
        event *= 8 if self.kind.alone else 1  # it has more steps
        if event < 0.01 and asked:
            name = self.rng.choice(sorted(asked))
            del asked[name]
            llm.llm_engine.abort_request(name)
            self.counts["abort"] += 1
        elif event < 0.06:
            for request in list(roster.running)[:: self.rng.choice((1, 2))]:
                roster.preempt(request)
                self.counts["preemption"] += 1
        elif event < 0.061:
            llm.reset_prefix_cache(reset_running_requests=True)
            self.counts["reset_prefix_cache"] += 1

    def _compare(self, answer: Answer, i: int) -> None:
        self.answers += 1
        if answer != self.right[i]:
            raise Problem(f"question {i} has another answer:\n{answer}\n{self.right[i]}\nfaults so far: {self.counts}")

    def check(self, llm: LLM) -> None:
        """Nothing is in use once all requests have ended."""
        core = llm.llm_engine.core
        scheduler, deadline = core.scheduler, time.monotonic() + MAX_ROUND_S  # type: ignore[attr-defined]
        while scheduler.arrivals.waits or core.has_unfinished:
            core.step()
            if time.monotonic() > deadline:
                raise Problem("pages never arrive")
        scheduler.roster.check()
        if scheduler.pool.free != scheduler.pool.pages:
            raise Problem(f"{scheduler.pool.pages - scheduler.pool.free} pages are in use without a request")
        pinned, storing = +scheduler.tier._pins, scheduler.tier._storing
        if pinned or storing:
            raise Problem(f"host records are in use without a request: {pinned}, {storing}")

    def _end(self, llm: LLM) -> None:
        """After a reset nothing is in host memory or on disk."""
        self.check(llm)
        if not llm.reset_prefix_cache():
            raise Problem("the prefix cache cannot be reset")
        tiers = llm.llm_engine.core.stats.tier  # type: ignore[attr-defined]
        if tiers.used or tiers.on_disk:
            raise Problem(f"{tiers.used} records are left in host memory and {tiers.on_disk} on disk")
        llm.close()
        # a file whose first bytes were damaged is none of Quire's any more
        left = [file for file in self.path.glob("*/lane-*/*.kv") if file.read_bytes()[:7] == b"QUIREKV"]
        if left:
            raise Problem(f"files are left: {left}")

    def _make_foreign(self) -> None:
        """Write the same questions' pages for another model, under the same secret: the names of records are equal."""
        path, own, model = self.directory / "foreign", self.path, self.model
        self.path, self.model = path, make_model(self.kind, self.directory / "other-model", 2)
        llm = self.start()
        for question in self.questions:
            self.ask_alone(llm, question)
        llm.close()
        self.path, self.model = own, model
        own.mkdir(mode=0o700, exist_ok=True)
        shutil.copy(path / "secret", own / "secret")

    def _run_ranks(self, faults: int) -> None:
        """Records of two ranks are damaged while no engine runs: files of one rank are also given to the other."""
        target = self.counts.total() + faults
        llm = self.start()
        while self.counts.total() < target:
            for question in self.questions:
                self.ask_alone(llm, question)
            self.check(llm)
            llm.close()
            shares = [sorted(lane.glob("*.kv")) for lane in sorted(self.path.glob("*/lane-*"))]
            for files, others in zip(shares, shares[::-1], strict=True):
                for path in files:
                    self._damage_all(path, others)
            self.restarts += 1
            llm = self.start()
            for i, question in enumerate(self.questions):
                self._compare(self.ask_alone(llm, question), i)
        self._end(llm)

    def _damage_all(self, path: Path, others: list[Path]) -> None:
        size, length = path.stat().st_size, HEADER_BYTES + page_bytes(self.kind) // self.kind.ranks
        for position in range(0, size - length + 1, length):
            if self.rng.random() < 0.7:
                damage_file(path, position, length, size, self.rng, self.counts, others, cut=False)


def answer_of(output: Any) -> Answer:
    [completion] = output.outputs
    each = zip(completion.token_ids, completion.logprobs, strict=True)
    return [(token, sorted((i, entry.logprob) for i, entry in scores.items())) for token, scores in each]


def exact_attention() -> Any:
    """Let the C kernel attend wherever there are kernels for floats: then no sum depends on the other tokens of a step."""
    return mock.patch("quire.attn.cpu.run_decoders", multiplies_floats)


def open_files(directory: Path) -> list[str]:
    gc.collect()  # a fault that ended a write is kept with its frames
    files = [str(file.readlink()) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    return [file for file in files if file.startswith(str(directory))]


def page_bytes(kind: Kind) -> int:
    sizes = SIZES | kind.changes
    if "kv_lora_rank" in sizes:
        return kind.page * sizes["num_hidden_layers"] * (sizes["kv_lora_rank"] + sizes["qk_rope_head_dim"]) * 4
    head = sizes["hidden_size"] // sizes["num_attention_heads"]
    return kind.page * sizes["num_hidden_layers"] * sizes["num_key_value_heads"] * 2 * head * 4


def make_model(kind: Kind, directory: Path, seed: int) -> str:
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind.config}Config")(**SIZES | kind.changes)
    getattr(transformers, f"{kind.config}ForCausalLM")(config).float().save_pretrained(directory)
    return str(directory)


def make_adapter(directory: Path, number: int) -> str:
    from safetensors.torch import save_file

    directory.mkdir()
    generator, size, tensors = torch.Generator().manual_seed(number), SIZES["hidden_size"], {}
    for layer in range(SIZES["num_hidden_layers"]):  # type: ignore[call-overload]
        name = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(4, size, generator=generator)  # type: ignore[call-overload]
        tensors[f"{name}.lora_B.weight"] = torch.randn(size, 4, generator=generator)  # type: ignore[call-overload]
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["o_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "adapter_model.safetensors")
    return str(directory)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    options = parser.parse_args()
    total, answers, problems = Counter[str](), 0, 0
    weights = {name: 1 if KINDS[name].alone else 3 for name in options.kinds}
    for name in options.kinds:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as directory, exact_attention():
            trial = Trial(name, Path(directory), options.seed)
            try:
                trial.run(-(-options.faults * weights[name] // sum(weights.values())))
            except Problem as problem:
                problems += 1
                print(f"{name}: {problem}")
        print(
            f"{name:20} {trial.counts.total():7} faults, {trial.answers:6} answers compared, {trial.restarts:4} restarts, "
            f"{time.monotonic() - began:6.1f} s", flush=True,
        )  # fmt: skip
        total += trial.counts
        answers += trial.answers
    for kind, count in sorted(total.items()):
        print(f"  {kind:28} {count:7}")
    print(f"{total.total()} faults, {answers} answers compared, {problems} problems")
    return int(problems > 0)


if __name__ == "__main__":
    sys.exit(main())
