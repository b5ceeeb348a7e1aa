"""What a CPU does well is tried once and then remembered, for the same CPU and the same libraries."""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, fields
from importlib.metadata import PackageNotFoundError

import pytest
import torch

from quire.device.cpu import autotune as choice
from quire.device.cpu import device, openvino
from quire.device.cpu.autotune import INPUTS, NEVER, OUTPUTS, Choice
from quire.device.cpu.graph import Runtime
from quire.files import cache as store

with_openvino = pytest.mark.skipif(not device.has_openvino(), reason="OpenVINO is for x86 CPUs, and is not installed here")


def make(**different) -> Choice:
    """What somebody might find."""
    usual = {"dequantize_from": 64, "dequantize_others_from": 256, "openvino_tokens": 64}
    return Choice(**{**{field.name: True for field in fields(Choice)}, **usual, **different})


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    monkeypatch.setattr(choice, "multiplies", lambda: False)  # as on a CPU for which we have no kernels
    monkeypatch.setattr(openvino.Network, "max_tokens", openvino.MAX_TOKENS)
    choice.choose.cache_clear()
    yield
    choice.choose.cache_clear()


def test_tried_once(tmp_path, monkeypatch):
    monkeypatch.setattr(choice, "measure", lambda: make())
    assert choice.choose() == make()
    choice.choose.cache_clear()
    monkeypatch.setattr(choice, "measure", lambda: pytest.fail("it is known already"))
    assert choice.choose() == make()
    assert len(json.loads((tmp_path / "cpu.json").read_text())) == 1


def test_of_several_at_once_one_measures(monkeypatch):
    measured = []

    def measure() -> Choice:
        measured.append(len(measured))
        time.sleep(0.2)
        return make(dequantize_from=(32, 48, 64)[len(measured) - 1])

    monkeypatch.setattr(choice, "measure", measure)
    with ThreadPoolExecutor(3) as pool:
        found = [each.result() for each in [pool.submit(choice._read_or_measure) for _ in range(3)]]
    assert found == [make(dequantize_from=32)] * 3 and measured == [0]


def test_what_was_found_is_kept_whatever_the_load_was(tmp_path, monkeypatch):
    monkeypatch.setattr(choice, "measure", lambda: make())
    monkeypatch.setattr("os.getloadavg", lambda: (99.0, 99.0, 99.0))
    assert choice.choose() == make()
    assert json.loads((tmp_path / "cpu.json").read_text())


def test_nothing_is_tried_where_our_kernels_are(tmp_path, monkeypatch):
    monkeypatch.setattr(choice, "multiplies", lambda: True)
    monkeypatch.setattr(choice, "multiplies_floats", lambda: True)
    monkeypatch.setattr(choice, "measure", lambda: pytest.fail("they are always best"))
    assert choice.runtime_for_blocks() == choice.runtime_for_floats() == Runtime.OWN
    assert choice.dequantize_from(True) == NEVER, "a row's numbers would depend on how many rows there are"
    assert not (tmp_path / "cpu.json").exists()


def test_what_was_found_is_a_debug_line(monkeypatch, caplog):
    monkeypatch.setattr(choice, "measure", lambda: make())
    with caplog.at_level("DEBUG", logger="quire.device.cpu.autotune"):
        choice.choose()
    assert [record.levelname for record in caplog.records] == ["DEBUG"]


def burn(seconds: float) -> None:
    begun = time.thread_time()
    while time.thread_time() - begun < seconds:
        pass


def test_whoever_is_kept_waiting_is_not_slower():
    """Sleeping stands for a core that others have: it takes time, and no processor time."""

    def kept_waiting(x):
        time.sleep(0.02)

    waited, worked = choice._time((kept_waiting, lambda x: burn(0.005)), rows=1, tries=3)
    assert waited < worked


@pytest.fixture
def busy_neighbours():
    neighbours = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    yield
    for process in neighbours:
        process.kill()
        process.wait()


