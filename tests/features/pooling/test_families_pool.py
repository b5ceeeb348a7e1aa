"""Checkpoints without an LM head, as transformers saves them, of families whose tensors have different names."""

import numpy as np
import pytest
import torch
import transformers

from oracle import FAMILIES, MORE, TINY
from quire import LLM, PoolingParams
from recurrent_families import RECURRENT

IDS = [3 + i * 7 % 190 for i in range(23)]
ALL = {**FAMILIES, **MORE, **RECURRENT}
HEADS = {
    "embed": transformers.AutoModel,
    "classify": transformers.AutoModelForSequenceClassification,
    "token_classify": transformers.AutoModelForTokenClassification,
}
CASES = [
    ("gpt2", "embed"), ("gpt2", "token_classify"), ("opt", "classify"), ("bloom", "token_classify"), ("gemma2", "classify"),
    ("mixtral", "classify"), ("deepseek-v3", "embed"), ("mamba", "embed"), ("qwen3-moe", "token_classify"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "task"), CASES)
def test_a_family_pools(tmp_path, name, task):
    family = ALL[name]
    torch.manual_seed(0)
    settings = {key: value for key, value in {**TINY, **family.settings}.items() if value is not None}
    config = getattr(transformers, family.config)(**settings)
    config.num_labels = 3
    model = HEADS[task].from_config(config).eval().float()
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        out = model(torch.tensor([IDS]))
    right = torch.nn.functional.normalize(out.last_hidden_state[0, -1], dim=0) if task == "embed" else out.logits[0].softmax(-1)
    args = {"dtype": "float32", "block_size": 4, "max_num_seqs": 4, "num_gpu_blocks_override": 64, "max_num_batched_tokens": 16}
    with LLM(str(tmp_path), device="cpu", skip_tokenizer_init=True, **args) as llm:
        [found] = llm.encode([IDS], PoolingParams(task=task), use_tqdm=False)
    np.testing.assert_allclose(found.outputs.data, right.numpy(), atol=1e-5)
