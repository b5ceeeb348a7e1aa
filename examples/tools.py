"""Let a model call a function, and answer with its result. Start the server first: quire serve smollm2"""

import argparse
import json

from openai import OpenAI

TEMPERATURES = {"Oslo": 4, "Paris": 17, "Rome": 24}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_temperature",
        "description": "The temperature in a city, in degrees Celsius",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": sorted(TEMPERATURES)}},
            "required": ["city"],
        },
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", help="default: the model that the server has")
    args = parser.parse_args()
    messages = [{"role": "user", "content": "How warm is it in Paris?"}]
    with OpenAI(base_url=args.url, api_key="unused") as client:
        model = args.model or client.models.list().data[0].id
        # "required": also models that were not trained for tools write a valid call
        asked = client.chat.completions.create(
            model=model, messages=messages, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=100
        )
        [call] = asked.choices[0].message.tool_calls
        city = json.loads(call.function.arguments)["city"]
        print(f"{call.function.name}({city!r}) = {TEMPERATURES[city]}")
        messages += [
            {"role": "assistant", "tool_calls": [call.model_dump()]},
            {"role": "tool", "tool_call_id": call.id, "content": str(TEMPERATURES[city])},
        ]
        told = client.chat.completions.create(model=model, messages=messages, tools=[TOOL], tool_choice="none", max_tokens=64)
        print(told.choices[0].message.content)


if __name__ == "__main__":
    main()
