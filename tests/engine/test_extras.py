"""What requests bring beside tokens and parameters, from the prompt to the batch and back."""

import pytest
import torch
from tiny import open_model
from transformers import LlamaForCausalLM

from adapters import write_adapter
from quire import SamplingParams
from quire.files.adapter import digest
from quire.types.adapter import AdapterRef
from quire.types.pooling import Pooling
from quire.types.prompts import Extras, Prompt

IDS = [5 + i * 7 % 300 for i in range(21)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
MATRIX = "layers.1.self_attn.o_proj"


def prompts(*extras: Extras) -> list[Prompt]:
    return [Prompt(None, IDS, extras=each) for each in extras]


def addition(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(number)
    return torch.randn(2, 32, generator=random), torch.randn(32, 2, generator=random)


def write(directory, number: int) -> AdapterRef:
    down, up = addition(number)
    tensors = {f"base_model.model.model.{MATRIX}.lora_{half}.weight": values for half, values in (("A", down), ("B", up))}
    path = write_adapter(directory / str(number), tensors, lora_alpha=2)
    return AdapterRef(number, digest(path), path)


def expected(directory, number: int) -> list[int]:
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    if number:
        down, up = addition(number)
        model.get_submodule(f"model.{MATRIX}").weight.data += up @ down
    with torch.inference_mode():
        found = model.generate(torch.tensor([IDS]), max_new_tokens=12, min_new_tokens=12, do_sample=False)
    return found[0, len(IDS) :].tolist()


@pytest.mark.parametrize(("device", "depth"), [("cpu", 0), ("cpu", 1), pytest.param("cuda", 1, marks=pytest.mark.gpu)])
def test_rows_run_with_their_own_adapters(tiny_model, tmp_path, device, depth):
    llm = open_model(tiny_model, dtype="float32", device=device, enable_lora=True, max_loras=2, max_lora_rank=8)
    core = llm.llm_engine.core
    core.depth = depth
    for number in (1, 2):
        ref = write(tmp_path, number)
        core.executor.read_adapter(ref)
        core.executor.put_adapter(ref, number)
    wanted = [2, 0, 1, 2, 0]
    answers = {number: expected(tiny_model, number) for number in (0, 1, 2)}
    assert len({tuple(answer) for answer in answers.values()}) == 3
    for order in (wanted, wanted[::-1]):  # the second time what is cached is found, and nobody finds another's
        outputs = llm.generate(prompts(*(Extras(adapter_slot=number) for number in order)), GREEDY, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == [answers[number] for number in order]
    assert outputs[-1].num_cached_tokens == outputs[0].num_cached_tokens == 20
    core.scheduler.roster.check()


def test_an_adapter_without_room_is_not_passed_over(tiny_model):
    llm = open_model(tiny_model)
    [output] = llm.generate(prompts(Extras(adapter_slot=1)), GREEDY, use_tqdm=False)
    assert output.outputs[0].finish_reason == "error" and "started without" in output.outputs[0].error
    [output] = llm.generate(prompts(Extras(pooling=Pooling("embed", "LAST"))), GREEDY, use_tqdm=False)
    assert "a request requires pooling; the engine was started without it" in output.outputs[0].error
    assert llm.generate(prompts(Extras()), GREEDY, use_tqdm=False)[0].outputs[0].token_ids == expected(tiny_model, 0)
