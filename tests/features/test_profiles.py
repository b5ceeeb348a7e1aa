"""`start_profile` and `stop_profile`: traces of the steps in between, and requests that do not notice."""

import gzip
import json
import re
from pathlib import Path

import pytest
import torch

from quire import LLM, SamplingParams
from quire.engine.supervisor import Supervisor, SupervisorLimits
from quire.features.profiling.host import ProfilerSettings, read_settings
from quire.proc.liveness import Silence
from quire.types.errors import ConfigError, EngineError, InvalidParameter, NotSupported, RequestError
from tiny_model import make_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
SMALL = {"device": "cpu", "kv_cache_memory_bytes": 1 << 20, "max_num_seqs": 4, "block_size": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_model(tmp_path_factory.mktemp("profiled")))


def opened(model, folder, **config):
    given = {"profiler": "torch", "torch_profiler_dir": str(folder), "torch_profiler_with_stack": False}
    return LLM(model, **SMALL, profiler_config=given | config)


def tokens(llm):
    return llm.generate("a page is a page", GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def steps_in(path):
    """One embedding is one step."""
    return sum(event.get("name") == "aten::embedding" for event in json.loads(read(path))["traceEvents"])


def read(path):
    content = Path(path).read_bytes()
    return gzip.decompress(content) if path.endswith(".gz") else content


def test_a_profile_of_a_request(model, tmp_path):
    with opened(model, tmp_path / "traces") as llm:
        with pytest.raises(RequestError, match="no profile is running"):
            llm.stop_profile()
        alone = tokens(llm)
        llm.start_profile("mine")
        with pytest.raises(RequestError, match=r"already running. Stop it first"):
            llm.start_profile()
        assert tokens(llm) == alone
        [path] = llm.stop_profile()
        assert re.search(r"/traces/mine-\d{8}-\d{6}-\w{6}-.*\.pt\.trace\.json\.gz$", path) and steps_in(path) == 8
        with pytest.raises(RequestError, match="no profile is running"):
            llm.stop_profile()
        llm.start_profile()
        assert tokens(llm) == alone
        assert llm.stop_profile() != [path]
        for prefix in ("a/b", "", "x" * 81, 3):
            with pytest.raises(InvalidParameter, match="profile_prefix must be 1 to 80 letters"):
                llm.start_profile(prefix)
        assert len(list((tmp_path / "traces").iterdir())) == 2
        llm.start_profile()  # never stopped: closing writes nothing, and the next profiler of this process can start
    assert len(list((tmp_path / "traces").iterdir())) == 2
    with torch.profiler.profile():
        pass


def test_the_steps_that_are_asked_for(model, tmp_path):
    config = {"delay_iterations": 2, "max_iterations": 3, "torch_profiler_use_gzip": False,
              "torch_profiler_dump_cuda_time_total": True}  # fmt: skip
    with opened(model, tmp_path, **config) as llm:
        llm.start_profile()
        with pytest.raises(RequestError, match="the profile is empty: no step ran after delay_iterations"):
            llm.stop_profile()
        llm.start_profile()
        tokens(llm)
        [path] = llm.stop_profile()
        assert path.endswith(".pt.trace.json") and steps_in(path) == 3
        assert "aten::embedding" in Path(path.replace(".pt.trace.json", ".txt")).read_text()


def test_functions_of_python_are_in_a_trace_unless_refused(model, tmp_path):
    settings = {"profiler": "torch", "torch_profiler_dir": str(tmp_path)}
    with LLM(model, **SMALL, profiler_config=settings) as llm:
        llm.start_profile()
        llm.generate("a", SamplingParams(max_tokens=2), use_tqdm=False)
        [path] = llm.stop_profile()
    kinds = {event.get("cat") for event in json.loads(read(path))["traceEvents"]}
    with opened(model, tmp_path) as llm:
        llm.start_profile()
        tokens(llm)
        [without] = llm.stop_profile()
    assert kinds - {event.get("cat") for event in json.loads(read(without))["traceEvents"]} == {"python_function"}


def test_a_folder_that_takes_no_files(model, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with opened(model, tmp_path / "file" / "below") as llm:
        with pytest.raises(EngineError, match=r"the profile was not started: .*file.*: Not a directory"):
            llm.start_profile()
        assert len(tokens(llm)) == 8
    folder = tmp_path / "full"
    with opened(model, folder) as llm:
        llm.start_profile()
        alone = tokens(llm)
        with monkeypatch.context() as patch:
            patch.setattr(torch.profiler.profile, "export_chrome_trace", lambda _, path: Path(path).write_text('{"trace'))
            with pytest.raises(EngineError, match=r"could not be written: .* took only a part of the trace; is the disk full"):
                llm.stop_profile()
        assert not [*folder.iterdir()] and tokens(llm) == alone


def test_a_profiler_that_fails_in_a_step(model, tmp_path, monkeypatch):
    with opened(model, tmp_path, delay_iterations=1) as llm, monkeypatch.context() as patch:
        patch.setattr(torch.profiler.profile, "start", lambda _: 1 / 0)
        llm.start_profile()
        assert len(tokens(llm)) == 8
        with pytest.raises(EngineError, match="could not be written: division by zero"):
            llm.stop_profile()
        assert not [*tmp_path.iterdir()]


def test_without_a_profiler(model):
    with LLM(model, **SMALL) as llm:
        for call in (llm.start_profile, llm.stop_profile):
            with pytest.raises(NotSupported, match=r"profiles require profiler_config; got none. Start with --profiler-config"):
                call()
    with pytest.raises(ConfigError, match="'cuda' requires a CUDA device; got cpu"):
        LLM(model, **SMALL, profiler_config={"profiler": "cuda"})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"profiler": "proton"}, "must be 'torch' or 'cuda'; got 'proton'"),
        ({"profiler": "torch"}, "torch_profiler_dir must be the folder of the traces; got none"),
        ({"torch_profiler_dir": "/tmp"}, "requires profiler_config.profiler to be 'torch'"),
        ({"profiler": "cuda", "torch_profiler_dir": "/tmp"}, "writes no files. Remove it"),
        ({"profiler": "torch", "torch_profiler_dir": "s3://traces"}, "must be the path of a folder; got 's3://traces'"),
        ({"profiler": "torch", "torch_profiler_dir": "/tmp", "max_iterations": -1}, "at least 0; got -1"),
        ({"profiler": "torch", "torch_profiler_dir": "/tmp", "torch_profiler_with_stack": 1}, "must be true or false; got 1"),
        ({"ignore_frontend": False}, "API processes run no torch code"),
        ({"warmup_iterations": 2}, "use delay_iterations"),
        ({"folder": "/tmp"}, "has no field 'folder'"),
    ],
)
def test_wrong_settings(given, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_settings(given)


def test_settings_that_ask_for_nothing(monkeypatch):
    assert read_settings({}) is read_settings({"profiler": None, "ignore_frontend": True, "warmup_iterations": 0}) is None
    from quire import EngineArgs

    monkeypatch.setenv("VLLM_TORCH_PROFILER_DIR", "~/traces")
    found = read_settings(EngineArgs(model="m").profiler_config)
    assert (
        isinstance(found, ProfilerSettings)
        and found.torch_profiler_dir.endswith("/traces")
        and found.torch_profiler_dir[0] == "/"
    )
    assert EngineArgs(model="m", profiler_config={"profiler": "cuda"}).profiler_config == {"profiler": "cuda"}


def test_an_engine_that_writes_a_trace_may_be_silent():
    supervisor = object.__new__(Supervisor)
    supervisor.state, supervisor._child, supervisor._busy, supervisor._patient_until = "ready", None, 0.0, 0.0
    supervisor._limits, supervisor._silence = SupervisorLimits(10.0, 300.0, 1.0, 1, 1.0), Silence(0.1)
    supervisor._silence.seconds = 60.0
    assert supervisor._diagnose() == "it has been silent for 60.0 s"
    with supervisor.patient():
        assert supervisor._diagnose() is None
    supervisor._busy = 400.0
    assert supervisor._diagnose() == "it has been in one step for 400.0 s", "the silence ended with the call"
    with supervisor.patient():
        assert supervisor._diagnose() is None


@pytest.mark.gpu
@pytest.mark.parametrize("profiler", ["torch", "cuda"])
def test_on_a_gpu(model, tmp_path, profiler):
    config = {"profiler": profiler} | ({"torch_profiler_dir": str(tmp_path)} if profiler == "torch" else {})
    with LLM(model, **{**SMALL, "device": "cuda"}, profiler_config=config) as llm:
        alone = tokens(llm)
        llm.start_profile()
        assert tokens(llm) == alone
        files = llm.stop_profile()
        assert len(files) == (profiler == "torch")
        assert all(b'"cat": "kernel"' in read(path) for path in files)
