"""Plug-ins in the processes of a server."""

from server_process import serving

from patience import wait_for

POINTS = "[vllm.general_plugins]\nnote = recorder:note\n[quire.parsers]\nmine = recorder:mine\n"
RECORDER = """
import os, pathlib
from quire.text.parse.formats import BUILT_IN

mine = BUILT_IN["hermes"]

def note():
    with open(os.environ["NOTES"], "a") as file:
        file.write(f"{os.getpid()} {pathlib.Path('/proc/self/comm').read_text().strip()}\\n")
"""


def test_every_process_of_a_server_has_them(packages, serve_model, tmp_path, monkeypatch):
    notes = tmp_path / "notes"
    monkeypatch.setenv("NOTES", str(notes))
    packages.add("recorder", POINTS, RECORDER)
    with serving(serve_model, "--api-server-count", "2", "--require-plugins", "--tool-call-parser", "mine") as server:
        server.url()
        wait_for(lambda: len(notes.read_text().split()) >= 8)
    noted = [line.split() for line in notes.read_text().splitlines()]
    assert len({pid for pid, _ in noted}) == len(noted) == 4
    names = [name for _, name in noted]
    assert names.count("quire-engine") == 1 and names.count("quire-api") == 2