def test_the_faster_way_is_found_beside_busy_neighbours(busy_neighbours):
    """Twice the work takes twice the processor time, beside whom ever."""
    small, large = torch.randn(OUTPUTS, INPUTS), torch.randn(2 * OUTPUTS, INPUTS)
    with choice._one_thread():
        for _ in range(5):
            few, many = choice._time((lambda x: x @ small.t(), lambda x: x @ large.t()), rows=16)
            assert few < many


def test_threads_are_as_many_after_the_trial():
    before = torch.get_num_threads()
    with suppress(ZeroDivisionError), choice._one_thread():
        assert torch.get_num_threads() == 1
        raise ZeroDivisionError
    assert torch.get_num_threads() == before


GOOD = json.dumps(asdict(make()))
BROKEN = [
    *("", "[]", "null", "{", "[" * 200_000, "3", "NaN", "\0" * 100, " " * store.MAX_STORE_BYTES + "{}"),
    *(f'{{"key": {told}}}' for told in ("{}", "null", "[1]", "NaN", GOOD.replace("64", "NaN"), GOOD.replace("64", "-1"))),
    *(f'{{"key": {told}}}' for told in (GOOD.replace("64", "1e400"), GOOD.replace("true", "1", 1), GOOD[:-1] + ', "more": 1}')),
    '{"key": ' + '{"x":' * 100_000 + "1" + "}" * 100_001,
]


@pytest.mark.parametrize("found", BROKEN, ids=range(len(BROKEN)))
def test_what_cannot_be_used_is_tried_again(found, tmp_path, monkeypatch, caplog):
    path = tmp_path / "cpu.json"
    path.write_text(found)
    monkeypatch.setattr(choice, "_key", lambda: "key")
    monkeypatch.setattr(choice, "measure", lambda: make(dequantize_from=128))
    assert choice.choose() == make(dequantize_from=128)
    assert list(json.loads(path.read_text())) == ["key"] and '"dequantize_from": 128' in path.read_text()
    assert found == "[]" or (len(caplog.messages) == 1 and str(path) in caplog.text)
    choice.choose.cache_clear()
    monkeypatch.setattr(choice, "measure", lambda: pytest.fail("it is known now"))
    assert choice.choose() == make(dequantize_from=128) and list(tmp_path.iterdir()) == [path]


def test_of_other_cpus_what_can_be_read_stays(tmp_path, monkeypatch, caplog):
    path = tmp_path / "cpu.json"
    path.write_text(f'{{"another CPU": {GOOD}, "broken": {{}}}}')
    monkeypatch.setattr(choice, "_key", lambda: "key")
    monkeypatch.setattr(choice, "measure", make)
    assert choice.choose() == make() and list(json.loads(path.read_text())) == ["another CPU", "key"] and not caplog.messages


def test_a_pipe_is_not_waited_for(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "cpu.json")
    monkeypatch.setattr(choice, "measure", make)
    assert choice.choose() == make() and (tmp_path / "cpu.json").is_file()


@with_openvino
def test_slow_bfloat16_is_never_used(monkeypatch):
    monkeypatch.setattr(choice, "_time", lambda ways, rows, tries=1: (float(rows), 1e6))
    assert choice._measure_dequantizing("Q4_0", Runtime.OPENVINO) == NEVER


@with_openvino
def test_dequantizing_pays_from_the_rows_on_where_it_is_faster(monkeypatch):
    monkeypatch.setattr(choice, "_time", lambda ways, rows, tries=1: (float(rows), 100.0))
    assert choice._measure_dequantizing("Q5_0", Runtime.OPENVINO) == 128


@with_openvino
def test_openvino_is_used_where_it_agrees(monkeypatch):
    """And keeps 4-bit numbers, which it does on every CPU that this test has met; without AVX-512 more tokens may be wrong."""
    assert choice.find_openvino_tokens() and not choice.find_problem(choice.FEW_TOKENS)
    if choice.find_problem(openvino.MAX_TOKENS):
        assert "avx512f" not in device.CPU_INFO.read_text()
    monkeypatch.setattr(openvino.Network, "keeps_quantized", lambda self: False)
    assert not choice.find_openvino_tokens()


