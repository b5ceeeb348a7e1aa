"""`quire plan` counts what options change in the engine: its pages are those that `LLM` has then; it refuses what that does."""

import json

import pytest

from quantized_checkpoints import write
from quire import LLM
from quire.cli.main import main
from quire.cli.models import gather
from quire.config.args import EngineArgs
from quire.engine.assemble import resolve_here, start_core
from quire.engine.timeline import Stopwatch
from quire.types.errors import QuireError
from tiny_model import make_model
from twin_model import make_twin, say_words

GIB = 2**30
CACHE = 16 * 2**20  # of an engine
MATRICES = [(32, 32), (16, 32), (16, 32), (32, 32), (48, 32), (48, 32), (32, 48)]  # outputs and inputs, of each of two layers


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return say_words(make_model(tmp_path_factory.mktemp("words")))


@pytest.fixture
def plan(model, capsys):
    def ask(*line, model=model):
        assert main(["plan", str(model), "--json", *line]) == 0
        return json.loads(capsys.readouterr().out)

    return ask


@pytest.fixture
def told(model, capsys):
    def ask(*line):
        assert main(["plan", str(model), *line]) == 0
        return capsys.readouterr().out

    return ask


def pages_of(model, **options):
    llm = LLM(str(model), device="cpu", **options)
    pages, held = llm.llm_engine.core.stats.pages, llm.llm_engine.core
    drafter = getattr(held.scheduler.speculation, "_batch_drafter", None)
    theirs = 0 if drafter is None else drafter._core.stats.pages
    llm.llm_engine.shutdown()
    return pages, theirs


def test_engines_share_a_machine(model, plan, told, monkeypatch):
    monkeypatch.setattr("quire.device.cpu.device.available_host_bytes", lambda: 80 * GIB)
    monkeypatch.setattr("quire.device.cpu.device.take_cores", lambda *_: None)
    line = ("--device", "cpu", "--memory", "80GiB")
    planned = plan(*line, "-dp", "3")
    assert (planned["engines"], planned["cache"]) == (3, 4 * GIB // 3)
    assert 3 * planned["pages"] + 5 >= plan(*line)["pages"] > 3 * planned["pages"]
    assert ", in each of 3 engines\n" in told(*line, "-dp", "3")
    assert ", in each of 2 ranks of each of 3 engines\n" in told(*line, "-dp", "3", "-tp", "2")
    apart = plan("--memory", "80GiB", "-dp", "3")
    assert apart["engines"] == 3 and apart["pages"] == plan("--memory", "80GiB")["pages"]  # each has a GPU
    args = EngineArgs(model=str(model), device="cpu", data_parallel_size=3)
    started = start_core(resolve_here(args, Stopwatch(), engine=1))
    assert started.pages == planned["pages"]
    started.core.executor.call("close")


def test_engines_that_do_not_fit_beside_each_other(model, capsys):
    line = ["plan", str(model), "--device", "cpu", "--memory", "1GiB", "--kv-cache-memory-bytes", str(400 * 2**20)]
    assert main([*line, "-dp", "2"]) == 0
    assert main([*line, "-dp", "3"]) == 1
    assert "kv_cache_memory_bytes is 1.17 GiB, but only" in capsys.readouterr().out


def test_a_model_that_drafts_has_a_part_of_the_pages(model, plan, told):
    line = ("--kv-cache-memory-bytes", str(CACHE))
    alone, drafted = plan(*line), plan(*line, "--spec-model", str(model))
    assert drafted == plan(*line, "--speculative-config", json.dumps({"model": str(model)})) | {"memory": drafted["memory"],
        "memory_usable": drafted["memory_usable"]}  # fmt: skip
    assert drafted["draft_weights"] == alone["weights_loaded"] and drafted["draft_cache"] == CACHE // 2
    assert (drafted["pages"], 0) == pages_of(model, kv_cache_memory_bytes=CACHE, speculative_config={"model": str(model)})
    assert (alone["pages"], 0) == pages_of(model, kv_cache_memory_bytes=CACHE)
    assert alone["pages"] == 2 * drafted["pages"] + 1
    text = told(*line, "--spec-model", str(model))
    assert f"Drafts           {model}, with " in text and "8.00 MiB of cache under the model's pages" in text


def test_a_model_that_drafts_by_text_has_a_cache_of_its_own(model, plan, told, tmp_path):
    twin = make_twin(tmp_path, model)
    line = ("--max-num-seqs", "4", "--kv-cache-memory-bytes", str(CACHE), "--spec-model", str(twin))
    planned = plan(*line)
    assert planned["drafts_by_text"] and planned["draft_weights"] > 0
    pages, theirs = pages_of(model, max_num_seqs=4, kv_cache_memory_bytes=CACHE, speculative_config={"model": str(twin)})
    assert pages == planned["pages"] == plan("--max-num-seqs", "4", "--kv-cache-memory-bytes", str(CACHE))["pages"]
    assert planned["draft_cache"] == (theirs + 1) * planned["bytes_per_page"]  # both have layers of one size
    assert "of cache of its own: it drafts by text" in told(*line)


def test_room_for_adapters_on_a_gpu(plan, told):
    line = ("--device", "cuda", "--memory", "80GiB")
    room = ("--enable-lora", "--max-loras", "64", "--max-lora-rank", "256")
    planned, without = plan(*line, *room), plan(*line)
    numbers = 2 * sum((outputs + inputs) * 256 + 2 * 64 for outputs, inputs in MATRICES)  # each piece to a multiple of 64
    assert planned["adapter_bytes"] == (64 + 2) * numbers * 2  # and two on the way
    assert without["cache"] - planned["cache"] == planned["adapter_bytes"] + planned["graphs"] - without["graphs"]
    assert f"64 at once, of rank 256 at most: {planned['adapter_bytes'] / 2**20:.2f} MiB reserved" in told(*line, *room)


def test_floats_that_a_cpu_holds_twice(plan, monkeypatch):
    monkeypatch.setattr("quire.device.cpu.device.multiplies_floats", lambda: True)
    line = ("--device", "cpu", "--memory", "8GiB", "--enable-lora")
    matrices = 2 * sum(outputs * inputs for outputs, inputs in MATRICES)
    assert plan(*line)["weights_twice"] == plan(*line, "-tp", "2")["weights_twice"] == 4 * matrices
    assert plan(*line, "--dtype", "bfloat16")["weights_twice"] == plan(*line[:-1])["weights_twice"] == 0


def test_a_cpu_divides_act_order_by_outputs(tmp_path):
    assert main(["plan", str(write("gptq-act-order", tmp_path)), "-tp", "4", "--device", "cpu"]) == 0


def test_what_cannot_be_divided_is_refused_as_the_engine_does(tmp_path, capsys):
    path = str(write("fp8-block", tmp_path))
    assert main(["plan", path]) == 0
    capsys.readouterr()
    assert main(["plan", path, "-tp", "4", "--device", "cpu"]) != 0
    text = capsys.readouterr().err
    args = EngineArgs(model=path, device="cpu", tensor_parallel_size=4)
    with pytest.raises(QuireError) as caught:
        start_core(resolve_here(args, Stopwatch()))
    assert text == f"quire plan: {caught.value}\n" and "tensor_parallel_size" in text


def test_models_says_where_gguf_stays_in_few_bits():
    assert "stays in its blocks on a CPU, in 4, 6 or 8 bits on a GPU" in gather()["formats"]["gguf"]
