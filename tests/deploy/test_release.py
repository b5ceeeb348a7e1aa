"""Wheels: built from a copy of the sources, installed into an empty folder, run from there."""

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import quire
from tiny_model import make_model

ROOT = Path(__file__).parents[2]
KERNELS = "quire/ops/_native.abi3.so"
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
PAGE = {path.name for path in (ROOT / "src/quire/serve/page").iterdir() if path.suffix in (".html", ".css", ".js", ".svg")}
LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="wheels are made for Linux")
NEWER = re.compile(r"\t(v[a-z]|mulx|shlx|sarx|shrx|rorx|andn|blsr|tzcnt|lzcnt|pdep|pext|popcnt)")  # AVX and later, BMI
GENERATE = """
import sys
import quire
from quire import LLM, SamplingParams
from quire.ops.native import kernels

llm = LLM(sys.argv[1], device="cpu", kv_cache_memory_bytes=4 << 20)
[output] = llm.generate("a page is", SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
print(quire.__file__, kernels() is not None, len(output.outputs[0].token_ids), sep="|")
"""


def build(folder: Path, kernels: str) -> Path:
    """Build a wheel. Kernels that the checkout has, compiled from these sources, are not compiled again."""
    tree = folder / f"tree-{kernels}"
    tree.mkdir()
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tree)
    left_out = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
    shutil.copytree(ROOT / "src", tree / "src", ignore=left_out, copy_function=shutil.copy)
    built = ROOT / "src" / KERNELS
    if kernels == "1" and built.exists():
        platform = f"{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
        place = tree / "build" / f"lib.{platform}" / KERNELS
        place.parent.mkdir(parents=True)
        shutil.copy(built, place)
    environment = {**os.environ, "QUIRE_KERNELS": kernels}
    subprocess.run([sys.executable, "-c", BUILD, folder], cwd=tree, env=environment, check=True, capture_output=True)
    [wheel] = folder.glob("*-linux_*.whl" if kernels == "1" else "*-any.whl")
    return wheel


def check(wheel: Path, tag: str) -> set[str]:
    """Check name and contents of a wheel. Return its files."""
    assert f"quire-{quire.__version__}-{tag}" in wheel.name
    files = set(zipfile.ZipFile(wheel).namelist())
    assert {f"quire/serve/page/{name}" for name in PAGE} <= files
    assert {"quire/py.typed", "quire/config/vllm_arguments.json", "quire/compat/site/vllm/__init__.py"} <= files
    assert any(name.startswith("quire/compat/site/vllm-") and name.endswith("METADATA") for name in files)
    assert not [name for name in files if "test" in Path(name).name or name.endswith((".c", ".h"))]
    assert all(name.startswith(("quire/", "quire-")) for name in files)
    return files


@LINUX
def test_the_wheel_with_kernels_runs_where_it_is_installed(tmp_path: Path) -> None:
    wheel, site = build(tmp_path, "1"), tmp_path / "site"
    assert KERNELS in check(wheel, "cp311-abi3-linux_")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile", "--target", site]
    subprocess.run([*pip, wheel], check=True, capture_output=True)

    def run(*command: str | Path) -> str:
        environment = {**os.environ, "PYTHONPATH": str(site)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    file, has_kernels, tokens = run(sys.executable, "-c", GENERATE, make_model(tmp_path)).splitlines()[-1].split("|")
    assert (Path(file).is_relative_to(site), has_kernels, tokens) == (True, "True", "4")
    assert run(site / "bin/quire", "--version").strip() == quire.__version__
    assert "serve" in run(site / "bin/quire", "--help")


@LINUX
def test_the_wheel_without_kernels_is_pure_python(tmp_path: Path) -> None:
    """How it runs is tested in test_without_kernels.py."""
    assert KERNELS not in check(build(tmp_path, "0"), "py3-none-any")


def test_kernels_use_newer_instructions_only_where_the_cpu_is_asked_first() -> None:
    """A wheel runs on any x86-64: vectors of AVX are in functions that `__builtin_cpu_supports` guards, and no others."""
    built = ROOT / "src" / KERNELS
    if shutil.which("objdump") is None or platform.machine() != "x86_64" or not built.exists():
        pytest.skip("requires objdump and kernels for x86-64")
    code = subprocess.run(["objdump", "-d", "--no-show-raw-insn", built], capture_output=True, text=True, check=True).stdout
    guarded = {"multiply_tiles", "round_rows"}  # called where `can_multiply` says so
    using, function = set(), ""
    for line in code.splitlines():
        if named := re.match(r"[0-9a-f]+ <(.+)>:$", line):
            function = named[1]
        elif NEWER.search(line):
            using.add(function.partition(".")[0])
    assert using and not {name for name in using - guarded if not name.endswith(("_8", "_16"))}


def test_the_version_is_written_once() -> None:
    chart = (ROOT / "deploy/helm/quire/Chart.yaml").read_text(encoding="utf-8")
    assert f'appVersion: "{quire.__version__}"' in chart
    released = re.findall(r"^## (\d+\.\d+\.\d+) ", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert released[0] == quire.__version__
    assert f"\nversion: {quire.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
