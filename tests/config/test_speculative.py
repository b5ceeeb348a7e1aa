"""speculative_config: what is taken, what is completed, and what is refused by name."""

import argparse
import json

import pytest

from quire.config.args import EngineArgs, add_cli_arguments
from quire.config.resolve import resolve
from quire.device.registry import open_device
from quire.types.errors import ConfigError


def read(**values):
    return EngineArgs(**values).speculation()


def config(**values):
    return read(speculative_config=values)


def test_nothing_is_asked_for():
    for values in ({}, {"speculative_config": None}, {"spec_tokens": 0}):
        assert read(**values) is None


def test_what_is_left_out_is_completed():
    assert (config(method="ngram").prompt_lookup_min, config(method="ngram").prompt_lookup_max) == (5, 5)
    looked_up = config(method="ngram", prompt_lookup_max=3, num_speculative_tokens=7)
    assert (looked_up.prompt_lookup_min, looked_up.prompt_lookup_max, looked_up.num_speculative_tokens) == (3, 3, 7)
    assert config(model="[ngram]", num_speculative_tokens=2).method == "ngram"
    assert config(method="suffix").num_speculative_tokens == 24
    assert config(method="suffix", suffix_decoding_max_tree_depth=6).num_speculative_tokens == 6
    assert config(method="synthetic", synthetic_acceptance_rates=[0.5]).synthetic_acceptance_rates == (0.5,) * 4
    rate = config(method="synthetic", synthetic_acceptance_length=2.0).synthetic_acceptance_rates[0]
    assert sum(rate**i for i in range(5)) == pytest.approx(2.0)
    assert read(spec_method="ngram", spec_tokens=3, speculative_config={"prompt_lookup_min": 2}).num_speculative_tokens == 3
    assert config(method="ngram", num_speculative_tokens_per_batch_size=[[1, 4, 3]]).num_speculative_tokens_per_batch_size == (
        (1, 4, 3),
    )
    assert config(method="ngram", draft_tensor_parallel_size=1, rejection_sample_method="standard", quantization=None)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"metod": "ngram"}, r"has no 'metod'; did you mean method\?"),
        ({"xyzzy": 1}, r"has no 'xyzzy'; it has method, model, revision, num_speculative_tokens"),
        ({"num_speculative_tokens": 3}, r"needs a method \(.*\): ngram, suffix"),
        ({"method": "nosuch"}, r"method must be one of ngram, suffix, .*got 'nosuch'"),
        ({"method": "dflash", "model": "x"}, r"'dflash' is not built; built are ngram"),
        ({"method": "eagle3"}, r"requires a draft model or head"),
        ({"method": "deepseek_mtp", "model": "x"}, r"model is not for method 'mtp'"),
        ({"method": "medusa", "model": "x", "use_heterogeneous_vocab": True}, r"vocab is for method 'draft_model'"),
        (
            {"method": "ngram", "num_speculative_tokens": 0},
            r"must be an integer from 1 to 64, got 0",
        ),
        ({"method": "ngram", "num_speculative_tokens": True}, r"num_speculative_tokens must be an integer"),
        (
            {"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 2},
            r"lookup_min 4 is above prompt_lookup_max 2",
        ),
        ({"method": "suffix", "prompt_lookup_min": 4}, r"prompt_lookup_min is for method 'ngram', but the method is 'suffix'"),
        ({"method": "ngram", "model": "m"}, r"model is not for method 'ngram'"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 1.5}, r"min_token_prob must be a number from 0 to 1"),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": float("nan")}, r"max_spec_factor must be a number"),
        ({"method": "synthetic"}, r"needs synthetic_acceptance_rates or"),
        ({"method": "synthetic", "synthetic_acceptance_rates": [0.1, 0.2]}, r"has 2 rates for 4 drafts"),
        ({"method": "synthetic", "synthetic_acceptance_length": 9}, r"length 9 is more than the 5 tokens of 4 accepted drafts"),
        ({"method": "custom_class"}, r"model must be 'package.module:Class'"),
        ({"method": "draft_model"}, r"requires a draft model or head: .*--spec-model"),
        ({"method": "ngram", "revision": "main"}, r"revision is not for method 'ngram'"),
        ({"method": "ngram", "rejection_sample_method": "block"}, r"rejection_sample_method='block' is not supported"),
        ({"method": "ngram", "draft_tensor_parallel_size": 2}, r"replicated on every rank"),
        ({"method": "ngram", "disable_by_batch_size": 0}, r"disable_by_batch_size must be an integer of at least 1"),
        ({"method": "ngram", "num_speculative_tokens_per_batch_size": [[3, 1, 2]]}, r"must be a list of \[from, to"),
        ({"method": 5}, r"method must be a string"),
    ],
)
def test_what_is_wrong_is_named(values, message):
    with pytest.raises(ConfigError, match=message):
        config(**values)