@with_openvino
def test_few_tokens_per_run_where_more_are_wrong(monkeypatch, caplog):
    """A whole network would run all tokens of a step at once, so only sessions are used there."""
    runs, bind = [], openvino.Network.bind

    def wrong_with_many(self, name, tensor):
        runs.append(len(tensor))
        bind(self, name, tensor)
        if len(tensor) > choice.FEW_TOKENS:
            tensor.fill_(torch.nan)

    monkeypatch.setattr(openvino.Network, "bind", wrong_with_many)
    monkeypatch.setattr(choice, "_measure_dequantizing", lambda kind, runtime: NEVER)
    assert choice.choose() == Choice(False, True, NEVER, NEVER, choice.multiplies_floats(), choice.FEW_TOKENS)
    assert choice.runtime_for_blocks() is Runtime.OPENVINO and not choice.choose().networks
    choice.choose.cache_clear()
    openvino.Network.max_tokens = openvino.MAX_TOKENS
    assert choice.choose().openvino_tokens == openvino.Network.max_tokens == choice.FEW_TOKENS, "from the file"
    runs.clear()
    stored = choice._matrix("Q4_1")
    product = choice.packed_product(choice.repack([stored], None, Runtime.OPENVINO), Runtime.OPENVINO)
    x = torch.randn(40, INPUTS)
    expected = x @ choice.dequantize(stored.rows.flatten(), stored.type, (OUTPUTS, INPUTS)).t()
    assert (product(x) - expected).norm() < choice.TOLERANCE * expected.norm()
    assert max(runs) == choice.FEW_TOKENS and not caplog.records


@with_openvino
def test_openvino_is_not_used_where_it_reads_what_it_gave_up(monkeypatch):
    """As it would on a machine where it has no copy of its own: here it is made to forget before its first run."""
    run = openvino.Network.run
    monkeypatch.setattr(openvino.Network, "run", lambda self: (self.release_weights(), run(self)))
    assert not choice.find_openvino_tokens()


@with_openvino
def test_another_release_of_openvino_is_no_error(monkeypatch):
    monkeypatch.setattr(openvino, "_openvino", lambda: object())
    openvino._core.cache_clear()
    try:
        assert not choice.find_openvino_tokens()
    finally:
        openvino._core.cache_clear()


def test_a_package_of_another_name_is_not_taken_for_openvino(monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(device, "version", missing)
    assert not device.has_openvino.__wrapped__()


@pytest.mark.parametrize(
    "found, blocks, floats",
    [
        ({}, Runtime.OWN, Runtime.OWN),
        ({"own": False}, Runtime.OPENVINO, Runtime.OWN),
        ({"own": False, "own_floats": False, "openvino": False}, None, None),
    ],
)
def test_who_multiplies(monkeypatch, found, blocks, floats):
    monkeypatch.setattr(choice, "measure", lambda: make(**found))
    assert (choice.runtime_for_blocks(), choice.runtime_for_floats()) == (blocks, floats)


def test_without_libraries_torch_multiplies(monkeypatch):
    monkeypatch.setattr(choice, "has_openvino", lambda: False)
    found = choice.measure()
    assert not found.openvino
    assert "openvino" not in choice._key()


def test_what_was_found_with_our_kernels_is_not_for_an_installation_without(monkeypatch):
    """Clang builds those for blocks, but not those for floats."""
    monkeypatch.setattr(choice, "multiplies_floats", lambda: False)
    monkeypatch.setattr(choice, "multiplies", lambda: True)
    monkeypatch.setattr(choice, "measure", lambda: make(own=True, own_floats=False))
    assert choice.runtime_for_blocks() == Runtime.OWN
    choice.choose.cache_clear()
    monkeypatch.setattr(choice, "multiplies", lambda: False)
    monkeypatch.setattr(choice, "measure", lambda: make(own=False, openvino=False))
    assert choice.runtime_for_blocks() is None


def test_a_measurement_is_short_and_possible():
    found = choice.measure()
    assert {found.dequantize_from, found.dequantize_others_from} <= {*choice.TOKEN_COUNTS, NEVER}
