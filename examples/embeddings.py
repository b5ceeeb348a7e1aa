"""Find the document that is most like a question, by the cosine of their vectors."""

import argparse

import numpy as np

from quire import LLM

QUESTION = "What is the capital of France?"
DOCUMENTS = ["Paris is the capital of France.", "Bread is baked in an oven.", "The sea is deep."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", default="sentence-transformers/all-MiniLM-L6-v2", help="a directory, a hub id or a .gguf file"
    )
    args = parser.parse_args()
    with LLM(args.model, runner="pooling") as llm:
        question, *documents = (output.outputs.embedding for output in llm.embed([QUESTION, *DOCUMENTS], use_tqdm=False))
    scores = np.array(documents) @ np.array(question)  # vectors have length 1
    for score, text in sorted(zip(scores, DOCUMENTS, strict=True), reverse=True):
        print(f"{score:.3f}  {text}")


if __name__ == "__main__":
    main()
