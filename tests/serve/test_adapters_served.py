"""Adapters over HTTP: models by their names, loaded, replaced and unloaded while the server runs. The engine needs no model."""

import asyncio
import threading

import pytest
import torch
from safetensors.torch import save_file

from adapter_files import write_adapter
from quire.config.args import EngineArgs
from quire.config.server_args import ServerArgs
from quire.obs.metrics import Metrics
from quire.serve.adapters import ServedAdapters, check_adapters, load_modules, updates_allowed
from quire.types.errors import ConfigError, InvalidParameter
from serving import Running, error_of, events_of

BODY = {"prompt": "the quick brown fox", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
SEEDED = {"temperature": 1, "seed": 7}
ALLOWED = {"allow_runtime_lora_updating": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    for name in ("a", "b", "found"):
        write_adapter(folder / name, name)
    return folder


@pytest.fixture(scope="module")
def running(serve_model, folder):
    running = Running(serve_model, distributed_executor_backend="fake", enable_lora=True, max_loras=1, max_cpu_loras=2)
    settings = ServerArgs(
        lora_modules=[f"a={folder / 'a'}", {"name": "b", "path": str(folder / "b"), "base_model_name": "base"}]
    )
    running.call(load_modules(running.llm, settings))
    yield running
    running.close()


@pytest.fixture
def http(running):
    yield running.http
    running.wait_idle()


def text(http, model=None, **more):
    answer = http.post("/v1/completions", json=BODY | ({} if model is None else {"model": model}) | more)
    assert answer.status_code == 200, answer.text
    assert model is None or answer.json()["model"] == model
    return answer.json()["choices"][0]["text"]


def load(http, name, path, **more):
    return http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)} | more)


def test_adapters_are_models(http, folder):
    cards = {card["id"]: card for card in http.get("/v1/models").json()["data"]}
    assert list(cards) == ["tiny", "also-tiny", "a", "b"]
    assert (cards["a"]["parent"], cards["a"]["root"]) == ("tiny", str(folder / "a")) and cards["b"]["parent"] == "base"
    assert cards["tiny"]["parent"] is None and http.get("/v1/models/a").json() == cards["a"]
    assert len({text(http, name) for name in ("tiny", "a", "b")}) == 3
    assert text(http, "a") == text(http, "a") != text(http)


def test_every_protocol_takes_them(http):
    said = {"messages": [{"role": "user", "content": "fox"}], "temperature": 0}
    answers = {}
    for model in ("tiny", "a", "b"):
        chat = http.post("/v1/chat/completions", json={**said, "model": model, "max_tokens": 6}).json()
        response = http.post(
            "/v1/responses", json={"input": "fox", "model": model, "max_output_tokens": 6, "temperature": 0}
        ).json()
        message = http.post("/v1/messages", json={**said, "model": model, "max_tokens": 6}).json()
        assert (chat["model"], response["model"], message["model"]) == (model, model, model)
        options = {"temperature": 0, "num_predict": 6}
        body = {"messages": said["messages"], "model": f"{model}:latest", "options": options, "stream": False}
        assert http.post("/api/chat", json=body).json()["message"]["content"] == chat["choices"][0]["message"]["content"]
        assert http.post("/api/show", json={"model": model}).json()["modelfile"] == f"FROM {model}:latest"
        streamed = events_of(http.post("/v1/completions", json=BODY | {"model": model, "stream": True}).text)
        assert "".join(event["choices"][0]["text"] for event in streamed[:-1]) == text(http, model)
        assert {event["model"] for event in streamed[:-1]} == {model}
        several = http.post("/v1/completions", json=BODY | {"model": model, "prompt": ["fox", "dog"], "n": 2} | SEEDED).json()
        beams = http.post(
            "/v1/completions", json={"prompt": "fox", "model": model, "use_beam_search": True, "n": 2, "max_tokens": 3}
        )
        answers[model] = (
            chat["choices"][0]["message"]["content"], str(response["output"][0]["content"]), str(message["content"]),
            str([choice["text"] for choice in several["choices"]]), str([choice["text"] for choice in beams.json()["choices"]]),
        )  # fmt: skip
        assert http.post("/tokenize", json={"prompt": "fox", "model": model}).status_code == 200
    assert all(len(set(column)) == 3 for column in zip(*answers.values(), strict=True))
    parents = {one["name"]: one["details"]["parent_model"] for one in http.get("/api/tags").json()["models"]}
    assert parents == {"tiny:latest": "", "also-tiny:latest": "", "a:latest": "tiny:latest", "b:latest": "base:latest"}


