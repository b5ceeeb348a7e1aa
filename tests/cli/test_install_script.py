"""The install of `make` shows what pip is at, in few lines, and all that pip said if it fails."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "install.py"
sys.path.insert(0, str(SCRIPT.parent))
from install import Watch  # noqa: E402

FAKE_PIP = """
import sys, time
if "--version" in sys.argv:
    print("pip {version} from here")
    sys.exit()
print("Collecting torch", flush=True)
print("  Downloading torch-2.13.0-cp311-none-any.whl (890.1 MB)", flush=True)
if "raw" in sys.argv:
    print("Progress 445000000 of 890000000", flush=True)
time.sleep(0.5)
sys.exit("ERROR: no room" if "bad" in sys.argv else 0)
"""


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([], "starting pip"),
        (["Collecting numpy>=1.26 (from quire==0.1.0)"], "looking for numpy>=1.26 (1 packages so far)"),
        (["Collecting torch", "  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_aarch64.whl (104.2 MB)"],
         "downloading torch-2.13.0 (104.2 MB) (1 packages so far)"),
        (["Downloading antlr4-python3-runtime-4.9.3.tar.gz (117 kB)"], "downloading antlr4-python3-runtime-4.9.3 (117 kB)"),
        (["Downloading torch-2.13.0-cp311-none-any.whl (9 GB)", "Progress 89 of 890"], "downloading torch-2.13.0 (9 GB): 10 %"),
        (["  Using cached numpy-2.4-cp311.whl.metadata (6 kB)"], "taking numpy from pip's cache"),
        (["  Building editable for quire (pyproject.toml): started"], "building Quire and its kernels"),
        (["Installing collected packages: a, b, c"], "unpacking 3 packages"),
        (["something nobody has heard of"], "starting pip"),
    ],
)  # fmt: skip
def test_what_pip_is_at(lines: list[str], told: str) -> None:
    watch = Watch()
    for line in lines:
        watch.read(line)
    assert str(watch) == told


@pytest.mark.parametrize("version", ["23.2", "26.1"])
@pytest.mark.parametrize("wanted", ["good", "bad"])
def test_the_whole(wanted: str, version: str, tmp_path: Path) -> None:
    pip = tmp_path / "fake_pip.py"
    pip.write_text(FAKE_PIP.replace("{version}", version))
    code = f"""
import sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
import install
install.PIP, install.LINE_EVERY = (sys.executable, {str(pip)!r}), 0.02
sys.exit(install.main(sys.argv[1:]))
"""
    done = subprocess.run([sys.executable, "-c", code, "-e", wanted], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("installing Quire and what it needs into ")
    assert "(torch is large: minutes, once)\n" in done.stdout
    share = ": 50 %" if version == "26.1" else ""
    assert f"downloading torch-2.13.0 (890.1 MB){share} (1 packages so far), " in done.stdout
    if wanted == "good":
        assert (done.returncode, done.stderr) == (0, "")
        assert "\ninstalled after " in done.stdout
    else:
        assert done.returncode == 1
        assert "Collecting torch" in done.stderr and "ERROR: no room" in done.stderr
        assert done.stderr.endswith("pip failed (exit code 1); its last lines are above\n")


def test_what_is_not_quire_is_named() -> None:
    code = f"""
import sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
import install
install.PIP = (sys.executable, "-c", "pass")
sys.exit(install.main(sys.argv[1:]))
"""
    line = [sys.executable, "-c", code, "mkdocs", "pymdown-extensions"]
    told = subprocess.run(line, capture_output=True, text=True, check=True).stdout
    assert told.startswith(f"installing mkdocs, pymdown-extensions into {sys.prefix}\n") and "torch" not in told
