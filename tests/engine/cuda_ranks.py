"""Ranks that share one GPU, with collectives on the GPU: `python cuda_ranks.py MODEL WHAT`, in a process of its own for MPS.

WHAT    a list of sizes in JSON       prints the tokens of each, replayed steps, and exchanges between hosts in them
        beside                        two engines side by side, then one more: prints the tokens of each
        RANK SIGNAL                   a rank is lost: prints its process, all processes and the error
"""

import json
import os
import signal
import sys
import time

from quire import LLM, SamplingParams
from quire.dist.shared_memory import SharedMemoryGroup
from quire.types.errors import EngineDead

SETTINGS = {
    "device": "cuda", "dtype": "float32", "kv_cache_memory_bytes": 64 << 20, "skip_tokenizer_init": True, "max_num_seqs": 8,
    "max_num_batched_tokens": 64, "block_size": 16,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
PROMPTS = [list(range(3, 3 + n)) for n in (33, 5, 18, 9)]
exchanges = 0  # of this process with other hosts


def count_exchanges() -> None:
    publish = SharedMemoryGroup._publish

    def counted(self, chunk, lengths):
        global exchanges
        exchanges += 1
        return publish(self, chunk, lengths)

    SharedMemoryGroup._publish = counted


def texts(llm):
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def counts(llm):
    found = llm.llm_engine.core.executor.counts
    return found.captures, found.replays, exchanges


def compare(model, sizes):
    found = []
    for each in sizes:
        llm = LLM(model, **SETTINGS, **each)
        tokens = [texts(llm) for _ in range(3)]  # graphs are recorded meanwhile
        captures, replays, exchanged = counts(llm)
        tokens += [texts(llm) for _ in range(3)]
        now = counts(llm)
        sums = llm.llm_engine.core.executor.call_all("measure_collectives", [4096, 65536, 1 << 21])  # in a graph
        llm.llm_engine.shutdown()
        hosts = now[2] - exchanged - (now[0] - captures)  # a recording takes one exchange
        found.append({"tokens": tokens, "replays": now[1] - replays, "exchanges": hosts, "sums": sums})
    return found


def beside(model):
    first, second = (LLM(model, **SETTINGS, tensor_parallel_size=2) for _ in range(2))
    found = [texts(llm) for llm in (first, second, first, second)]
    first.llm_engine.shutdown()
    found.append(texts(second))
    second.llm_engine.shutdown()
    third = LLM(model, **SETTINGS, tensor_parallel_size=2)
    found.append(texts(third))
    third.llm_engine.shutdown()
    return found


def lose(model, rank, number):
    llm = LLM(model, **SETTINGS, tensor_parallel_size=3, engine_hang_timeout=20)
    engine = llm.llm_engine
    for request in range(4):
        engine.add_request(str(request), {"prompt_token_ids": PROMPTS[request]}, LONG)
    for _ in range(30):
        engine.step()
    pids = [own["pid"] for own in llm.collective_rpc("describe_rank")]
    os.kill(pids[rank], number)
    began, error = time.monotonic(), ""
    try:
        while engine.has_unfinished_requests():
            engine.step()
    except EngineDead as dead:
        error = str(dead)
    engine.shutdown()
    print(f"{time.monotonic() - began:.2f} s until all had ended", file=sys.stderr)
    again = LLM(model, **SETTINGS, tensor_parallel_size=2)  # on the same GPU, in the same process
    found = {"lost": pids[rank], "pids": pids[1:], "error": error, "tokens": texts(again)}
    again.llm_engine.shutdown()
    return found


def main() -> None:
    count_exchanges()
    model, *what = sys.argv[1:]
    if what == ["beside"]:
        found = beside(model)
    elif len(what) == 2:
        found = lose(model, int(what[0]), signal.Signals[what[1]])
    else:
        found = compare(model, json.loads(what[0]))
    print(json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
