"""A family is one card: what a made-up one needs to be read, run and listed."""

import pytest
import torch

from family import Alias, Family
from oracle import make_checkpoint, open_checkpoint
from other_names import reconfigured, renamed
from quire import LLM, SamplingParams
from quire.cli import models
from quire.config import families
from quire.config.families.card import Card
from quire.config.transformers_types import class_of
from quire.types.errors import ConfigError

ACME = Card(
    "Acme 1",
    "dense",
    "llama:Llama",
    ("AcmeForCausalLM",),
    {"acme": {"rope_theta": 500.0, "hidden_act": "silu", "rms_norm_eps": 1e-5}},
    names={"acme_heads": "num_attention_heads", "acme_key_heads": "num_key_value_heads", "acme_width": "intermediate_size"},
    derive=lambda config: {"hidden_size": config["acme_head_size"] * config["acme_heads"]},
    weights=((r"^acme\.blocks\.", "model.layers."), (r"\.mixer\.", ".self_attn."), (r"^acme\.", "model.")),
)
FIELDS = {"acme_heads": 6, "acme_key_heads": 2, "acme_width": 80, "acme_head_size": 8}
COMMON = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "hidden_size", "head_dim", "rope_parameters",
          "hidden_act", "rms_norm_eps")  # fmt: skip
CHECKPOINT = Family(
    "LlamaConfig",
    "LlamaForCausalLM",
    {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "rms_norm_eps": 1e-5},
    alias=Alias(
        "AcmeForCausalLM",
        reconfigured("acme", *COMMON, **FIELDS),
        renamed((r"^model\.layers\.", "acme.blocks."), (r"^model\.", "acme."), (r"\.self_attn\.", ".mixer.")),
    ),
)
IDS = torch.randint(3, 180, (30,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture
def acme(packages):
    """The registry with one card more, and without it afterwards."""
    families.register(ACME)
    return ACME


def test_a_card_makes_a_family(acme, tmp_path):
    make_checkpoint(CHECKPOINT, tmp_path)
    with torch.inference_mode():
        expected = open_checkpoint(tmp_path).reference.generate(
            torch.tensor([IDS]), attention_mask=torch.ones(1, len(IDS), dtype=torch.long), do_sample=False, max_new_tokens=8,
            min_new_tokens=8, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    llm = LLM(str(tmp_path), skip_tokenizer_init=True, dtype="float32", device="cpu", model_impl="quire",
              kv_cache_memory_bytes=8 << 20)  # fmt: skip
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    assert list(llm.generate(IDS, greedy, use_tqdm=False)[0].outputs[0].token_ids) == expected[0, len(IDS) :].tolist()


def test_a_card_is_listed(acme):
    assert models.gather()["architectures"]["AcmeForCausalLM"] == "quire.models.llama:Llama"
    assert class_of("acme") == "AcmeForCausalLM"


def test_a_card_does_not_take_the_names_of_another(acme):
    message = r"'Acme 2' \(quire.models.llama:Qwen3\) has the architecture 'AcmeForCausalLM' of the family 'Acme 1'"
    with pytest.raises(ConfigError, match=message):
        families.register(Card("Acme 2", "dense", "llama:Qwen3", ("AcmeForCausalLM",), {"acme2": {}}))


def test_without_registration_there_is_no_such_family():
    assert "AcmeForCausalLM" not in families.architectures() and "acme" not in families.model_types()
