import math

import msgspec
import pytest

from quire.types.errors import InvalidParameter, NotSupported
from quire.types.sampling import BeamSearchParams, RequestOutputKind, SamplingParams

DEFAULTS = {
    "n": 1, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "temperature": 1.0, "top_p": 1.0,
    "top_k": 0, "min_p": 0.0, "seed": None, "ignore_eos": False, "max_tokens": 16, "min_tokens": 0, "logprobs": None,
    "prompt_logprobs": None, "detokenize": True, "skip_special_tokens": True, "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False, "logit_bias": None, "allowed_token_ids": None, "stop": [], "stop_token_ids": [],
    "bad_words": [], "output_kind": RequestOutputKind.CUMULATIVE, "flat_logprobs": False, "stream_interval": None,
}  # fmt: skip


def test_defaults_are_those_of_vllm():
    params = SamplingParams()
    assert {name: getattr(params, name) for name in DEFAULTS} == DEFAULTS


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0), ("n", -1), ("n", 1.5), ("n", True), ("n", 16385),
        ("presence_penalty", 2.1), ("presence_penalty", math.nan), ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0), ("repetition_penalty", -1.0), ("repetition_penalty", math.inf),
        ("temperature", -0.1), ("temperature", 2.1), ("temperature", math.nan), ("temperature", "hot"),
        ("top_p", 0.0), ("top_p", 1.1), ("top_p", math.nan), ("top_k", -2), ("top_k", 1.0),
        ("min_p", -0.1), ("min_p", 1.1), ("seed", 2**64), ("seed", "x"),
        ("max_tokens", 0), ("max_tokens", -5), ("max_tokens", 2.0), ("min_tokens", -1), ("min_tokens", 17),
        ("logprobs", -2), ("prompt_logprobs", -2), ("stream_interval", 0),
        ("stop", ""), ("stop", ["a", ""]), ("stop", [1]), ("stop", 3),
        ("stop_token_ids", [-1]), ("stop_token_ids", ["1"]), ("allowed_token_ids", []), ("allowed_token_ids", [1.0]),
        ("logprob_token_ids", list(range(129))), ("bad_words", [""]), ("bad_words", ["x"] * 129),
        ("logit_bias", {"x": 1.0}), ("logit_bias", {1: math.nan}), ("logit_bias", [1]),
        ("ignore_eos", 1), ("output_kind", "delta"),
        ("repetition_detection", {"max_pattern_size": 3, "min_count": 1}),
        ("repetition_detection", {"max_pattern_size": 1, "min_pattern_size": 2, "min_count": 2}),
    ],
)  # fmt: skip
def test_bad_values_are_refused_by_name(field, value):
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(**{field: value})
    assert caught.value.parameter == field
    assert isinstance(caught.value, ValueError)
    assert field in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("thinking_token_budget", 5),
        ("routed_experts_prompt_start", 1), ("trace_decode_token_ids", [1]),
    ],
)  # fmt: skip
def test_what_is_not_built_is_refused(field, value):
    with pytest.raises(NotSupported, match=field):
        SamplingParams(**{field: value})


def test_greedy_resets_the_filters():
    params = SamplingParams(temperature=0.0, top_p=0.3, top_k=5, min_p=0.2)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.0, 1.0, 0, 0.0)
    assert params.greedy


def test_greedy_with_several_answers_is_refused():
    with pytest.raises(InvalidParameter, match="n must be 1"):
        SamplingParams(temperature=0.0, n=2)


def test_tiny_temperature_is_raised_with_a_warning():
    with pytest.warns(UserWarning, match=r"0\.01"):
        assert SamplingParams(temperature=0.001).temperature == 0.01


def test_values_are_normalized():
    params = SamplingParams(stop="x", seed=-1, logprobs=True, logit_bias={"5": 1000, 6: -1000})
    assert params.stop == ["x"]
    assert params.seed is None
    assert params.logprobs == 1
    assert params.logit_bias == {5: 100.0, 6: -100.0}


def test_stop_needs_text():
    with pytest.raises(InvalidParameter, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


def test_prompt_logprobs_skip_the_cache():
    assert SamplingParams().reads_prefix_cache
    assert not SamplingParams(prompt_logprobs=0).reads_prefix_cache
    with pytest.raises(InvalidParameter, match="every prompt position"):
        SamplingParams(prompt_logprobs=0, skip_reading_prefix_cache=False)
    assert not SamplingParams(skip_reading_prefix_cache=True).reads_prefix_cache


def test_a_clone_is_private_and_travels():
    params = SamplingParams(stop=["a"], logit_bias={1: 2.0}, seed=7)
    clone = params.clone()
    clone.stop.append("b")
    assert params.stop == ["a"]
    assert SamplingParams(skip_clone=True).clone() is not None
    wire = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(wire, type=SamplingParams) == params


def test_beam_parameters_are_checked():
    assert BeamSearchParams(beam_width=2, max_tokens=3).length_penalty == 1.0
    with pytest.raises(InvalidParameter, match="beam_width"):
        BeamSearchParams(beam_width=0, max_tokens=3)
    with pytest.raises(InvalidParameter, match="max_tokens"):
        BeamSearchParams(beam_width=1, max_tokens=0)
    for penalty in (400, -1e308):
        with pytest.raises(InvalidParameter, match="length_penalty must be finite, at least -32, at most 32"):
            BeamSearchParams(beam_width=1, max_tokens=1, length_penalty=penalty)


def test_an_unknown_argument_is_named_with_the_nearest():
    with pytest.raises(TypeError, match="SamplingParams has no argument 'temprature'; did you mean 'temperature'") as caught:
        SamplingParams(temprature=1.0)
    assert isinstance(caught.value, InvalidParameter) and caught.value.parameter == "temprature"
    with pytest.raises(TypeError, match="no argument 'colour'; it has n, "):
        SamplingParams(0, colour=2)


@pytest.mark.parametrize(
    ("name", "successor"),
    [
        ("guided_json", r"structured_outputs=StructuredOutputsParams\(json=...\)"),
        ("guided_decoding", r"structured_outputs=StructuredOutputsParams\(...\)"),
        ("best_of", "all n choices are returned"),
        ("logits_processors", "in extra_args"),
        ("truncate_prompt_tokens", "tokenization_kwargs"),
    ],
)
def test_arguments_that_vllm_has_or_had_name_what_there_is_instead(name, successor):
    with pytest.raises(TypeError, match=f"no argument '{name}': .*{successor}"):
        SamplingParams(**{name: 2})