def test_any_name_is_the_model_where_it_is_not_an_adapters(running, http):
    said = {"messages": [{"role": "user", "content": "fox"}], "temperature": 0, "max_tokens": 6}
    bodies = {
        "/v1/completions": BODY,
        "/v1/chat/completions": said,
        "/v1/responses": {"input": "fox", "max_output_tokens": 16, "temperature": 0},
        "/v1/messages": said,
        "/tokenize": {"prompt": "fox"},
        "/detokenize": {"tokens": [5]},
        "/v1/messages/count_tokens": {"messages": said["messages"]},
    }

    def answer(server, path, model):
        found = server.post(path, json=bodies[path] | {"model": model})
        assert found.status_code == 200, found.text
        told = found.json()
        assert told.get("model", model) == model  # the answer repeats the request's name
        kept = ("choices", "output", "content", "tokens", "prompt", "input_tokens")
        return str([_without_ids(told.get(name)) for name in kept])

    with running.serve(ServerArgs(accept_any_model_name=True)) as open_to_all:
        for path in bodies:
            refused = http.post(path, json=bodies[path] | {"model": "gpt-4o"})
            assert refused.status_code == 404 and "gpt-4o" in refused.text
            assert answer(open_to_all, path, "gpt-4o") == answer(open_to_all, path, "claude-x/1") == answer(http, path, "tiny")
        assert answer(open_to_all, "/v1/completions", "a") == answer(http, "/v1/completions", "a")
        assert answer(open_to_all, "/v1/completions", "a") != answer(open_to_all, "/v1/completions", "gpt-4o")
        streamed = events_of(open_to_all.post("/v1/completions", json=BODY | {"model": "gpt-4o", "stream": True}).text)
        assert {event["model"] for event in streamed[:-1]} == {"gpt-4o"}
        ids = [[card["id"] for card in server.get("/v1/models").json()["data"]] for server in (open_to_all, http)]
        assert ids[0] == ids[1] and open_to_all.get("/v1/models/gpt-4o").status_code == 404
        assert open_to_all.post("/v1/completions", json=BODY | {"model": "x" * 300}).status_code == 400


def _without_ids(value):
    if isinstance(value, list):
        return [_without_ids(item) for item in value]
    return {key: _without_ids(item) for key, item in value.items() if key != "id"} if isinstance(value, dict) else value


def test_loading_replacing_and_unloading(running, folder, caplog):
    write_adapter(folder / "c", "1")
    with running.serve(ServerArgs(**ALLOWED)) as http:
        assert error_of(http.post("/v1/completions", json=BODY | {"model": "c"}))["code"] == 404
        answer = load(http, "c", folder / "c")
        assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'c' added successfully.")
        first = text(http, "c")
        assert "already been loaded" in error_of(load(http, "c", folder / "c"))["message"]
        write_adapter(folder / "c", "2")
        assert "already been loaded" in error_of(load(http, "c", folder / "c", load_inplac=True))["message"]
        assert "'load_inplac', which is unknown and ignored; did its client mean 'load_inplace'?" in caplog.text
        assert load(http, "c", folder / "c", load_inplace=True).status_code == 200
        assert text(http, "c") not in (first, text(http))
        assert "the model itself" in error_of(load(http, "tiny", folder / "c"))["message"]
        gone = http.post("/v1/unload_lora_adapter", json={"lora_name": "c"})
        assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'c' removed successfully.")
        assert error_of(http.post("/v1/completions", json=BODY | {"model": "c"}))["code"] == 404
        assert error_of(http.post("/v1/unload_lora_adapter", json={"lora_name": "c"}))["code"] == 404
        odd = {"lora_name": "c\n", "lora_path": "x"}, {"lora_name": "c", "lora_path": f"{folder}/c\0"}
        for body in ({}, {"lora_name": "c"}, {"lora_name": "", "lora_path": "x"}, {"lora_name": 1, "lora_path": "x"}, *odd):
            assert error_of(http.post("/v1/load_lora_adapter", json=body))["code"] == 400
    running.wait_idle()


