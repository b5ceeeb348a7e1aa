"""What structured outputs cost: time per output token with and without a grammar, in one process and in turns.

    python benchmarks/structured.py smollm2 --batches 1 16 64 --tokens 48 --rounds 5

free     no grammar
string   a JSON string that does not end: every token is sampled under a mask that changes
objects  a JSON array of records: keys and punctuation leave no choice, and are taken without sampling

Printed are medians over the rounds, each round having run all of them one after the other: milliseconds per output token by the
clock and of processor time in this process, and the ratios to free text. On a busy machine only the latter means something.
"""

import argparse
import json
import statistics
import time

from quire import LLM, SamplingParams, StructuredOutputsParams

PROMPT = "Write a list of people with their names, ages and home towns as JSON.\n"
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "home_town": {"type": "string", "maxLength": 30},
        "profession": {"enum": ["baker", "teacher", "engineer", "painter"]},
    },
    "required": ["name", "age", "home_town", "profession"],
    "additionalProperties": False,
}
GRAMMARS = {
    "free": None,
    "string": {"type": "string", "minLength": 5000},
    "objects": {"type": "array", "items": RECORD, "minItems": 100},
}


def run(llm: LLM, schema: dict | None, batch: int, tokens: int, seed: int) -> tuple[float, float]:
    """Seconds per output token of one request, by the clock and of processor time: all begin together and are as long."""
    params = [
        SamplingParams(
            temperature=1.0,
            seed=seed + i,
            max_tokens=tokens,
            ignore_eos=True,
            structured_outputs=None if schema is None else StructuredOutputsParams(json=schema),
        )
        for i in range(batch)
    ]
    llm.reset_prefix_cache()
    begun = time.perf_counter(), time.process_time()
    outputs = llm.generate([PROMPT] * batch, params, use_tqdm=False)
    ended = time.perf_counter(), time.process_time()
    assert all(len(output.outputs[0].token_ids) == tokens for output in outputs)
    return (ended[0] - begun[0]) / tokens, (ended[1] - begun[1]) / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--load-format", default="auto", help="dummy: random weights")
    args = parser.parse_args()
    llm = LLM(args.model, max_model_len=2048, load_format=args.load_format)
    for batch in args.batches:
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in GRAMMARS}
        for turn in range(args.rounds + 1):
            for name, schema in GRAMMARS.items():
                seconds = run(llm, schema, batch, args.tokens, turn)
                if turn:  # the first is for warming up
                    times[name].append(seconds)
        row: dict[str, float] = {"batch": batch}
        for i, clock in enumerate(("wall", "cpu")):
            for name, seen in times.items():
                row[f"{name}_{clock}_ms"] = round(1000 * statistics.median(one[i] for one in seen), 2)
                ratios = [mine[i] / free[i] for mine, free in zip(seen, times["free"], strict=True)]
                row[f"{name}_{clock}_ratio"] = round(statistics.median(ratios), 3)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
