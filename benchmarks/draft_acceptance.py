"""Measures how many draft tokens of a draft model are accepted, greedy and sampled.

    python benchmarks/draft_acceptance.py TARGET DRAFT [--tokens 64] [--seeds 2] [--drafts 3]

Three chat prompts are answered per setting, sampled ones once per seed. Every step runs all drafts (`adaptive` is off).
"""

import argparse

from quire import LLM, SamplingParams

PROMPTS = (
    "Write a Python function that reverses a linked list.",
    "Explain in two sentences what a hash table is.",
    "List the months of the year with their number of days.",
)
SETTINGS = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {"temperature": 1.0},
    "temperature 0.7, top_p 0.9": {"temperature": 0.7, "top_p": 0.9},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer, at most")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--drafts", type=int, default=3, help="draft tokens per step")
    args = parser.parse_args()
    drafts = {"model": args.draft, "num_speculative_tokens": args.drafts, "adaptive": False}
    llm = LLM(args.target, max_model_len=512, kv_cache_memory_bytes=256 << 20, speculative_config=drafts)
    for name, setting in SETTINGS.items():
        drafted = accepted = steps = 0
        for seed in range(args.seeds if setting["temperature"] else 1):
            params = SamplingParams(max_tokens=args.tokens, seed=seed, **setting)
            for output in llm.chat([[{"role": "user", "content": prompt}] for prompt in PROMPTS], params, use_tqdm=False):
                assert output.metrics is not None
                drafted += output.metrics.num_draft_tokens
                accepted += output.metrics.num_accepted_draft_tokens
                steps += output.metrics.num_spec_steps
        rate, length = accepted / drafted, 1 + accepted / steps
        print(f"{name}: {accepted} of {drafted} accepted ({rate:.1%}), {length:.2f} tokens per step")


if __name__ == "__main__":
    main()
