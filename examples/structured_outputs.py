"""Make answers follow a JSON schema, a pattern, or a list of choices."""

import argparse
import json

from quire import LLM, SamplingParams, StructuredOutputsParams

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", help="a directory, a hub id, a .gguf file, or smollm2")
    args = parser.parse_args()
    cases = {
        "A person as JSON: ": StructuredOutputsParams(json=PERSON, disable_any_whitespace=True),
        "A date of the year 2026: ": StructuredOutputsParams(regex=r"2026-(0[1-9]|1[0-2])-(0[1-9]|1\d|2[0-8])"),
        "'I love this book' is ": StructuredOutputsParams(choice=["positive", "negative"]),
    }
    params = [SamplingParams(temperature=0, max_tokens=100, structured_outputs=form) for form in cases.values()]
    with LLM(args.model) as llm:
        outputs = llm.generate(list(cases), params, use_tqdm=False)
    for output in outputs:
        print(output.prompt, output.outputs[0].text)
    print("parsed:", json.loads(outputs[0].outputs[0].text))


if __name__ == "__main__":
    main()
