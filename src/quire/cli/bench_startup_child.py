"""One start, in its own process: `python -m quire.cli.bench_startup_child` with the engine's arguments as JSON on its input.

Prints one line of JSON: when the engine was ready and when the first token was there, by the machine's clock, and the parts of
the start as far as the engine tells them.
"""

import json
import sys
import time


def main() -> None:
    asked = json.load(sys.stdin)
    from quire.config.args import EngineArgs
    from quire.llm import LLM
    from quire.types.sampling import SamplingParams

    llm = LLM.from_engine_args(EngineArgs(**asked["engine"]))
    ready = time.monotonic()
    vocab_size = llm.llm_engine.config.facts.vocab_size
    prompt = [1 + i % (vocab_size - 1) for i in range(asked["input_len"])]
    llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True), use_tqdm=False)
    first_token = time.monotonic()
    timeline = getattr(llm.llm_engine, "timeline", None)
    parts = [] if timeline is None else timeline.parts
    print(json.dumps({"ready": ready, "first_token": first_token, "parts": parts}), flush=True)


if __name__ == "__main__":
    main()
