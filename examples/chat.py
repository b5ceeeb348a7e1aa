"""Hold a conversation with a model in this process: each answer becomes part of the next question."""

import argparse

from quire import LLM, SamplingParams

QUESTIONS = ["What is the capital of France?", "And how many people live there?"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", help="a directory, a hub id, a .gguf file, or smollm2")
    args = parser.parse_args()
    params = SamplingParams(temperature=0, max_tokens=64)
    messages = [{"role": "system", "content": "Answer in one sentence."}]
    with LLM(args.model) as llm:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            [output] = llm.chat(messages, params, use_tqdm=False)
            answer = output.outputs[0].text
            messages.append({"role": "assistant", "content": answer})
            print(f"Q: {question}\nA: {answer}")


if __name__ == "__main__":
    main()
