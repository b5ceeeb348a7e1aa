"""The rules that hold for plug-ins of all kinds, and general plug-ins in all processes."""

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from quire.cli.main import main
from quire.config import plugins
from quire.config.args import EngineArgs
from quire.config.plugins import DEVICES, GENERAL, find_plugins, load_general
from quire.types.errors import ConfigError, PlugInError

COUNTER = """
calls = []

def first():
    calls.append("first")

def second():
    from quire.config.args import EngineArgs
    EngineArgs()  # must neither wait for ever nor call it again
    calls.append("second")

def breaks():
    raise KeyError("of the plug-in")

def exits():
    raise SystemExit(3)

not_callable = 5
"""


def calls():
    return getattr(sys.modules.get("counter"), "calls", [])


def test_general_plugins_are_called_once_and_the_broken_ones_named(packages, caplog):
    points = "[quire.general_plugins]\na = counter:first\nb = counter:second\nc = counter:breaks\nd = counter:exits\n"
    points += "e = counter:missing\nf = nowhere:f\ng = counter:not_callable\n"
    packages.add("counter", points, COUNTER)
    EngineArgs(model="m")
    EngineArgs(model="n")
    assert calls() == ["first", "second"]
    lines = [record.getMessage() for record in caplog.records if record.name == plugins.__name__]
    assert len(lines) == 5 and all("of counter 1.0" in line and line.endswith("; it is skipped") for line in lines)
    reasons = ("KeyError: 'of the plug-in'", "SystemExit: 3", "AttributeError", "ModuleNotFoundError", "TypeError")
    assert all(reason in line for reason, line in zip(reasons, lines, strict=True))
    with pytest.raises(PlugInError, match=r"general plug-in 'c' of counter 1.0 \(counter:breaks\) cannot be used: KeyError"):
        EngineArgs(model="m", require_plugins=True)
    assert calls() == ["first", "second"]


HOSTILE = """
import sys

print("printed by import")

class Odd(Exception):
    def __str__(self):
        raise RuntimeError("no text")

def interrupts():
    raise KeyboardInterrupt

def unreadable():
    raise Odd()

def long():
    raise ValueError("first\\nsecond\\x1b[31m" + 5000 * "x")

def prints():
    print("printed by call")
"""


def test_hostile_plugins_end_no_command_and_print_nothing_into_answers(packages, caplog, capsys):
    names = ("interrupts", "unreadable", "long", "prints")
    packages.add("hostile", "[quire.general_plugins]\n" + "".join(f"{name} = hostile:{name}\n" for name in names), HOSTILE)
    assert main(["models", "--json"]) == 0
    out, err = capsys.readouterr()
    assert "LlamaForCausalLM" in json.loads(out)["architectures"]
    assert "printed by import" in err and "printed by call" in err and sys.stdout is not sys.stderr
    interrupted, long, unreadable = sorted(record.getMessage() for record in caplog.records)
    assert "(hostile:interrupts) cannot be used: KeyboardInterrupt; it is skipped" in interrupted
    assert "ValueError: first second?[31mxxx" in long and "\n" not in long and len(long) < 1200
    assert "Odd: its text cannot be read" in unreadable


@pytest.mark.parametrize(
    ("environment", "called"),
    [
        ({"QUIRE_PLUGINS": "b, unknown"}, ["second"]),
        ({"VLLM_PLUGINS": "a"}, ["first"]),
        ({"QUIRE_PLUGINS": ""}, []),
        ({"QUIRE_PLUGINS": "a,b", "VLLM_PLUGINS": ""}, ["first", "second"]),
    ],
)
def test_variables_choose(environment, called, packages, monkeypatch, caplog):
    packages.add("counter", "[quire.general_plugins]\na = counter:first\nb = counter:second\n", COUNTER)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    load_general()
    assert calls() == called
    assert ("QUIRE_PLUGINS names unknown, which no installed package offers" in caplog.text) == ("unknown" in str(environment))


def test_a_plugin_that_hangs_is_named_and_left_alone(packages, monkeypatch, caplog):
    packages.add(
        "hanging",
        "[quire.general_plugins]\nh = hanging:wait\n",
        "import threading\nfree = threading.Event()\nwait = free.wait\n",
    )
    packages.add("counter", "[quire.general_plugins]\na = counter:first\n", COUNTER)
    monkeypatch.setattr(plugins, "SLOW_AFTER_S", 0.01)
    monkeypatch.setenv("QUIRE_PLUGIN_TIMEOUT", "0.05")
    load_general()
    sys.modules["hanging"].free.set()
    assert calls() == ["first"]
    named = "the general plug-in 'h' of hanging 1.0 (hanging:wait)"
    assert f"{named} takes more than 0.01 s; waiting up to 0.05 s" in caplog.text
    assert f"{named} cannot be used: it has not returned after 0.05 s" in caplog.text
    for bad in ("soon", "0", "-1", "nan"):
        monkeypatch.setenv("QUIRE_PLUGIN_TIMEOUT", bad)
        with pytest.raises(ConfigError, match=f"QUIRE_PLUGIN_TIMEOUT must be a number of seconds above 0; got '{bad}'"):
            plugins.time_limit()


