"""Stream a chat from a server with OpenAI's client. Start the server first: quire serve smollm2"""

import argparse

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", help="default: the model that the server has")
    args = parser.parse_args()
    with OpenAI(base_url=args.url, api_key="unused") as client:
        model = args.model or client.models.list().data[0].id
        messages = [{"role": "user", "content": "Why is the sky blue?"}]
        for chunk in client.chat.completions.create(model=model, messages=messages, max_tokens=64, stream=True):
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
