"""Pooling parameters are checked when they are made, and outputs read as vLLM's do."""

import numpy as np
import pytest

from quire import EmbeddingRequestOutput, PoolingOutput, PoolingParams, PoolingRequestOutput, ScoringRequestOutput
from quire.types.errors import InvalidParameter, RequestError


@pytest.mark.parametrize(
    "values, field",
    [
        ({"dimensions": 0}, "dimensions"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"use_activation": "yes"}, "use_activation"),
        ({"normalize": True, "use_activation": False}, "normalize"),
        ({"task": "generate"}, "task"),
        ({"step_tag_id": -1}, "step_tag_id"),
        ({"returned_token_ids": (1,)}, "returned_token_ids"),
        ({"extra_kwargs": {"a": 1}}, "extra_kwargs"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(values, field):
    with pytest.raises(InvalidParameter, match=field) as caught:
        PoolingParams(**values)
    assert caught.value.parameter == field


def test_outputs_are_made_from_values():
    done = PoolingRequestOutput("a", PoolingOutput(np.array([0.5, 0.25], np.float32)), [1, 2], num_cached_tokens=1)
    embedded = EmbeddingRequestOutput.from_base(done)
    assert isinstance(embedded, EmbeddingRequestOutput) and embedded.outputs.embedding == [0.5, 0.25]
    assert embedded.outputs.hidden_size == 2 and embedded.prompt_token_ids == [1, 2] and embedded.num_cached_tokens == 1
    with pytest.raises(RequestError, match="one value"):
        ScoringRequestOutput.from_base(done)
    done.outputs = PoolingOutput(np.array([0.5], np.float32))
    assert ScoringRequestOutput.from_base(done).outputs.score == 0.5
