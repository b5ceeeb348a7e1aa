"""Complete prompts with a model in this process."""

import argparse

from quire import LLM, SamplingParams

PROMPTS = ["Hello, my name is", "The capital of France is", "The best thing about books is"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", help="a directory, a hub id, a .gguf file, or smollm2")
    args = parser.parse_args()
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=32, seed=1)
    with LLM(args.model) as llm:
        for output in llm.generate(PROMPTS, params):  # one call: the engine batches them
            print(repr(output.prompt), "->", repr(output.outputs[0].text))


if __name__ == "__main__":
    main()
