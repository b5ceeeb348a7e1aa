"""Every causal language model of transformers, tiny and random, through `LLM`: which are served, which refused, is one wrong?

    python scripts/sweep.py                  all of them: build/sweep.json, and a summary
    python scripts/sweep.py llama bloom      these

A checkpoint of each type is made from its own configuration class with small numbers in it, read by `LLM` on a CPU in float32
(prompts together, cut in steps of 8 tokens), and compared with transformers' own logits of the same tokens: every
log-probability of prompts and answers to 1e-4, and each drawn token is transformers' likeliest. Each runs in a process of its
own, so that none takes the others down. `scripts/models_page.py` makes the list in docs/models.md of
`scripts/served.json`, which is what `--keep` writes.
"""

import argparse
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from sweep_configs import make_config

BUILD = Path("build/sweep.json")
KEPT = Path("scripts/served.json")
TOLERANCE = 1e-4
LENGTHS, NEW_TOKENS, STEP = (21, 5), 5, 8
SECONDS = 240  # of one type


def examine(kind: str, directory: Path) -> dict[str, str]:
    """served natively or by the fallback, refused, wrong, or an error that is none of ours."""
    import torch

    from quire import LLM, SamplingParams
    from quire.config.families import architectures
    from quire.types.errors import QuireError

    try:
        reference = build(kind, directory)
    except Exception as error:
        return {"verdict": "not built", "why": told(error)}
    architecture = json.loads((directory / "config.json").read_text())["architectures"][0]
    generator = torch.Generator().manual_seed(3)
    size = json.loads((directory / "sweep.json").read_text())["vocabulary"]
    prompts = [torch.randint(3, size, (length,), generator=generator).tolist() for length in LENGTHS]
    try:
        llm = LLM(
            str(directory), skip_tokenizer_init=True, dtype="float32", device="cpu", block_size=4, max_num_seqs=4,
            max_model_len=64, max_num_batched_tokens=STEP, kv_cache_memory_bytes=64 << 20,
        )  # fmt: skip
        greedy = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0, prompt_logprobs=0)
        outputs = llm.generate(prompts, greedy, use_tqdm=False)
    except QuireError as error:
        return {"verdict": "refused", "why": told(error).replace(str(directory), "the checkpoint")}
    except Exception as error:
        return {"verdict": "unclear", "why": f"{type(error).__name__}: {told(error)}"}
    worst = max(compare(reference, prompt, output) for prompt, output in zip(prompts, outputs, strict=True))
    found = {"architecture": architecture, "difference": f"{worst:.1e}"}
    if not worst <= TOLERANCE:
        return {"verdict": "wrong", "why": f"log-probabilities differ by {worst:.2g}", **found}
    if why := llm.llm_engine.config.facts.recomputed:
        return {"verdict": "recomputed", "why": why, **found}
    return {"verdict": "native" if architecture in architectures() else "fallback", **found}


def build(kind: str, directory: Path) -> Any:
    """transformers' model of the type, after it was written to the directory and read again."""
    import torch
    import transformers

    config = make_config(kind)
    torch.manual_seed(7)
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    model = getattr(transformers, names[kind])(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith("_bias"):  # what initializes to a constant must betray mistakes, too
                parameter.add_(torch.randn_like(parameter) * 0.1)
            if not parameter.isfinite().all():
                parameter.normal_(0.0, 0.2)
        for name, buffer in model.named_buffers():
            if "correction" in name:
                buffer.normal_(0.0, 0.1)
    model.save_pretrained(directory)
    (directory / "sweep.json").write_text(json.dumps({"vocabulary": config.get_text_config().vocab_size}))
    attention = "sdpa" if getattr(config, "alibi", False) else "eager"  # Falcon's eager adds ALiBi twice
    found = type(model).from_pretrained(directory, dtype=torch.float32, attn_implementation=attention).eval()
    with torch.inference_mode():
        found(input_ids=torch.arange(3, 9)[None], use_cache=False)  # small numbers may not fit each other
    return found


def compare(reference: Any, prompt: list[int], output: Any) -> float:
    """The largest difference of a log-probability; infinite if a drawn token is not the likeliest."""
    import torch

    drawn = output.outputs[0]
    ids = prompt + list(drawn.token_ids)
    with torch.inference_mode():
        logits = reference(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
    expected = logits.log_softmax(-1)
    reported = [step[token].logprob for step, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)]
    reported += [step[token].logprob for step, token in zip(drawn.logprobs, drawn.token_ids, strict=True)]
    chosen = expected[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    best = expected[len(prompt) - 1 : -1].max(-1).values
    late = (best - chosen[len(prompt) - 1 :]).max().item()
    if not torch.isfinite(chosen).all():
        return float("inf")
    return float(max((torch.tensor(reported) - chosen).abs().max().item(), late))


def told(error: BaseException) -> str:
    text = re.sub(r"no model family serves \w+ \(.*?\), and ", "", " ".join(str(error).split()))
    return text[:400]


def in_process(kind: str) -> dict[str, str]:
    """A child that has all imports already."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def work() -> None:
        with Path(os.devnull).open("w") as nothing:
            if not os.environ.get("SWEEP_LOUD"):
                os.dup2(nothing.fileno(), 2)
                os.dup2(nothing.fileno(), 1)
        with tempfile.TemporaryDirectory() as directory:
            try:
                sender.send(examine(kind, Path(directory)))
            except Exception as error:
                sender.send({"verdict": "unclear", "why": f"{type(error).__name__}: {told(error)}"})

    child = context.Process(target=work)
    child.start()
    sender.close()
    try:
        found: dict[str, str] = receiver.recv() if receiver.poll(SECONDS) else {"verdict": "unclear", "why": "takes too long"}
    except EOFError:
        found = {"verdict": "unclear", "why": "its process died"}
    child.kill()
    child.join()
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("types", nargs="*")
    options.add_argument("--keep", action="store_true", help=f"write {KEPT}, of which docs/models.md is made")
    asked = options.parse_args()
    os.environ.setdefault("QUIRE_LOGGING_LEVEL", "ERROR")
    warnings.simplefilter("ignore")
    import torch
    import transformers
    import transformers.models.llama.modeling_llama  # what all of them import

    import quire.llm
    import quire.models.fallback  # noqa: F401

    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    kinds = asked.types or sorted(transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    BUILD.parent.mkdir(exist_ok=True)
    results: dict[str, dict[str, str]] = json.loads(BUILD.read_text()) if BUILD.exists() else {}
    for kind in kinds:
        began = time.monotonic()
        results[kind] = in_process(kind)
        BUILD.write_text(json.dumps(results, indent=1, sort_keys=True))
        print(
            f"{kind:24} {time.monotonic() - began:5.1f} s  {results[kind]['verdict']:9} {results[kind].get('why', '')}",
            flush=True,
        )
    counts: dict[str, int] = {}
    for found in results.values():
        counts[found["verdict"]] = counts.get(found["verdict"], 0) + 1
    print(counts)
    if asked.keep:
        fields = ("verdict", "architecture", "why")
        told_of = {kind: {field: found[field] for field in fields if field in found} for kind, found in sorted(results.items())}
        kept = {"transformers": transformers.__version__, "types": told_of}
        KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    sys.exit(1 if {"wrong", "unclear"} & counts.keys() else 0)


if __name__ == "__main__":
    main()
