"""Programs written for vLLM: vLLM's module paths under `quire`, and `import vllm` that means Quire.

`quire.outputs`, `quire.engine.arg_utils` and the like need nothing but `import quire`: `table.py` says what each path has.
For programs that import vllm itself, `python -m quire.compat SCRIPT ARGS...` or `install()` put the folder `site` on the module
search path, whose package vllm is Quire under another name.
"""

import importlib
import sys
from pathlib import Path

VLLM_VERSION = "0.28.0"  # the release whose API is followed; programs compare vllm.__version__ with their minimum
SITE = Path(__file__).parent / "site"


def install() -> None:
    """Make `import vllm`, and everything below it, mean Quire in this process; also where vLLM is installed.

    Raises ImportError if vLLM itself was imported before.
    """
    loaded = sys.modules.get("vllm")
    if loaded is not None and str(SITE) not in str(loaded.__file__):
        raise ImportError(f"vllm was already imported from {loaded.__file__}; call quire.compat.install() before that")
    if str(SITE) not in sys.path:
        sys.path.insert(0, str(SITE))
        importlib.invalidate_caches()
