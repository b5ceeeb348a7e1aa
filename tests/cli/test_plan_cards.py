"""`quire plan MODEL --cards 8xh200`: which division fits, which is fastest, and what is refused."""

import json

import pytest

from quire.cli.main import main

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 8192,
    "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 131072, "torch_dtype": "bfloat16", "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}  # fmt: skip
MIXTRAL = LLAMA | {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 4, "num_attention_heads": 32, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip


@pytest.fixture
def model(tmp_path):
    def write(config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return str(tmp_path)

    return write


@pytest.fixture
def ask(model, capsys):
    def run(config, *line, code=0):
        assert main(["plan", model(config), "--load-format", "dummy", "--json", "--cards", *line]) == code
        return json.loads(capsys.readouterr().out)

    return run


def test_a_70b_model_on_8_h200(ask):
    found = ask(LLAMA, "8xh200")
    estimates = {each["flags"]: each for each in found["estimates"]}
    assert found["fastest"] == "-tp 8" and found["links"] == "nvlink4"
    assert found["most_tokens"] == found["estimates"][0]["flags"] != "-tp 8"
    assert "it does not fit" in found["refused"]["-dp 8"]
    assert {"-tp 8", "-tp 4 -dp 2", "-tp 2 -pp 4", "-pp 8"} <= estimates.keys()
    one, eight = estimates["-pp 8"], estimates["-tp 8"]
    assert 4 < eight["token_ms"] < 10 < 30 < one["token_ms"] < 45  # 141 GB at 4.8 TB/s take 29 ms
    assert 0 < eight["exchange_ms"] < eight["token_ms"] / 3 and 20 < eight["host_ms"] < 30
    rates = [each["tokens_per_s"] for each in found["estimates"]]
    assert rates == sorted(rates, reverse=True) and all(each["cache_tokens"] > 10**6 for each in estimates.values())


def test_an_objective_limits_the_load(ask):
    free, tight = ask(LLAMA, "8xh200", "-pp", "1"), ask(LLAMA, "8xh200", "-pp", "1", "--slo-tpot", "15")
    loaded = {each["flags"]: each for each in tight["estimates"]}
    assert all(each["loaded_token_ms"] <= 15 or not each["requests"] for each in loaded.values())
    assert loaded["-tp 2 -dp 4"]["requests"] == loaded["-tp 2 -dp 4"]["tokens_per_s"] == 0
    assert free["most_tokens"] == "-tp 2 -dp 4" and tight["most_tokens"] in ("-tp 4 -dp 2", "-tp 8")


def test_slow_links_cost_time(ask):
    times = {}
    for link in ("nvlink4", "pcie4"):
        [estimate] = ask(LLAMA, "8xh200", "-tp", "8", "--link", link)["estimates"]
        times[link] = estimate["token_ms"], estimate["exchange_ms"]
    assert times["pcie4"][1] > 3 * times["nvlink4"][1]
    assert times["pcie4"][0] - times["nvlink4"][0] == pytest.approx(times["pcie4"][1] - times["nvlink4"][1])


def test_experts_and_sizes_that_are_given(ask):
    found = ask(MIXTRAL, "4xh100", "-tp", "2")
    assert {each["flags"] for each in found["estimates"]} == {"-tp 2 -dp 2", "-tp 2 -pp 2", "-tp 2 -pp 2 -ep"}
    assert "share the experts" in found["refused"]["-tp 2 -dp 2 -ep"]
    found = ask(MIXTRAL, "4xh100", "-ep", "-pp", "1")
    assert {each["flags"] for each in found["estimates"]} == {"-tp 4 -ep"}


def test_several_machines(ask):
    found = ask(LLAMA, "16xh100", "--input-len", "512")
    flags = [each["flags"] for each in found["estimates"]]
    assert "-tp 8 -pp 2 --nnodes 2" in flags and "-tp 8 -dp 2 --data-parallel-size-local 1" in flags
    assert "-tp 16 --nnodes 2" in flags
    assert found["links"] == "nvlink4 and ndr" and found["input_len"] == 512


def test_a_division_whose_ranks_cannot_be_built_is_not_recommended(ask, monkeypatch):
    from quire.cli import plan_cards
    from quire.types.errors import ModelError

    def refuse(config, total, link):
        if config.ranks == 4:
            raise ModelError("a head of 7 values cannot be divided")

    monkeypatch.setattr(plan_cards, "plan_for", refuse)
    found = ask(LLAMA | {"num_hidden_layers": 8}, "4xh200", "-pp", "1")
    assert found["fastest"] == "-tp 2 -dp 2" and found["refused"] == {"-tp 4": "a head of 7 values cannot be divided"}
    assert "-tp 4" not in [each["flags"] for each in found["estimates"]]


def test_nothing_fits(ask):
    found = ask(LLAMA, "2xl4", code=1)
    assert not found["estimates"] and found["fastest"] is None and len(found["refused"]) == 3


def test_requests_longer_than_the_context_are_named_with_the_remedy(ask):
    refused = ask(LLAMA | {"num_hidden_layers": 8, "max_position_embeddings": 64}, "2xh200", "-dp", "2", code=1)["refused"]
    assert refused == {"-dp 2": "max_model_len is 64, and a request has 1,280 tokens: lower --input-len or --output-len"}


def test_what_is_printed(model, capsys):
    path = model(LLAMA | {"num_hidden_layers": 8})
    assert main(["plan", path, "--load-format", "dummy", "--cards", "2xh200"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{path} on 2 x h200, nvlink4; prompts of 1,024 tokens, answers of 256\n")
    assert f"Fastest       quire serve {path} -tp 2\n" in out and "Where sums go through the hosts" in out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (("--cards", "h200"), "--cards must be a number of GPUs up to 1024 and their name, such as 8xh200; got h200"),
        (("--cards", "0xh200"), "--cards must be a number"),
        (("--cards", "8xh300"), "--card 'h300' is unknown"),
        (("--cards", "8xmi300x"), "--link is required for mi300x"),
        (("--cards", "16xl4"), "--network is required for 16 l4"),
        (("--cards", "8xh200", "--card", "h200"), "drop --card, --memory and --device"),
        (("--cards", "8xh200", "--device", "cpu"), "drop --card, --memory and --device"),
        (("--cards", "8xh200", "--output-len", "0"), "--output-len must be at least 1; got 0"),
    ],
)
def test_what_is_refused(model, capsys, line, message):
    assert main(["plan", model(LLAMA), "--load-format", "dummy", *line]) == 2
    assert message in capsys.readouterr().err
