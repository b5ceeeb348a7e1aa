"""Send a file of requests to a server and fetch the answers. Start the server first: quire serve smollm2 --batch-dir batches

Without a server, `quire run-batch` answers such a file.
"""

import argparse
import json
import time

from openai import OpenAI

QUESTIONS = {"france": "What is the capital of France?", "italy": "What is the capital of Italy?"}
ENDPOINT = "/v1/chat/completions"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", help="default: the model that the server has")
    args = parser.parse_args()
    with OpenAI(base_url=args.url, api_key="unused") as client:
        model = args.model or client.models.list().data[0].id
        bodies = {
            name: {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 32}
            for name, text in QUESTIONS.items()
        }
        lines = [{"custom_id": name, "method": "POST", "url": ENDPOINT, "body": body} for name, body in bodies.items()]
        file = client.files.create(file=("requests.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h")
        while batch.status in ("validating", "in_progress", "finalizing"):
            time.sleep(0.2)
            batch = client.batches.retrieve(batch.id)
        if batch.output_file_id is None:
            raise SystemExit(f"the batch is {batch.status}: {batch.errors}")
        for line in client.files.content(batch.output_file_id).text.splitlines():
            answer = json.loads(line)
            print(f"{answer['custom_id']}: {answer['response']['body']['choices'][0]['message']['content']}")


if __name__ == "__main__":
    main()
