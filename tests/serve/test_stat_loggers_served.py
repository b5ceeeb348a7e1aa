"""A stat logger of a package and a scheduler class, in the processes of a server."""

import json

from server_process import serving

from patience import wait_for

CODE = """
import json, os
from quire.sched.scheduler import Scheduler
from quire.stat_loggers import StatLoggerBase

def note(**values):
    with open(os.environ["NOTES"], "a") as file:
        file.write(json.dumps(values) + "\\n")

class Mine(Scheduler):
    def add(self, spec):
        note(added=len(spec.prompt))
        super().add(spec)

class Logger(StatLoggerBase):
    def __init__(self, vllm_config, engine_index=0):
        pass
    def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0):
        for each in [] if iteration_stats is None else iteration_stats.finished_requests:
            note(finished=each.num_generation_tokens)
    def log_engine_initialized(self):
        note(ready=True)
    def log(self):
        note(log=True)
"""


def test_of_a_package(packages, serve_model, tmp_path, monkeypatch):
    notes = tmp_path / "notes"
    monkeypatch.setenv("NOTES", str(notes))
    monkeypatch.setenv("QUIRE_LOG_STATS_INTERVAL", "0.05")
    packages.add("stats_of_acme", "[quire.stat_loggers]\nacme = stats_of_acme:Logger\n", CODE)
    with (
        serving(serve_model, "--scheduler-cls", "stats_of_acme:Mine", "--require-plugins") as server,
        server.client() as client,
    ):
        body = {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
        client.post("/v1/completions", json=body).raise_for_status()
        wait_for(lambda: '"log"' in notes.read_text() and '"finished"' in notes.read_text())
    lines = [json.loads(line) for line in notes.read_text().splitlines()]
    assert [each for each in lines if "log" not in each] == [{"ready": True}, {"added": 3}, {"finished": 4}]
