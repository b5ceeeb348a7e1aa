"""Pages in host memory next to adapters and images, whose pages have keys of their own."""

import json
from pathlib import Path

from PIL import Image
from test_host_tier import CONVERSATIONS, GREEDY, SMALL, TIER, counts

from adapters import halves, write_adapter
from quire import LLM, LoRARequest, SamplingParams

READER = Path(__file__).parents[2] / "fixtures" / "reader-llava"


def test_pages_of_adapters(model: str, tmp_path: Path):
    """Each adapter answers the same conversations with its own pages."""
    config = json.loads((Path(model) / "config.json").read_text())
    size, adapters = config["hidden_size"], [None]
    for number in (1, 2):
        tensors = {}
        for layer in range(config["num_hidden_layers"]):
            tensors |= halves(f"base_model.model.model.layers.{layer}.self_attn.o_proj", size, size, 4, layer + 7 * number)
        path = write_adapter(tmp_path / str(number), tensors, r=4, lora_alpha=64, target_modules=["o_proj"])
        adapters.append(LoRARequest(f"adapter-{number}", number, path))

    def answers(**tier):
        llm = LLM(model, enable_lora=True, max_loras=2, **SMALL, **tier)
        prompts, found = [{"prompt_token_ids": tokens} for tokens in CONVERSATIONS], []
        for adapter in adapters * 3:
            outputs = llm.generate(prompts, GREEDY, lora_request=adapter, use_tqdm=False)
            found.append([list(output.outputs[0].token_ids) for output in outputs])
        tiers = counts(llm)
        llm.llm_engine.shutdown()
        return found, tiers

    expected, _ = answers()
    found, tiers = answers(**TIER)
    assert found == expected and tiers.fetched > 0 and tiers.lost == 0
    assert len({json.dumps(each) for each in expected[:3]}) == 3


def test_pages_of_images():
    expected = json.loads((READER / "expected_png.json").read_text())
    prompts = [
        {"prompt": "<image>?", "multi_modal_data": {"image": Image.open(READER / "pictures" / f"{number:02d}.png")}}
        for number in range(len(expected))
    ]
    small = {"device": "cpu", "dtype": "float32", "max_num_seqs": 4, "block_size": 4, "num_gpu_blocks_override": 40}
    with LLM(str(READER), **small, **TIER) as llm:
        for _ in range(2):
            outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=4), use_tqdm=False)
            assert [list(output.outputs[0].token_ids) for output in outputs] == [each["greedy"] for each in expected]
        assert counts(llm).fetched > 0 and counts(llm).lost == 0
