"""How a server of a pooling model describes itself: tasks, live events, `quire top`, metrics."""

from pathlib import Path

from feed_viewer import watching
from server_process import serving, wait_for

from quire.cli.top import EngineRow, finished, numbers, screen
from sentence_models import save_text_encoder

TASKS = ["embed", "token_embed", "score"]


def test_a_server_that_pools(tmp_path: Path) -> None:
    save_text_encoder(tmp_path)
    with (
        serving(tmp_path, "--distributed-executor-backend", "uni") as server,
        server.client() as client,
        watching(server.url()) as viewer,
    ):
        [card] = client.get("/v1/models").json()["data"]
        assert card["supported_tasks"] == TASKS
        answer = client.post("/v1/embeddings", json={"input": ["the quick brown fox", "a page"]}).json()
        tokens = answer["usage"]["prompt_tokens"]
        viewer.finished(2)
        known = EngineRow()
        for kind, event in list(viewer.events):
            known.apply(kind, event)
        assert known.hello["tasks"] == TASKS
        line = numbers(known)
        assert "no KV cache" in line and "tokens " in line and "generated" not in line, line
        shown = screen(known, None, "here", 200, 40)
        assert ", embed, token_embed, score)" in shown[0] and not any(line.startswith("next token") for line in shown)
        assert "drawn" not in finished(known.finished[0], generates=False)
        wait_for(lambda: _values(client)["quire:e2e_request_latency_seconds_count"] == 2)
        values = _values(client)
        assert values["quire:prompt_tokens_total"] == values["quire:request_prompt_tokens_sum"] == tokens
        assert values["quire:time_to_first_token_seconds_count"] == 2
        assert values["quire:iteration_tokens_total_sum"] == tokens
        assert values["quire:generation_tokens_total"] == values["quire:request_params_max_tokens_count"] == 0


def _values(client) -> dict[str, float]:
    lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith("quire:")]
    return {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines}
