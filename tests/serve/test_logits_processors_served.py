"""Logits processors in a server: vllm_xargs in every protocol, refusals, failures, and the loss of the engine."""

import os
import signal

import pytest

from quire import SamplingParams
from quire.types.sampling import RequestOutputKind
from serving import Running, error_of

CODE = '''
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

class Counting(AdapterLogitsProcessor):
    """Token i of the answer is first + i: its state is the tokens alone."""

    @classmethod
    def validate_params(cls, sampling_params):
        first = (sampling_params.extra_args or {}).get("first", 0)
        if not isinstance(first, int):
            raise ValueError(f"first must be an integer; got {first!r}")

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        extra = params.extra_args or {}
        if "first" not in extra:
            return None

        def count(output, logits):
            if len(output) == extra.get("fail"):
                raise RuntimeError("on purpose")
            token = extra["first"] + len(output)
            kept = logits[token].clone()
            logits[:] = float("-inf")
            logits[token] = kept
            return logits

        return count
'''


@pytest.fixture(scope="module")
def running(serve_model, tmp_path_factory):
    from plugin_packages import Packages

    with pytest.MonkeyPatch.context() as patch:
        packages = Packages(tmp_path_factory.mktemp("packages"), patch)
        packages.add("counting", "[vllm.logits_processors]\ncount = counting:Counting\n", CODE)
        running = Running(serve_model, quick=False)  # a forked engine does not see the package
        yield running
        running.close()
        packages.forget()


def completion(**more):
    base = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 5, "ignore_eos": True, "return_token_ids": True}
    return {**base, "temperature": 0, **more}


def test_every_protocol_has_the_field(running):
    http, xargs = running.http, {"vllm_xargs": {"first": 60}}
    answer = http.post("/v1/completions", json=completion(n=2, temperature=1, seed=4, **xargs)).json()
    assert [choice["token_ids"] for choice in answer["choices"]] == [[60, 61, 62, 63, 64]] * 2
    expected = answer["choices"][0]["text"]
    messages = [{"role": "user", "content": "the quick"}]
    chat = {"model": "tiny", "messages": messages, "max_tokens": 5, "ignore_eos": True, **xargs}
    assert http.post("/v1/chat/completions", json=chat).json()["choices"][0]["message"]["content"] == expected
    response = {"model": "tiny", "input": "the quick", "max_output_tokens": 5, "ignore_eos": True, **xargs}
    assert http.post("/v1/responses", json=response).json()["output"][-1]["content"][0]["text"] == expected
    plain = http.post("/v1/completions", json=completion()).json()["choices"][0]["token_ids"]
    assert plain != [60, 61, 62, 63, 64] and len(plain) == 5


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_processor_refuses_is_a_400(stream, running):
    response = running.http.post("/v1/completions", json=completion(stream=stream, vllm_xargs={"first": "x"}))
    error = error_of(response)
    assert response.status_code == 400 and error["param"] == "vllm_xargs"
    assert error["message"].startswith("vllm_xargs: refused by the logits processor count (counting:Counting, counting 1.0)")
    assert error["message"].endswith("first must be an integer; got 'x'")
    assert running.http.post("/v1/completions", json=completion(vllm_xargs=[1])).status_code == 400


def test_beams_are_refused(running):
    for fields in ({}, {"vllm_xargs": {"first": 60}}):
        response = running.http.post("/v1/completions", json=completion(use_beam_search=True, n=2, **fields))
        assert response.status_code == 400
    error = error_of(running.http.post("/v1/completions", json=completion(use_beam_search=True, n=2)))
    assert error["param"] == "use_beam_search" and "beam search is not supported with logits processors" in error["message"]
    assert "counting 1.0" in error["message"]


def test_a_failing_processor_is_a_500_of_its_request_only(running):
    response = running.http.post("/v1/completions", json=completion(vllm_xargs={"first": 60, "fail": 2}))
    assert response.status_code == 500
    assert "the logits processor count (counting:Counting, counting 1.0) failed: RuntimeError: on purpose" in response.text
    assert running.http.post("/v1/completions", json=completion()).status_code == 200


def test_state_is_rebuilt_when_the_engine_is_lost(running):
    params = SamplingParams(
        max_tokens=80, temperature=0, ignore_eos=True, extra_args={"first": 60}, output_kind=RequestOutputKind.CUMULATIVE
    )

    async def generate():
        killed = False
        async for output in running.llm.generate({"prompt_token_ids": [5, 6, 7]}, params, "lost"):
            if not killed and len(output.outputs[0].token_ids) >= 5:
                killed = True
                os.kill(running.llm.engine_pid, signal.SIGKILL)
        return output.outputs[0].token_ids

    assert [*running.call(generate())] == [*range(60, 140)]
    assert running.llm.restarts == 1
