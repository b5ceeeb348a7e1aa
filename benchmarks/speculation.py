"""Speculation on texts that repeat themselves: how many drafts are right, and what it brings.

    python benchmarks/speculation.py --method ngram suffix --together 1 4

Every prompt of `prompts/` is answered by SmolLM2, greedily, without and with each method, and
the answers are compared: they have to be the same. For speeds the machine has to be quiet.
"""

import argparse
import json
import time
from pathlib import Path

from quire import LLM, SamplingParams

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
    options = parser.parse_args()
    print("| set | together | method | tokens/s | drafts right | tokens per row with drafts |\n|---|---|---|---|---|---|")
    plain: dict[tuple[str, int], list[list[int]]] = {}
    for method in ("off", *options.method):
        asked = METHODS[method]
        llm = LLM(options.model, speculative_config=asked and {**asked, "adaptive": not options.always})
        for name in SETS:
            for together in options.together:
                answers = run(llm, name, together, options.tokens, method)
                if plain.setdefault((name, together), answers) != answers:
                    raise SystemExit(f"{method} changed an answer of {name}")
        llm.llm_engine.shutdown()


def run(llm: LLM, name: str, together: int, tokens: int, method: str) -> list[list[int]]:
    prompts = json.loads((Path(__file__).parent / "prompts" / f"{name}.json").read_text())
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=tokens)
    llm.reset_prefix_cache()
    before, began, answers = llm.llm_engine.core.stats.drafts, time.monotonic(), []
    for first in range(0, len(chats), together):
        answers += [output.outputs[0].token_ids for output in llm.chat(chats[first : first + together], params, use_tqdm=False)]
    seconds = time.monotonic() - began
    after = llm.llm_engine.core.stats.drafts
    rows, drafted, right = after.rows - before.rows, after.tokens - before.tokens, after.accepted - before.accepted
    told = f"{right} of {drafted} | {1 + right / rows:.2f}" if rows else "– | –"
    print(f"| {name} | {together} | {method} | {sum(map(len, answers)) / seconds:.1f} | {told} |", flush=True)
    return [list(answer) for answer in answers]


if __name__ == "__main__":
    main()
