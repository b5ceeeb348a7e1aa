"""Whatever the weather, every request gets the tokens it would get alone, exactly one last word, and all pages come back.

QUIRE_EXAMPLES=20000 runs that many random workloads of each kind instead of the usual number.
"""

import os
from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from workload import EOS, Workload, run, workloads

examples = settings(
    max_examples=int(os.environ.get("QUIRE_EXAMPLES", "100")),
    derandomize="QUIRE_EXAMPLES" not in os.environ,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def check_against_oracle(work: Workload) -> None:
    heard = run(work)
    assert set(heard) == {visit.spec.id for visit in work.visits}
    for visit in work.visits:
        spec, got = visit.spec, heard[visit.spec.id]
        whole = work.answer(spec)
        answer, unscored = whole[len(spec.resumed) :], list(spec.prompt[1 + spec.scored :])
        assert got.last is not None
        pooling, places = spec.extras.pooling, list(range(len(spec.prompt)))
        pooled = [] if pooling is None else places if pooling.reads_all else places[-1:]
        assert got.pooled == (pooled if got.last.finish_reason not in ("abort", "error") else [])
        if got.last.finish_reason in ("abort", "error"):
            assert got.last.finish_reason == "error" or visit.aborted is not None
            assert got.last.error is None or "on order" in got.last.error
            assert got.tokens == answer[: len(got.tokens)]
            assert got.scores == unscored[: len(got.scores)]
            continue
        assert got.tokens == answer
        assert got.last.finish_reason == (
            "stop" if not spec.samples or (whole[-1] == EOS and len(whole) > spec.params.min_tokens) else "length"
        )
        assert got.scores == ([] if spec.params.prompt_logprobs is None else unscored)
        assert got.last.cached_tokens < len(spec.prompt)
        assert got.last.cached_tokens == 0 or spec.params.reads_prefix_cache


@examples
@given(workloads())
def test_every_request_gets_its_own_tokens(work: Workload) -> None:
    check_against_oracle(work)


@examples
@given(workloads(faulty=True))
def test_failures_stay_with_their_requests(work: Workload) -> None:
    check_against_oracle(work)


@examples
@given(workloads(faulty=True), st.sampled_from((0, 1, 2, 5)))
def test_recurrent_states_are_those_of_the_tokens_before_them(work: Workload, snapshots: int) -> None:
    check_against_oracle(replace(work, drafts=0, snapshots=snapshots))


@examples
@given(workloads(media=True))
def test_requests_with_media_get_their_own_tokens(work: Workload) -> None:
    check_against_oracle(work)


@examples
@given(workloads(faulty=True, media=True))
def test_embeddings_are_encoded_again_after_failures(work: Workload) -> None:
    check_against_oracle(work)


@examples
@given(workloads(faulty=True, media=True), st.sampled_from((0, 1, 2, 5)))
def test_recurrent_states_depend_on_media(work: Workload, snapshots: int) -> None:
    check_against_oracle(replace(work, drafts=0, snapshots=snapshots))
