"""Decoders that no family of ours serves, run by transformers over our cache; and those that must not be."""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from family import Family
from oracle import FALLBACK, FAMILIES, TINY, Sequences, in_pieces, make_checkpoint, open_checkpoint
from quire.config.facts import read_facts
from quire.files.resolve import resolve_model
from quire.load.load import load_weights
from quire.models.registry import build_model
from quire.types.errors import ModelError

IDS = torch.randint(3, 199, (2, 40), generator=torch.Generator().manual_seed(0)).tolist()
# and some that are families of our own
SERVED = FALLBACK | {
    "llama": FAMILIES["llama"],
    "gpt-oss": FAMILIES["gpt-oss"],
    "gemma2": FAMILIES["gemma2"],
    "opt": FAMILIES["opt-norms-after-narrow"],
    "phi3-longrope": FAMILIES["phi3-longrope"],  # longer than the short factors are for
}


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", SERVED)
def test_logits(tmp_path, name):
    make_checkpoint(SERVED[name], tmp_path)
    case = open_checkpoint(tmp_path, "transformers")
    assert type(case.model).__name__ == "Fallback"
    for logits, ids in zip(in_pieces(case.model, *IDS), IDS, strict=True):
        close(logits, case.expected(ids))


def test_attention_is_as_the_model_describes_it(tmp_path):
    make_checkpoint(SERVED["gpt-oss"], tmp_path)
    specs = [attention.spec for attention in build_model(read_facts(resolve_model(tmp_path)), "transformers").attentions]
    assert [spec.window for spec in specs] == [6, None, 6]
    assert all(spec.sinks for spec in specs)
    make_checkpoint(SERVED["gemma2"], tmp_path)
    spec = build_model(read_facts(resolve_model(tmp_path)), "transformers").attentions[0].spec
    assert (spec.heads, spec.kv_heads, spec.soft_cap, spec.scale) == (6, 2, 1.5, 5**-0.5)


def test_transformers_shows_no_progress(tmp_path, capfd):
    from transformers.utils import logging

    make_checkpoint(next(iter(FALLBACK.values())), tmp_path)
    facts = read_facts(resolve_model(tmp_path))
    capfd.readouterr()
    load_weights(build_model(facts, "transformers"), facts, device="cpu", dtype="float32")
    assert capfd.readouterr().err == "" and logging.is_progress_bar_enabled()


@pytest.mark.parametrize("impl", ["transformers", "quire"])
def test_an_old_configuration(tmp_path, impl):
    make_checkpoint(FALLBACK["gpt-neox"], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"rotary_pct": 0.25, "rotary_emb_base": 500}))
    case = open_checkpoint(tmp_path, impl)
    close(Sequences(case.model, 1, 40).step([(0, IDS[0])])[0], case.expected(IDS[0]))


def test_a_rotation_that_grows_with_the_text_is_the_longest_ones_from_the_beginning(tmp_path):
    rope = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}
    make_checkpoint(Family("LlamaConfig", "LlamaForCausalLM", rope), tmp_path)
    ours, theirs = (open_checkpoint(tmp_path, impl).model for impl in ("quire", "transformers"))
    close(Sequences(theirs, 1, 40).step([(0, IDS[0])])[0], Sequences(ours, 1, 40).step([(0, IDS[0])])[0])


def test_half_precision_and_random_weights(tmp_path):
    make_checkpoint(FALLBACK["olmo2"], tmp_path)
    facts = read_facts(resolve_model(tmp_path))

    def logits(**options):
        model = build_model(facts, "transformers")
        load_weights(model, facts, device="cpu", **options)
        return model, Sequences(model, 1, 40).step([(0, IDS[0])])[0]

    model, half = logits(dtype="bfloat16")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    torch.testing.assert_close(half, logits(dtype="float32")[1], atol=0.3, rtol=0.1)
    _, one = logits(dtype="float32", load_format="dummy", seed=1)
    _, again = logits(dtype="float32", load_format="dummy", seed=1)
    _, other = logits(dtype="float32", load_format="dummy", seed=2)
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"), r"missing \(1\): model.layers.1.mlp.up_proj.weight"),
        (lambda tensors: tensors.update(extra=torch.ones(2)), r"unexpected \(1\): extra"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)}), "does not fit the model.*"),
    ],
)
def test_weights_that_do_not_fit(tmp_path, change, message):
    make_checkpoint(FALLBACK["olmo2"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    facts = read_facts(resolve_model(tmp_path))
    model = build_model(facts, "transformers")
    with pytest.raises(ModelError, match=message):
        load_weights(model, facts, device="cpu", dtype="float32")


OF_ROBERTA = ("Camembert", "Data2VecText", "Roberta", "RobertaPreLayerNorm", "XLMRoberta")


@pytest.mark.parametrize("kind", OF_ROBERTA)
def test_positions_that_begin_elsewhere(tmp_path, kind):
    """Theirs begin at pad_token_id + 1, which they count from the ids unless positions are given."""
    settings = {"is_decoder": True, "num_key_value_heads": None}
    make_checkpoint(Family(f"{kind}Config", f"{kind}ForCausalLM", settings), tmp_path)
    facts = read_facts(resolve_model(tmp_path))
    message = f"{kind}ForCausalLM cannot be run.*its positions begin after the padding token's id"
    for load_format in ("auto", "dummy"):
        with pytest.raises(ModelError, match=message):
            load_weights(build_model(facts), facts, device="cpu", dtype="float32", load_format=load_format)


PLAIN = {"num_key_value_heads": None, "intermediate_size": None}
BARE = dict.fromkeys(TINY)  # its class's own sizes
REFUSED = {
    "a state, and a silent config": (
        Family("NemotronHConfig", "NemotronHForCausalLM", BARE),
        "cannot be run through transformers: it has recurrent layers",
    ),
    "a kind of its own, and a silent config": (
        Family("XLMConfig", "XLMWithLMHeadModel", BARE),
        "xlm .*not support their kind of attention",
    ),
    "attention of its own": (
        Family("GPTJConfig", "GPTJForCausalLM", PLAIN | {"rotary_dim": 4}),
        "not go through transformers' attention interface",
    ),
    "attends twice, which nobody planned": (
        Family("DiffLlamaConfig", "DiffLlamaForCausalLM"),
        "attends 6 times, but the cache is planned for 3",
    ),
    "computes with its mask": (Family("DogeConfig", "DogeForCausalLM"), "computes with its attention mask"),
    "both directions": (Family("BertConfig", "BertLMHeadModel"), "layer 0: its mask is not simply causal"),
    "recurrent": (Family("RecurrentGemmaConfig", "RecurrentGemmaForCausalLM", {"head_dim": 8}), "recurrent state"),
    "no attention": (
        Family("MambaConfig", "MambaForCausalLM", {"num_attention_heads": None}),
        "cannot be run through transformers: it has recurrent layers",
    ),
    "convolutions": (
        Family("Lfm2Config", "Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention", "conv"]}),
        "cannot be run through transformers: it has recurrent layers",
    ),
    "encoder-decoder": (Family("T5Config", "T5ForConditionalGeneration"), "encoder-decoder models are not supported"),
    "latent attention": (Family("MiniCPM3Config", "MiniCPM3ForCausalLM"), "latent attention .kv_lora_rank. is not supported"),
    "no language model": (Family("LlamaConfig", "LlamaForSequenceClassification"), "for llama that is LlamaForCausalLM"),
}