def test_a_name_of_two_packages_is_used_for_neither(packages, caplog):
    packages.add("counter", "[quire.general_plugins]\na = counter:first\n", COUNTER)
    packages.add("other", "[vllm.general_plugins]\na = other:f\n[quire.devices]\nx = other:X\n", version="2.5")
    packages.add("third", "[quire.devices]\nx = third:X\n")
    load_general()
    assert calls() == [] and not find_plugins(GENERAL) and not find_plugins(DEVICES)
    assert "the general plug-in 'a' is offered by counter 1.0 and other 2.5, so it is not used" in caplog.text
    with pytest.raises(PlugInError, match=r"counter 1\.0 and other 2\.5"):
        EngineArgs(require_plugins=True)
    with pytest.raises(ConfigError, match=r"got 'x'. the device 'x' is offered by other 2.5 and third 1.0"):
        EngineArgs(device="x")


def test_a_package_for_both_engines_is_used_once(packages):
    """vLLM's group is read, too; `import vllm` means Quire then."""
    code = "calls = []\n\ndef f():\n    import vllm\n    calls.append(vllm.LLM.__module__)\n"
    packages.add(
        "counter", "[quire.general_plugins]\na = counter:f\n[vllm.general_plugins]\na = counter:f\nb = counter:f\n", code
    )
    run = "from quire.config.plugins import load_general; load_general(); import counter; print(counter.calls)"
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, check=True, env={**os.environ})
    # `a` of Quire's group is on its own when vllm is not installed
    assert (
        done.stdout == "['quire.llm']\n" and "'a' of counter 1.0 (counter:f) cannot be used: ModuleNotFoundError" in done.stderr
    )


def test_a_plugin_that_the_variable_leaves_out_is_named(packages, monkeypatch):
    packages.add("toys", "[quire.devices]\ntoy = toys:Toy\n[quire.drafters]\nmine = toys:Mine\n")
    monkeypatch.setenv("VLLM_PLUGINS", "")
    why = r"{} 'toy' of toys 1.0 \(toys:Toy\) is installed, but VLLM_PLUGINS does not name it"
    with pytest.raises(ConfigError, match=why.format("the device")):
        EngineArgs(device="toy")
    with pytest.raises(ConfigError, match=r"the drafter 'mine' of toys 1\.0"):
        EngineArgs(speculative_config={"method": "mine", "num_speculative_tokens": 2})


def test_collect_env_lists_them(packages, monkeypatch, capsys):
    packages.add("counter", "[quire.general_plugins]\na = counter:first\nb = counter:none\n", COUNTER)
    packages.add("toys", "[quire.devices]\ntoy = counter:first\n")
    monkeypatch.setenv("QUIRE_PLUGINS", "a,b")
    rows = plugins.describe_plugins()
    assert [(row["kind"], row["name"], row["package"]) for row in rows] == [
        ("general plug-in", "a", "counter 1.0"), ("general plug-in", "b", "counter 1.0"), ("device", "toy", "toys 1.0"),
    ]  # fmt: skip
    assert rows[0]["state"] == "can be imported" and "AttributeError" in rows[1]["state"]
    assert "QUIRE_PLUGINS does not name it" in rows[2]["state"] and calls() == []
    assert main(["collect-env"]) == 0
    shown = capsys.readouterr().out
    assert "Plug-ins" in shown and "general plug-in, counter 1.0: can be imported" in shown
    assert main(["collect-env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plugins"] == rows


RECORDER = """
import os, pathlib

def note():
    with open(os.environ["NOTES"], "a") as file:
        file.write(f"{os.getpid()} {pathlib.Path('/proc/self/comm').read_text().strip()}\\n")
"""


def test_every_rank_calls_them(packages, tmp_path, monkeypatch):
    from quire import LLM
    from tiny_model import make_model

    notes = tmp_path / "notes"
    monkeypatch.setenv("NOTES", str(notes))
    packages.add("recorder", "[quire.general_plugins]\nnote = recorder:note\n", RECORDER)
    with LLM(str(make_model(tmp_path)), device="cpu", kv_cache_memory_bytes=4 << 20, tensor_parallel_size=2):
        noted = [line.split() for line in notes.read_text().splitlines()]
    assert len(noted) == 2 and noted[0][0] == str(os.getpid()) and noted[1][1] == "quire-rank"


def test_a_broken_plugin_stops_a_server_only_if_it_is_required(packages, tmp_path, capsys):
    packages.add("counter", "[quire.general_plugins]\nc = counter:breaks\n", COUNTER)
    assert main(["serve", str(tmp_path), "--require-plugins"]) == 2
    said = capsys.readouterr().err
    assert "the general plug-in 'c' of counter 1.0 (counter:breaks) cannot be used: KeyError: 'of the plug-in'" in said
    assert "start without require_plugins" in said


def test_installed_packages_are_read_once_and_again_after_an_installation(packages, monkeypatch):
    reads = []
    monkeypatch.setattr(plugins, "entry_points", lambda: reads.append(1) or entry_points())
    packages.add("one", "[quire.parsers]\none = one:Parser\n")
    assert [*plugins.find_plugins(plugins.PARSERS)] == [*plugins.find_plugins(plugins.PARSERS)] == ["one"] and len(reads) == 1
    assert not plugins.find_plugins(plugins.DRAFTERS) and len(reads) == 1
    packages.add("two", "[quire.parsers]\ntwo = two:Parser\n")
    assert [*plugins.find_plugins(plugins.PARSERS)] == ["one", "two"] and len(reads) == 2
