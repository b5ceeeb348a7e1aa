"""Answer the rows of a Ray dataset, with a model in each actor."""

import argparse

from quire import LLM, SamplingParams

try:
    import ray.data
except ImportError as error:
    raise SystemExit(f"Ray Data is missing: {error}. Run pip install 'ray[data]'.") from None


class Answers:
    """An actor: the model stays loaded between batches."""

    def __init__(self, model: str) -> None:
        self._llm = LLM(model)
        self._params = SamplingParams(temperature=0, max_tokens=32)

    def __call__(self, batch):
        outputs = self._llm.generate(list(batch["prompt"]), self._params, use_tqdm=False)
        batch["answer"] = [output.outputs[0].text for output in outputs]
        return batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", help="a directory, a hub id, a .gguf file, or smollm2")
    parser.add_argument("--actors", type=int, default=1, help="models that are loaded at the same time")
    args = parser.parse_args()
    rows = ray.data.from_items([{"prompt": f"{number} and {number} is"} for number in range(8)])
    answered = rows.map_batches(
        Answers, fn_constructor_args=(args.model,), batch_size=4, compute=ray.data.ActorPoolStrategy(size=args.actors)
    )
    for row in answered.take_all():
        print(repr(row["prompt"]), "->", repr(row["answer"]))


if __name__ == "__main__":
    main()