def write_config(family, directory):
    import transformers

    settings = {name: value for name, value in (TINY | family.settings).items() if value is not None}
    config = getattr(transformers, family.config)(**settings).to_dict() | {"architectures": [family.model]}
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("reason", REFUSED)
def test_refused(tmp_path, reason):
    family, message = REFUSED[reason]
    write_config(family, tmp_path)
    with pytest.raises(ModelError, match=message):
        build_model(read_facts(resolve_model(tmp_path, weights=False)), "transformers")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "novel"}, "does not know the model_type 'novel'"),
        ({"model_type": "novel", "auto_map": {"AutoModelForCausalLM": "novel.Novel"}}, "code from its own repository"),
    ],
)
def test_what_transformers_does_not_know(tmp_path, changes, message):
    write_config(Family("LlamaConfig", "NovelForCausalLM"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelError, match=r"no model family serves NovelForCausalLM \(`quire models`.*\).*" + message):
        build_model(read_facts(resolve_model(tmp_path, weights=False)))


def test_without_transformers_the_message_says_what_to_install(tmp_path, monkeypatch):
    write_config(FALLBACK["persimmon"], tmp_path)
    for name in [name for name in sys.modules if name.startswith("quire.models.fallback")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelError, match=r"no model family serves Persimmon.*pip install 'quire\[transformers\]'"):
        build_model(read_facts(resolve_model(tmp_path, weights=False)))


def test_masks_are_described_by_what_they_hide():
    from transformers.masking_utils import chunked_causal_mask_function, sliding_window_causal_mask_function

    from quire.models.fallback_checks import Mask, _describe_mask

    window = sliding_window_causal_mask_function(300)
    assert _describe_mask(mask_function=window, local_size=300) == Mask(300)
    assert not _describe_mask(mask_function=window, local_size=299).causal
    chunks = chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.int))
    assert not _describe_mask(mask_function=chunks, local_size=8).causal


class Toy(nn.Module):
    """One layer that calls whatever is installed as attention."""

    def __init__(self, *, shift=False, positions=True, counts=False, first=0):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.shift, self.positions, self.counts, self.first = shift, positions, counts, first

    def forward(self, input_ids, position_ids, use_cache):
        assert not use_cache
        x = self.embed(input_ids)
        if self.shift:
            x = x + x.roll(1, dims=1)
        if position_ids is None:
            position_ids = torch.arange(x.shape[1])[None] + self.first
        if self.positions:
            x = x + position_ids[..., None]
        if self.counts:
            x = x + torch.arange(x.shape[1])[:, None]
        heads = x.view(1, -1, 2, 4).transpose(1, 2)
        return self.quire_attention(self, heads, heads, heads, {})


@pytest.mark.parametrize(
    ("toy", "message"),
    [
        (Toy(), None),
        (Toy(shift=True), "tokens influence each other outside of attention"),
        (Toy(positions=False), "ignores position_ids"),
        (Toy(counts=True), "counts positions itself"),
        (Toy(first=2), "its positions do not begin at 0"),
    ],
)
def test_tokens_meet_in_attention_only(toy, message):
    from quire.models.fallback_checks import check_tokens_meet_in_attention_only

    def check():
        check_tokens_meet_in_attention_only(toy, [toy], 16, torch.device("cpu"))

    if message is None:
        check()
    else:
        with pytest.raises(ModelError, match=message):
            check()
