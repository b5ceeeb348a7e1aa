"""Speculation on texts that repeat themselves: how many drafts are right, and what it brings.

    python benchmarks/speculation.py --method ngram suffix --together 1 4

Every prompt of `prompts/` is answered by SmolLM2, greedily, without and with each method in turn, and
the answers are compared: they have to be the same. Beside the time on the clock, for which the machine has to be
quiet, that of the process's threads is compared: who else is busy hardly changes it.

    python benchmarks/speculation.py --shape [--together 1 4 16 64 256] [--rates 0 0.3 0.7]

Llama-8B's shape with random weights, for a GPU: what a step with drafts costs, and what drafts bring that are right so
often. Since random weights say nothing twice, it is made up which drafts were right; everything else is as it is.
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
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--method", nargs="+", choices=[name for name in METHODS if name != "off"], default=["ngram", "suffix"])
    parser.add_argument("--together", type=int, nargs="+", default=[1], help="requests at a time")
    parser.add_argument("--tokens", type=int, default=96, help="most tokens of an answer")
    parser.add_argument("--always", action="store_true", help="all drafts that there are, also where they do not pay")
    parser.add_argument("--shape", action="store_true", help="Llama-8B's, with random weights")
    parser.add_argument("--layers", type=int, default=32, help="of that shape")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.0, 0.3, 0.7], help="how often a draft is right")
    options = parser.parse_args()
    if options.shape:
        run_shape(options.together, options.rates, options.tokens, options.layers)
        return
    print("| set | together | method | tokens/s | by the clock | by CPU time | drafts right | tokens per row with drafts |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    llms = {name: open_method(options.model, name, options) for name in ("off", *options.method)}
    for name in SETS:
        for together in options.together:
            compare(llms, name, together, options.tokens)
    for llm in llms.values():
        llm.llm_engine.shutdown()


def open_method(model: str, method: str, options: argparse.Namespace) -> LLM:
    asked = METHODS[method]
    return LLM(model, speculative_config=asked and {**asked, "adaptive": not options.always}, max_num_seqs=8)


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
            first = np.cumsum(result.lengths) - result.lengths
            for row in np.flatnonzero(plan.sample & (plan.drafts == 0)).tolist() if self.rate else ():
                if self._dice.random() < self.rate:
                    result.ids[first[row]] = plan.end[row] % 1000
            return result

        flight.StepFlight._read = pretend

    def __call__(self, plan, ids, _fault, _told):
        first = np.flatnonzero(np.diff(plan.draw_row, prepend=-1))
        drafts, lengths, at = plan.drafts[plan.sample].tolist(), [], 0
        for begin, count in zip(first.tolist(), drafts, strict=True):
            right = 0
            while right < count and self._dice.random() < self.rate:
                right += 1
            ids[begin : begin + right] = plan.draft_token[at : at + right]
            at += count
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


def compare(llms: dict[str, LLM], name: str, together: int, tokens: int) -> None:
    """Some prompts by one method, the same by the next, and so on."""
    prompts = json.loads((Path(__file__).parent / "prompts" / f"{name}.json").read_text())
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=tokens)
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
