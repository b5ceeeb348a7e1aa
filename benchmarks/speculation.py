"""Speculation on texts that repeat themselves: how many drafts are right, and what it brings.

    python benchmarks/speculation.py --method ngram suffix --together 1 4

Every prompt of `prompts/` is answered by SmolLM2, greedily, without and with each method in turn, and
the answers are compared: they have to be the same. Beside the time on the clock, for which the machine has to be
quiet, that of the process's threads is compared: who else is busy hardly changes it.

    python benchmarks/speculation.py --method draft --first-layers 20
    python benchmarks/speculation.py --model BIG.gguf --method draft --draft SMALL.gguf

A draft model: the model's own first layers (a GGUF file's, for which the package gguf is needed), or another; if its vocabulary
is another, too, it drafts by text.

    python benchmarks/speculation.py --shape [--together 1 4 16 64 256] [--rates 0 0.3 0.7]

Llama-8B's shape with random weights, for a GPU: what a step with drafts costs, and what drafts bring that are right so
often. Since random weights say nothing twice, it is made up which drafts were right; everything else is as it is.

    python benchmarks/speculation.py --shape CONFIG --draft-shape CONFIG

The same of a draft model, both of the shapes that these directories' config.json say (the draft with the other's vocabulary).
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

import numpy as np

from quire import LLM, SamplingParams
from quire.runner import flight

SETS = ("editing", "summarizing")
METHODS = {
    "off": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
    "suffix": {"method": "suffix", "num_speculative_tokens": 8},
    "draft": {"method": "draft_model"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--method", nargs="+", choices=[name for name in METHODS if name != "off"], default=["ngram", "suffix"])
    parser.add_argument("--together", type=int, nargs="+", default=[1], help="requests at a time")
    parser.add_argument("--tokens", type=int, default=96, help="most tokens of an answer")
    parser.add_argument("--always", action="store_true", help="all drafts that there are, also where they do not pay")
    parser.add_argument("--prompts", type=int, default=None, help="of each set, that many")
    parser.add_argument("--draft", help="a model that drafts")
    parser.add_argument("--drafts", type=int, default=4, help="of that model, at most")
    parser.add_argument("--first-layers", type=int, help="so many of the model's own layers are the one that drafts")
    parser.add_argument("--shape", nargs="?", const="", help="Llama-8B's or a directory's, with random weights")
    parser.add_argument("--draft-shape", help="a directory's: of a model that drafts, with random weights")
    parser.add_argument("--layers", type=int, default=32, help="of that shape")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.0, 0.3, 0.7], help="how often a draft is right")
    options = parser.parse_args()
    if options.draft_shape is not None:
        run_draft_shape(options.shape, options.draft_shape, options.together, options.rates, options.tokens, options.drafts)
        return
    if options.shape is not None:
        run_shape(options.together, options.rates, options.tokens, options.layers)
        return
    print("| set | together | method | tokens/s | by the clock | by CPU time | drafts right | tokens per row with drafts |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        if options.first_layers is not None:
            options.draft = first_layers(options.model, options.first_layers, f"{folder}/first.gguf")
        llms = {name: open_method(options.model, name, options) for name in ("off", *options.method)}
        for name in SETS:
            for together in options.together:
                compare(llms, name, together, options)
        for llm in llms.values():
            llm.llm_engine.shutdown()


def open_method(model: str, method: str, options: argparse.Namespace) -> LLM:
    asked = METHODS[method]
    if method == "draft":
        asked = {**asked, "model": options.draft, "num_speculative_tokens": options.drafts}
    limits = {"max_num_seqs": 8, "max_model_len": 2048}
    return LLM(model, speculative_config=asked and {**asked, "adaptive": not options.always}, **limits)


def first_layers(model: str, count: int, path: str) -> str:
    """The model's first layers, with its embeddings, last norm and head, as they are."""
    import gguf

    from quire.files.resolve import resolve_model

    reader = gguf.GGUFReader(resolve_model(model).path)
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    writer = gguf.GGUFWriter(path, fields["general.architecture"].contents())
    for name, field in fields.items():
        if name != "general.architecture":
            value = count if name.endswith(".block_count") else field.contents()
            writer.add_key_value(name, value, field.types[0], field.types[-1] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        _, _, rest = tensor.name.partition("blk.")
        if not rest or int(rest.partition(".")[0]) < count:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class Guessing:
    """Guesses something, whatever the text is."""

    def propose(self, text, most: int) -> list[int]:
        return [(len(text.tokens) + i) % 1000 for i in range(most)]


class Pretended:
    """Of the drafts, the first few were right, and so were guesses that were not run; how many is a matter of chance."""

    def __init__(self) -> None:
        self.rate, self._dice = 0.0, random.Random(0)
        flight.accept_told, read = self, flight.StepFlight._read

        def pretend(flying: flight.StepFlight) -> object:
            result, plan = read(flying), flying._plan
            rows = [i for i, (sample, drafts) in enumerate(plan.shapes.each) if sample and not drafts] if self.rate else []
            first = np.cumsum(result.lengths) - result.lengths if rows else ()
            for row in rows:
                if self._dice.random() < self.rate:
                    result.ids[first[row]] = plan.end[row] % 1000
            return result

        flight.StepFlight._read = pretend

    def __call__(self, plan, ids, _fault, told):
        lengths, begin, at = [], 0, 0
        for (sample, drafts), end in zip(plan.shapes.each, plan.end.tolist(), strict=True):
            right = 0
            while right < drafts and self._dice.random() < self.rate:
                right += 1
            if right:
                ids[begin : begin + right] = told[at : at + right]
            if drafts and right == drafts and self._dice.random() < self.rate:  # so would have been the next guess
                ids[begin + drafts] = end % 1000
            begin, at = begin + (1 + drafts if sample else 0), at + drafts
            if sample:
                lengths.append(1 + right)
        return np.array(lengths)


def run_shape(together: list[int], rates: list[float], tokens: int, layers: int) -> None:
    from adapters import CONFIG

    pretended = Pretended()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
        llm = LLM(
            folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=4096, max_num_seqs=max(together),
            enable_prefix_caching=False,
            speculative_config={"method": "custom_class", "model": "__main__:Guessing", "num_speculative_tokens": 8},
        )  # fmt: skip
    core, speculation = llm.llm_engine.core, llm.llm_engine.core.scheduler.speculation

    def pace(requests: int, rate: float, drafts: int, adaptive: bool) -> tuple[float, float]:
        """Tokens per second, and steps per second, of so many requests at a time."""
        pretended.rate, speculation.most, speculation._adaptive = rate, drafts, adaptive
        speculation.waits = False
        prompts = [{"prompt_token_ids": [10 + (7 * i + j) % 1000 for j in range(128)]} for i in range(requests)]
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        best = 0.0, 0.0
        for _ in range(2):  # the first one records graphs
            began, steps = time.monotonic(), core.scheduler._step
            llm.generate(prompts, params, use_tqdm=False)
            seconds = time.monotonic() - began
            best = max(best, (requests * tokens / seconds, (core.scheduler._step - steps) / seconds))
        return best

    plain = {requests: pace(requests, 0.0, 0, False) for requests in together}
    one = plain[together[0]][1]
    print(f"a step of {together[0]}: {1e3 / one:.3f} ms")
    for drafts in (4, 8):
        steps = pace(together[0], 0.0, drafts, False)[1]
        print(f"with {drafts} drafts each, all wrong: {1e3 / steps:.3f} ms, {one / steps:.3f} x")
    for drafts in (4, 8):
        reached = pace(together[0], 0.7, drafts, False)[0]
        print(
            f"with {drafts} drafts, each right 7 times of 10: {reached:.1f} tokens/s, {reached / plain[together[0]][0]:.2f} x"
        )
    print("\n| together | off, tokens/s | " + " | ".join(f"{rate:g} right" for rate in rates) + " |")
    print("|---|---|" + "---|" * len(rates))
    for requests in together:
        reached = [pace(requests, rate, 4, True)[0] / plain[requests][0] for rate in rates]
        print(
            f"| {requests} | {plain[requests][0]:.0f} | " + " | ".join(f"{each:.2f} x" for each in reached) + " |", flush=True
        )


def run_draft_shape(shape: str, draft: str, together: list[int], rates: list[float], tokens: int, drafts: int) -> None:
    """Of one process: the same engine without drafts, with all there may be, and with as many as pay."""
    pretended = Pretended()
    with tempfile.TemporaryDirectory() as folder:
        config = json.loads((Path(shape) / "config.json").read_text())
        for name, source in (("model", shape), ("draft", draft)):
            (Path(folder) / name).mkdir()
            told = json.loads((Path(source) / "config.json").read_text()) | {"vocab_size": config["vocab_size"]}
            (Path(folder) / name / "config.json").write_text(json.dumps(told))
        llm = LLM(
            f"{folder}/model", load_format="dummy", skip_tokenizer_init=True, max_model_len=4096, max_num_seqs=max(together),
            enable_prefix_caching=False, speculative_config={"model": f"{folder}/draft", "num_speculative_tokens": drafts},
        )  # fmt: skip
    core, speculation = llm.llm_engine.core, llm.llm_engine.core.scheduler.speculation

    def pace(requests: int, rate: float, most: int, adaptive: bool, turns: int = 2) -> tuple[float, float]:
        """Tokens per second, and steps per second, of so many requests at a time."""
        pretended.rate, speculation.most, speculation._adaptive = rate, most, adaptive
        prompts = [{"prompt_token_ids": [10 + (7 * i + j) % 1000 for j in range(128)]} for i in range(requests)]
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        best = 0.0, 0.0
        for _ in range(turns):  # the first one records graphs, or learns
            began, steps = time.monotonic(), core.scheduler._step
            llm.generate(prompts, params, use_tqdm=False)
            seconds = time.monotonic() - began
            best = max(best, (requests * tokens / seconds, (core.scheduler._step - steps) / seconds))
        return best

    print(
        "| together | off, tokens/s (ms a step) | drafts | ms a step with them | " + " | ".join(f"{r:g} right" for r in rates),
        "|",
    )
    print("|---|---|---|---|" + "---|" * len(rates), flush=True)
    for requests in together:
        plain = pace(requests, 0.0, 0, False)
        off = f"{requests} | {plain[0]:.0f} ({1e3 / plain[1]:.2f})"
        for most in (drafts, 1):
            cycle = 1e3 / pace(requests, 0.0, most, False)[1]
            reached = [pace(requests, rate, most, False, 1)[0] / plain[0] for rate in rates]
            told = " | ".join(f"{each:.2f} x" for each in reached)
            print(f"| {off} | {most} | {cycle:.2f} | {told} |", flush=True)
        told = " | ".join(f"{pace(requests, rate, drafts, True)[0] / plain[0]:.2f} x" for rate in rates)
        print(f"| {off} | as many as pay | – | {told} |", flush=True)


def compare(llms: dict[str, LLM], name: str, together: int, options: argparse.Namespace) -> None:
    """Some prompts by one method, the same by the next, and so on."""
    prompts = json.loads((Path(__file__).parent / "prompts" / f"{name}.json").read_text())[: options.prompts]
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=options.tokens)
    before = {method: llm.llm_engine.core.stats.drafts for method, llm in llms.items()}
    clock, busy, count = dict.fromkeys(llms, 0.0), dict.fromkeys(llms, 0.0), 0
    for llm in llms.values():
        llm.reset_prefix_cache()
    for first in range(0, len(chats), together):
        answers: dict[str, list[list[int]]] = {}
        for method, llm in llms.items():
            began, began_busy = time.monotonic(), time.process_time()
            outputs = llm.chat(chats[first : first + together], params, use_tqdm=False)
            clock[method] += time.monotonic() - began
            busy[method] += time.process_time() - began_busy
            answers[method] = [list(output.outputs[0].token_ids) for output in outputs]
            if answers[method] != answers["off"]:
                raise SystemExit(f"{method} changed an answer of {name}")
        count += sum(map(len, answers["off"]))
    for method, llm in llms.items():
        after = llm.llm_engine.core.stats.drafts
        rows, drafted, right = (getattr(after, what) - getattr(before[method], what) for what in ("rows", "tokens", "accepted"))
        told = f"{right} of {drafted} | {1 + right / rows:.2f}" if rows else "– | –"
        times = f"{clock['off'] / clock[method]:.2f} x | {busy['off'] / busy[method]:.2f} x"
        print(f"| {name} | {together} | {method} | {count / clock[method]:.1f} | {times} | {told} |", flush=True)


if __name__ == "__main__":
    main()
