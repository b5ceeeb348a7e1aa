"""An IO processor of pooling models: which of some texts is nearest to a query.

{"data": {"query": ..., "texts": [...]}} -> {"data": {"nearest": ..., "similarity": ...}}
"""

from collections.abc import Sequence
from typing import Any

from quire.features.pooling.io_processor import IOProcessor
from quire.types.pooling import PoolingOutput, PoolingParams, PoolingRequestOutput


class Nearest(IOProcessor[dict[str, Any], dict[str, Any]]):
    def parse_data(self, data: Any) -> dict[str, Any]:
        if not isinstance(data, dict) or not isinstance(data.get("query"), str) or not data.get("texts"):
            raise ValueError('it must be an object {"query": text, "texts": [text, ...]}')
        return data

    def merge_pooling_params(self, params: PoolingParams | None = None) -> PoolingParams:
        return PoolingParams(task="embed", use_activation=True)

    def pre_process(self, prompt: dict[str, Any], request_id: str | None = None, **kwargs: Any) -> list[str]:
        return [prompt["query"], *prompt["texts"]]

    def post_process(
        self,
        model_output: Sequence[PoolingRequestOutput[PoolingOutput]],
        request_id: str | None = None,
        *,
        prompt: dict[str, Any],
        **kwargs: Any,
    ) -> dict[str, Any]:
        query, *others = (output.outputs.data for output in model_output)
        scores = [float(query @ other) for other in others]
        best = max(range(len(scores)), key=lambda i: scores[i])
        return {"nearest": prompt["texts"][best], "similarity": scores[best]}
