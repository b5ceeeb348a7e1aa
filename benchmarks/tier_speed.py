"""Measures what host memory for KV cache pages saves on a CPU: conversations that do not fit the device, and preemptions.

    python benchmarks/tier_speed.py

A Llama of 20 million random weights. Engines with and without host memory take turns; the best turn of each counts. Seconds are
those of the processor, since other processes may use the machine.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 8192, "hidden_size": 384,
    "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 6, "num_key_value_heads": 2,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
}  # fmt: skip
PAGE, HISTORY, ANSWER, QUESTION = 16, 512, 16, 16  # tokens
ARGS = {
    "device": "cpu", "dtype": "float32", "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 1024,
    "block_size": PAGE, "max_num_batched_tokens": 512,
}  # fmt: skip


def start(model: str, pages: int, seqs: int, host: bool) -> LLM:
    tier = {"kv_offloading_size": 0.25} if host else {}
    return LLM(model, **ARGS, num_gpu_blocks_override=pages, max_num_seqs=seqs, **tier)


def conversations(model: str, count: int, turns: int, host: bool) -> float:
    """Return tokens per second of conversations in turns, where the device holds half of them."""
    llm = start(model, count * (HISTORY + turns * (ANSWER + QUESTION)) // PAGE // 2, 2, host)
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
    texts = [[(i * 977 + j * 31) % 8000 + 5 for j in range(HISTORY)] for i in range(count)]
    began = time.process_time()
    for turn in range(turns + 1):
        if turn == 1:  # the first one is not cached
            began = time.process_time()
        for text in texts:
            [output] = llm.generate([{"prompt_token_ids": text}], params, use_tqdm=False)
            text += [*output.outputs[0].token_ids, *range(5, 5 + QUESTION)]
    seconds = time.process_time() - began
    llm.close()
    return count * turns * ANSWER / seconds


def oversubscribed(model: str, seqs: int, host: bool) -> tuple[float, int]:
    """Return tokens per second, and preemptions, of requests for which the device has pages for 4."""
    prompt, answer = 128, 256
    llm = start(model, 4 * (prompt + answer) // PAGE + 4, seqs, host)
    params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
    prompts: list[Any] = [{"prompt_token_ids": [(i * 977 + j * 31) % 8000 + 5 for j in range(prompt)]} for i in range(16)]
    began = time.process_time()
    llm.generate(prompts, params, use_tqdm=False)
    seconds = time.process_time() - began
    preemptions = llm.llm_engine.core.stats.preemptions  # type: ignore[attr-defined]
    llm.close()
    return len(prompts) * answer / seconds, preemptions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(CONFIG))
        best: dict[str, float] = {}
        for _ in range(options.repeat):
            for host in (False, True):
                name = f"{options.conversations} conversations, {'host memory' if host else 'computed again'}"
                speed = conversations(directory, options.conversations, options.turns, host)
                best[name] = max(best.get(name, 0.0), speed)
            for seqs, host in ((4, False), (8, False), (8, True)):
                speed, preemptions = oversubscribed(directory, seqs, host)
                name = f"{seqs} running where 4 fit, {'swapped' if host else 'computed again'}, {preemptions} preemptions"
                best[name] = max(best.get(name, 0.0), speed)
        for name, speed in best.items():
            print(f"{speed:9.1f} tokens/s  {name}", flush=True)


if __name__ == "__main__":
    main()
