"""Chat templates run in processes beside the server: loops in them end neither other chats nor the way out."""

import os
import signal
import threading
from pathlib import Path

from server_process import children, serving, wait_for

from patience import PATIENCE

LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


def test_two_looping_templates_end_neither_other_chats_nor_the_server(serve_model):
    flags = ("--trust-request-chat-template", "--shutdown-timeout", "1")
    with serving(serve_model, *flags, QUIRE_TEMPLATE_SECONDS="600") as server, server.client() as http:
        statuses: list[int] = []

        def loop() -> None:
            with server.client() as own:
                statuses.append(own.post("/v1/chat/completions", json={**CHAT, "chat_template": LOOP}).status_code)

        loops = [threading.Thread(target=loop) for _ in range(2)]
        for thread in loops:
            thread.start()
        wait_for(lambda: len(server.text_pids()) >= 3)
        for path, body in (("chat/completions", CHAT), ("completions", {"prompt": "a" * 100, "max_tokens": 1})):
            assert http.post(f"/v1/{path}", json=body).status_code == 200
        assert not statuses
        server.signal()
        assert server.wait() == 0
        for thread in loops:
            thread.join(PATIENCE)
        assert statuses == [503, 503] and "Traceback" not in server.log()


def test_a_killed_text_process_costs_nobody_anything_and_none_is_left_over(serve_model):
    with serving(serve_model) as server, server.client() as http:
        for _ in range(3):
            for pid in server.text_pids():
                os.kill(pid, signal.SIGKILL)
            assert http.post("/v1/chat/completions", json=CHAT).status_code == 200
        assert http.post("/v1/completions", json={"prompt": "a", "structured_outputs": {"regex": "a{3}"}}).is_success
        engine, grammar = server.engine_pid(), server.grammar_pid()
        started = [*server.text_pids(), grammar, *children(grammar, "")]
        assert len(started) >= 3  # the vetting process is one
        for pid in started:
            os.kill(pid, signal.SIGSTOP)
        os.kill(engine, signal.SIGKILL)
        server.signal(signal.SIGKILL)
        wait_for(lambda: not any(map(lives, started)))


def lives(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_a_template_beyond_its_bounds_is_its_clients_mistake(serve_model):
    grows = "{{ 'a' | center(10 ** 10) }}"
    with serving(serve_model, "--trust-request-chat-template", QUIRE_TEMPLATE_SECONDS="1") as server, server.client() as http:
        for template, why in ((LOOP, "processor time"), (grows, "memory")):
            response = http.post("/v1/chat/completions", json={**CHAT, "chat_template": template})
            assert response.status_code == 400 and why in response.json()["error"]["message"]
        assert http.post("/v1/chat/completions", json=CHAT).status_code == 200
