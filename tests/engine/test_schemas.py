"""Schemas of growing difficulty on the default model at temperature 1: whatever is complete is valid.

QUIRE_SCHEMAS says how many (12 unless told; 300 take ten minutes).
"""

import json
import os

import jsonschema
import pytest

from quire import LLM, SamplingParams, StructuredOutputsParams
from structured_schemas import make_schemas

pytestmark = pytest.mark.model
COUNT = int(os.environ.get("QUIRE_SCHEMAS", "12"))
MAX_TOKENS = 400 if COUNT > 12 else 150


def test_complete_answers_are_valid():
    room = 1400 << 20 if COUNT > 12 else 256 << 20  # with less, many would be preempted again and again
    settings = {"max_model_len": 1024, "max_num_seqs": 64, "kv_cache_memory_bytes": room}
    llm = LLM("smollm2", device="cpu", dtype="float32", **settings)  # packed weights: every step might dequantize them
    schemas = make_schemas(COUNT)
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=MAX_TOKENS, structured_outputs=StructuredOutputsParams(json=schema))
        for i, schema in enumerate(schemas)
    ]
    complete = 0
    for schema, output in zip(
        schemas, llm.generate(["Here is an example in JSON:\n"] * COUNT, params, use_tqdm=False), strict=True
    ):
        answer = output.outputs[0]
        assert answer.finish_reason in ("stop", "length"), (schema, answer)
        if answer.finish_reason == "stop":
            jsonschema.validate(json.loads(answer.text), schema)
            complete += 1
    print(f"{complete} of {COUNT} answers are complete within {MAX_TOKENS} tokens, and valid")
    assert complete >= COUNT // 3
