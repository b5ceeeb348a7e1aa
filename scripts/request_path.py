"""Counts the files and functions of Quire that run for one `LLM.generate`, and the lines of those functions.

python scripts/request_path.py MODEL
"""

import inspect
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import quire
from quire import LLM, SamplingParams

HERE = str(Path(quire.__file__).parent)
PARAMS = SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=6, ignore_eos=True)


def main(model: str) -> None:
    llm = LLM(model, device="cpu", max_num_seqs=4, kv_cache_memory_bytes=4 << 20)
    llm.generate(["hello there"], PARAMS, use_tqdm=False)  # whatever happens once
    ran: set[CodeType] = set()

    def note(frame: FrameType, _event: str, _argument: Any) -> None:
        if frame.f_code.co_filename.startswith(HERE) and not frame.f_code.co_name.startswith("<"):
            ran.add(frame.f_code)

    threading.settrace(note)
    sys.settrace(note)
    llm.generate(["the quick brown fox"], PARAMS, use_tqdm=False)
    sys.settrace(None)
    threading.settrace(None)
    lines = {(code.co_filename, code.co_firstlineno + i) for code in ran for i in range(len(inspect.getsourcelines(code)[0]))}
    print(f"{len({code.co_filename for code in ran})} files, {len(ran)} functions, {len(lines)} lines of those functions")


if __name__ == "__main__":
    main(*sys.argv[1:])
