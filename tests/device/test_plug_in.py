"""A device that another package brings, through the front door."""

import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.cli.main import main
from quire.config.args import EngineArgs
from quire.config.facts import DeviceFacts
from quire.types.errors import ConfigError
from tiny_model import make_model

TOY = '''
from quire.device.cpu.device import CPUDevice

class Toy(CPUDevice):
    """A CPU that counts the tokens of its steps, and runs a model layer by layer."""

    steps = []

    def prepare(self, model, setting):
        from quire.device.base import Device

        return Device.prepare(self, model, setting)

    def note(self, tokens):
        self.steps.append(tokens)

class Vague(CPUDevice):
    def facts(self, memory=None):
        return None

class Broken(CPUDevice):
    def __init__(self):
        raise KeyError("toys")

class Greedy(CPUDevice):
    def plan_budget(self, total, utilization, used):
        from quire.device.base import PlannedBudget

        return PlannedBudget(total - 3, 3, 2**20)

not_a_device = dict
'''
PAGE = (Path(__file__).parents[2] / "docs" / "devices.md").read_text(encoding="utf-8")
EXAMPLE = re.search(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)[1]
POINTS = """[quire.devices]
mine = toy_device:MyDevice
toy = toy_device:Toy
greedy = toy_device:Greedy
wrong = toy_device:not_a_device
vague = toy_device:Vague
broken = toy_device:Broken
absent = toy_device:Absent
quits = toy_that_quits:Toy
cpu = toy_device:Broken
"""
PROMPT = {"prompt_token_ids": [5, 12, 19, 26, 33]}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """As pip would have installed it."""
    about = tmp_path / "toy_device-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-device\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(POINTS)
    (tmp_path / "toy_device.py").write_text(TOY + EXAMPLE)
    (tmp_path / "toy_that_quits.py").write_text("import sys\nsys.exit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("toy_device", None)


def generate(model, device):
    llm = LLM(str(model), device=device, max_num_seqs=2, kv_cache_memory_bytes=4 << 20)
    [output] = llm.generate([PROMPT], GREEDY, use_tqdm=False)
    return output.outputs[0].token_ids


def test_a_device_of_another_package(toy, tmp_path):
    model = make_model(tmp_path)
    assert generate(model, "toy") == generate(model, "cpu")
    assert sys.modules["toy_device"].Toy.steps == [5, 1, 1, 1, 1, 1]


def test_the_device_of_the_documentation(toy, tmp_path):
    """Its name is none of torch's; its memory is what it says."""
    model = make_model(tmp_path)
    llm = LLM(str(model), device="mine", max_num_seqs=2, gpu_memory_utilization=0.01)
    [output] = llm.generate([PROMPT], GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == generate(model, "cpu")


def test_deterministic_is_refused_unless_a_device_supports_it(toy, tmp_path):
    with pytest.raises(ConfigError, match="deterministic is not supported with this device"):
        LLM(str(make_model(tmp_path)), device="mine", deterministic=True)


def test_a_plan_names_it(toy, tmp_path, capsys):
    assert main(["plan", str(make_model(tmp_path)), "--device", "mine", "--memory", "8GiB"]) == 0
    assert "mine, 8.00 GiB available" in capsys.readouterr().out


def test_a_plan_asks_it_how_much_is_the_caches(toy, tmp_path, capsys):
    model = str(make_model(tmp_path))
    found = {}
    for device, more in (("mine", ()), ("mine", ("--gpu-memory-utilization", "0.5")), ("greedy", ())):
        assert main(["plan", model, "--device", device, "--memory", "8GiB", "--json", *more]) == 0
        found[device, more] = json.loads(capsys.readouterr().out)
    whole, half, greedy = found.values()
    assert whole["cache"] - half["cache"] == whole["memory_usable"] - half["memory_usable"] > 2**31
    assert (greedy["memory_usable"], greedy["reserved"], greedy["cache"]) == (2**33 - 3, 3, 2**20)


def test_the_documentation_has_every_fact():
    rows = PAGE.partition("## Facts")[2].splitlines()
    named = {name for row in rows if row.startswith("| `") for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named == {field.name for field in dataclasses.fields(DeviceFacts)}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("wrong", r"toy_device:not_a_device\) cannot be used: it is not a subclass of quire.device.base.Device"),
        ("vague", r"toy_device:Vague\) cannot be used: facts\(\) must return DeviceFacts; got None"),
        ("broken", r"toy_device:Broken\) cannot be used: KeyError: 'toys'"),
        ("absent", r"toy_device:Absent\) cannot be used: AttributeError: "),
        ("quits", r"toy_that_quits:Toy\) cannot be used: SystemExit: 3"),
    ],
)
def test_what_is_no_device(name, why, toy, tmp_path):
    with pytest.raises(ConfigError, match=rf"the device '{name}' of toy-device 1.0 \({why}"):
        generate(make_model(tmp_path), name)


def test_names_are_checked_before_anything_else(toy):
    with pytest.raises(
        ConfigError,
        match="device must be one of auto, cpu, cuda, absent, broken, greedy, mine, quits, toy, vague, wrong; got 'tpu'",
    ):
        EngineArgs(model="nowhere", device="tpu")
