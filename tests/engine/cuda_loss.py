"""Two stages, of which the second is killed in the middle: `python cuda_loss.py MODEL SETTINGS`. Tells who was killed, and the
error, which has to come within five seconds."""

import json
import os
import signal
import sys
import time

from quire import LLM, SamplingParams
from quire.types.errors import EngineDead

LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)


def main() -> int:
    llm = LLM(sys.argv[1], pipeline_parallel_size=2, max_num_seqs=8, max_num_batched_tokens=64, **json.loads(sys.argv[2]))
    engine = llm.llm_engine
    for number in range(4):
        engine.add_request(str(number), "the quick brown fox", LONG)
    for _ in range(30):
        engine.step()
    pid = llm.collective_rpc("describe_rank")[1]["pid"]
    for _ in range(7):
        engine.step()
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    try:
        while engine.has_unfinished_requests():
            engine.step()
    except EngineDead as error:
        took = time.monotonic() - began
        engine.shutdown()
        print(f"told after {took:.2f} s")
        print(f"{pid}: {error}", flush=True)
        return int(took > 5)
    return 2


if __name__ == "__main__":
    code = main()
    os._exit(code)