def test_flags():
    parser = argparse.ArgumentParser()
    add_cli_arguments(parser)
    args = EngineArgs.from_cli(parser.parse_args(["-sc", '{"method": "ngram"}', "--spec-tokens", "2"]))
    assert (args.speculation().method, args.speculation().num_speculative_tokens) == ("ngram", 2)
    with pytest.raises(ConfigError, match=r"spec_tokens is 2, but speculative_config.num_speculative_tokens is 3"):
        read(speculative_config={"method": "ngram", "num_speculative_tokens": 3}, spec_tokens=2)


def test_conflicts(tmp_path):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 100}
    described = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 64, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(described))

    def resolved(device="cpu", **values):
        args = EngineArgs(model=str(tmp_path), load_format="dummy", **{"spec_method": "ngram", **values})
        return resolve(args, lambda: device, lambda name: open_device(name).facts(memory=0))

    assert (resolved().depth, resolved("cuda").depth, resolved("cuda", spec_method=None).depth) == (0, 1, 1)
    assert resolved(async_scheduling=True).depth == 1
    with pytest.raises(ConfigError, match=r"num_speculative_tokens 9 and a token before them do not fit"):
        resolved(spec_tokens=9, max_num_batched_tokens=8, max_num_seqs=2)

    def with_draft(device="cpu", async_scheduling=None, skip_tokenizer_init=False, use_heterogeneous_vocab=None, **changes):
        directory = tmp_path / "draft"
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text(json.dumps(described | changes))
        asked = {"model": str(directory), "use_heterogeneous_vocab": use_heterogeneous_vocab}
        more = {"async_scheduling": async_scheduling, "skip_tokenizer_init": skip_tokenizer_init}
        return resolved(device, spec_method=None, speculative_config=asked, **more)

    assert len(with_draft(num_hidden_layers=3).draft_facts.layers) == 3
    assert (with_draft("cuda").depth, with_draft(async_scheduling=True).depth) == (1, 1)  # while nobody drafts
    with pytest.raises(ConfigError, match=r"async_scheduling plans .*medusa drafts from them"):
        with_draft(async_scheduling=True, model_type="medusa", medusa_num_heads=4, medusa_num_layers=1)
    by_text = with_draft(vocab_size=99)
    assert by_text.text_drafter.vocab_size == 99 and by_text.draft_facts is None and by_text.depth == 0
    with pytest.raises(ConfigError, match=r"has 99 tokens, but the model has 100"):
        with_draft(vocab_size=99, use_heterogeneous_vocab=False)
    assert with_draft(vocab_size=99, async_scheduling=True).depth == 1
    with pytest.raises(ConfigError, match=r"drafts by text, for which both tokenizers are needed; drop skip_tokenizer_init"):
        with_draft(vocab_size=99, skip_tokenizer_init=True)
    with pytest.raises(ConfigError, match=r"the draft model has 32 positions, fewer than max_model_len 64"):
        with_draft(max_position_embeddings=32)
    windowed = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 6}
    with pytest.raises(ConfigError, match=r"only models whose layers attend to everything"):
        with_draft(**windowed)