def test_of_several_loads_at_once_one_is_the_first(running, folder):
    write_adapter(folder / "c", "1")
    served = ServedAdapters(running.llm, ServerArgs())

    async def load_all():  # they have all come before any file was looked at
        loads = [served.load_from_client("once", str(folder / path), False) for path in "cca"]
        replaced = served.load_from_client("once", str(folder / "a"), True)
        return await asyncio.gather(*loads, replaced, return_exceptions=True)

    told = running.call(load_all())
    assert told[::3] == [None, None] and served.get("once").ref.path == str(folder / "a")
    assert all(isinstance(each, InvalidParameter) and "already been loaded" in str(each) for each in told[1:3])
    running.call(served.unload("once"))


def test_unloading_while_a_stream_runs(running, folder):
    long = BODY | {"model": "long", "max_tokens": 200}
    write_adapter(folder / "long", "1")
    with running.serve(ServerArgs(**ALLOWED)) as http:
        load(http, "long", folder / "long")
        whole = text(http, **long)
        with http.stream("POST", "/v1/completions", json=long | {"stream": True}) as stream:
            lines = stream.iter_lines()
            first = next(lines)
            assert http.post("/v1/unload_lora_adapter", json={"lora_name": "long"}).status_code == 200
            assert "long" not in http.get("/v1/models").text
            streamed = events_of("\n\n".join(line for line in [first, *lines] if line))
        assert "".join(event["choices"][0]["text"] for event in streamed[:-1]) == whole
    running.wait_idle()


def test_bad_adapters_are_400s(running, folder, tmp_path):
    write_adapter(folder / "bad", "1", rank=0)
    write_adapter(tmp_path / "outside", "1")
    (folder / "link").symlink_to(tmp_path / "outside")
    (folder / "loop").symlink_to(folder / "loop")
    secret = write_adapter(folder / "linked", "1") / "adapter_config.json"
    secret.unlink()
    secret.symlink_to(tmp_path / "outside" / "adapter_config.json")
    with running.serve(ServerArgs(**ALLOWED, allowed_lora_path=str(folder))) as http:
        for path, told in (
            (folder / "bad", f"{folder}/bad/adapter_config.json: r must be an integer"),
            (f"{folder}/nothing/", f"{folder}/nothing: there is no such directory"),
            (folder, f"{folder}: there is no adapter_config.json"), ("no/where", "outside of the folder"),
            (tmp_path / "outside", "outside of the folder"), (folder / "link", "outside of the folder"),
            (folder / ".." / "x", "outside of the folder"), (folder / "loop", "outside of the folder"),
            (folder / "linked", "a file that a link in it leads to, is outside of the folder"),
        ):  # fmt: skip
            error = error_of(load(http, "x", path))
            assert (error["code"], error["param"]) == (400, "lora_path") and told in error["message"], error
            assert str(tmp_path) not in error["message"]
        cached = folder / "hub" / "snapshots" / "1"  # as the hub's cache has it: a link inside of the folder
        blob = write_adapter(folder / "hub" / "blobs", "1") / "adapter_config.json"
        write_adapter(cached, "1").joinpath("adapter_config.json").unlink()
        (cached / "adapter_config.json").symlink_to(blob)
        assert load(http, "cached", cached).status_code == 200
        assert http.post("/v1/unload_lora_adapter", json={"lora_name": "cached"}).status_code == 200
    with running.serve(ServerArgs(**ALLOWED)) as http:  # as the client wrote it: where the server is, is not told
        assert error_of(load(http, "x", "no where/./x"))["message"].startswith("no where/./x: there is no such directory")
        assert error_of(load(http, "x", "/"))["message"].startswith("/: there is no adapter_config.json")
        assert text(http, "a") and "x" not in {card["id"] for card in http.get("/v1/models").json()["data"]}
    running.wait_idle()


