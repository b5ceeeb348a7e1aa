"""On a GPU: rows that norms and gates round for the product behind them give the tokens of those that it rounds itself."""

import pytest

from quantized_checkpoints import write
from quire import LLM, SamplingParams

pytestmark = pytest.mark.gpu

PROMPTS = [[(7 * row + at * at) % 300 + 2 for at in range(size)] for row, size in enumerate((1, 3, 20, 40, 90, 17, 33, 64) * 8)]
PARAMS = SamplingParams(temperature=0, max_tokens=12, logprobs=1, ignore_eos=True, detokenize=False)


def run(directory, **args):
    llm = LLM(str(directory), dtype="bfloat16", device="cuda", skip_tokenizer_init=True, max_num_seqs=64, max_model_len=128,
              max_num_batched_tokens=256, kv_cache_memory_bytes=1 << 26, async_scheduling=False, **args)  # fmt: skip
    found = []
    for prompts in (PROMPTS[:1], PROMPTS, PROMPTS[:20]):  # rows of one token: one, and more than are rounded
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], PARAMS, use_tqdm=False)
        found += [(list(out.outputs[0].token_ids), out.outputs[0].cumulative_logprob) for out in outputs]
    return found


@pytest.fixture
def count(monkeypatch):
    """How often rows were rounded by whom."""
    from quire.ops.kernels import norm, rounding

    counts = {}

    def watch(module, name):
        own, counts[name] = getattr(module, name), 0

        def counted(*arguments):
            counts[name] += 1
            return own(*arguments)

        monkeypatch.setattr(module, name, counted)

    watch(norm, "rounded_norm")
    watch(rounding, "gate_rounded")
    watch(rounding, "round_rows")
    watch(rounding, "round_groups")
    return counts


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("scheme", ["ct-fp8-channel", "fp8-tensor", "fp8-block", "ct-w8a8", "online"])
def test_the_same_tokens(scheme, eager, tmp_path, count, monkeypatch):
    directory = write("awq" if scheme == "online" else scheme, tmp_path)
    args = {"enforce_eager": eager}
    if scheme == "online":
        directory, args["quantization"] = directory.parent / "floats", "fp8"
    got = run(directory, **args)
    before = dict(count)
    assert before["rounded_norm"] and bool(before["gate_rounded"]) == (scheme == "fp8-block")
    monkeypatch.setattr("quire.layers.quant.stored.rounding_for", lambda *_: None)
    expected = run(directory, **args)
    assert all(count[name] == before[name] for name in ("rounded_norm", "gate_rounded"))
    apart = "round_groups" if scheme == "fp8-block" else "round_rows"
    assert count[apart] - before[apart] > before[apart] > 0  # of what attention gives there is no other way
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in expected]
    assert got == expected


def test_with_room_for_adapters(tmp_path, count):
    """They read rows as they are, and no step has others."""
    directory = write("ct-fp8-channel", tmp_path)
    plain = run(directory, enforce_eager=True)
    before = dict(count)
    assert run(directory, enforce_eager=True, enable_lora=True, max_lora_rank=8) == plain
    assert count["round_rows"] > before["round_rows"]
    assert all(count[name] == before[name] for name in ("rounded_norm", "gate_rounded"))