def test_only_with_the_flag(http, running):
    error = error_of(load(http, "x", "y"))
    assert error["code"] == 404 and "--allow-runtime-lora-updating" in error["message"]
    assert updates_allowed(ServerArgs(), {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"})
    assert not updates_allowed(ServerArgs(), {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "0"})


def test_names_in_a_folder_are_found(running, folder):
    with running.serve(ServerArgs(lora_resolver_dir=str(folder))) as http:
        answers: list[str] = []
        threads = [threading.Thread(target=lambda: answers.append(text(http, "found"))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(answers)) == 1 and answers[0] != text(http) and len(answers) == 4
        assert "found" in http.get("/v1/models").text
        for name in ("nothing", "..", ".", "../" + folder.name + "/a", "/etc", "x" * 200, "a\0b", ""):
            assert error_of(http.post("/v1/completions", json=BODY | {"model": name}))["code"] == 404, name
    running.wait_idle()


def test_a_refused_grammar_gives_the_adapter_back(http):
    bad = {"structured_outputs": {"grammar": "root ::= nothing"}}
    for _ in range(3):
        assert error_of(http.post("/v1/completions", json=BODY | {"model": "a"} | bad))["code"] == 400
        assert text(http, "b")  # there is one place
    yes = text(http, "a", structured_outputs={"choice": ["yes"]}, max_tokens=20)
    assert yes == "yes"


def test_adapters_are_counted_and_seen(running, http):
    metrics = Metrics("vllm", "tiny", 100, {})
    metrics.adapters = running.llm.adapters_in_use
    running.llm.observers.append(metrics)
    text(http, "a")
    told = metrics.render(running.llm)[0].decode()
    running.llm.observers.remove(metrics)
    assert 'vllm:lora_requests_total{engine="0",lora_name="a",model_name="tiny"} 1.0' in told
    assert 'lora_generation_tokens_total{engine="0",lora_name="a",model_name="tiny"} 8.0' in told
    labels = 'engine="0",max_lora="1",model_name="tiny",running_lora_adapters="",waiting_lora_adapters=""'
    assert f"lora_requests_info{{{labels}}}" in told
    seen: list[object] = []
    running.llm.watch(lambda snapshot: seen.extend(request.adapter for request in snapshot.requests))
    try:
        text(http, "b", max_tokens=100)
    finally:
        running.wait_idle()
        running.llm.watch(None)
    assert set(seen) <= {"b"}


def test_what_is_unloaded_is_not_counted_any_more(running, folder, monkeypatch):
    monkeypatch.setattr("quire.obs.metrics.MAX_ADAPTERS", 3)
    metrics = Metrics("vllm", "tiny", 100, {})
    metrics.adapters, metrics.adapter_names = (
        running.llm.adapters_in_use,
        lambda: (one.name for one in running.llm.adapters.all),
    )
    running.llm.observers.append(metrics)
    write_adapter(folder / "passing", "1")
    with running.serve(ServerArgs(**ALLOWED)) as http:
        text(http, "a")
        for number in range(8):
            name = f"passing{number}"
            load(http, name, folder / "passing")
            if number == 7:
                told = metrics.render(running.llm)[0].decode()
                assert 'lora_name="a"' in told and "passing" not in told
            text(http, name)
            assert len(metrics.lora_requests.values) <= 4  # though nobody looks
            assert (
                number < 7 or f'lora_requests_total{{engine="0",lora_name="{name}"' in metrics.render(running.llm)[0].decode()
            )
            assert http.post("/v1/unload_lora_adapter", json={"lora_name": name}).status_code == 200
        assert "passing" not in metrics.render(running.llm)[0].decode()
    running.wait_idle()
    running.llm.observers.remove(metrics)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_modules": ["a"]}, "neither name=path nor a JSON object"),
        ({"lora_modules": ['{"name": "a"}']}, "has no path"),
        ({"lora_modules": ['{"name": "a", "path": "b", "rank": 3}']}, "unknown rank"),
        ({"lora_modules": ["a=b", "a=c"]}, "two adapters 'a'"),
        ({"lora_resolver": ["nobody"]}, "of an installed package; got 'nobody'"),
        ({"lora_resolver_dir": "/nowhere/at/all"}, "is not a directory"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ConfigError, match=message):
        check_adapters(ServerArgs(**settings), EngineArgs("m", enable_lora=True))


def test_files_are_looked_at_before_anything_is_loaded(folder, tmp_path):
    args = EngineArgs("m", enable_lora=True, served_model_name=["mine", "ours"])
    wide = write_adapter(tmp_path / "wide", "w")
    tensors = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(32, 4)}
    save_file(tensors, wide / "adapter_model.safetensors")
    check_adapters(ServerArgs(lora_modules=[f"a={folder / 'a'}"]), args)
    for module, message in (
        (f"ours={folder / 'a'}", "'ours' is the name of the model itself"),
        (f"a={tmp_path / 'nope'}", f"a cannot be loaded: {tmp_path / 'nope'}: there is no such directory"),
        (f"a={wide}", f"{wide}: tensor '.*' has rank 32; max_lora_rank is 16; start with --max-lora-rank 32"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_adapters(ServerArgs(lora_modules=[module]), args)
    check_adapters(ServerArgs(lora_modules=[f"a={wide}"]), EngineArgs("m", enable_lora=True, max_lora_rank=32))
    (wide / "adapter_model.safetensors").unlink()
    torch.save(tensors, wide / "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"has rank 32; max_lora_rank is 16; start with --max-lora-rank 32"):
        check_adapters(ServerArgs(lora_modules=[f"a={wide}"]), args)


def test_changes_are_logged(running, folder, caplog):
    caplog.set_level("INFO", "quire.serve.adapters")
    with running.serve(ServerArgs(allow_runtime_lora_updating=True)) as http:
        assert load(http, "logged", folder / "b").status_code == 200
        assert load(http, "lost\n", folder / "nothing").status_code == 400
        assert load(http, "lost", folder / "nothing").status_code == 400
        for status in (200, 404):
            assert http.post("/v1/unload_lora_adapter", json={"lora_name": "logged"}).status_code == status
    path = folder / "nothing"
    assert [record.message for record in caplog.records if record.name == "quire.serve.adapters"] == [
        f"loaded adapter logged from {folder / 'b'}",
        f"adapter 'lost\\n' from '{path}' was not loaded: lora_name must be of printable characters",
        f"adapter 'lost' from '{path}' was not loaded: {path}: there is no such directory; lora_path names the one with "
        "adapter_config.json",
        "unloaded adapter logged",
        "adapter 'logged' was not unloaded: The lora adapter 'logged' cannot be found.",
    ]


def test_settings_need_adapters(running, folder):
    with pytest.raises(ConfigError, match="lora_modules needs enable_lora"):
        check_adapters(ServerArgs(lora_modules=["a=b"]), EngineArgs("m"))
    with pytest.raises(ConfigError, match=r"x cannot be loaded: .*no such directory"):
        running.call(load_modules(running.llm, ServerArgs(lora_modules=[f"x={folder / 'nothing'}"])))
