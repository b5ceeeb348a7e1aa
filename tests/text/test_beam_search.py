"""The rules of a beam search, without a model."""

from quire.text.beam_search import BeamSearch
from quire.types.outputs import Logprob
from quire.types.sampling import BeamSearchParams

EOS = 0


def search(width=1, rounds=2, longest=100, **options):
    return BeamSearch([7, 7], BeamSearchParams(beam_width=width, max_tokens=rounds, **options), [EOS], longest)


def table(**logprobs):
    return {int(name[1:]): Logprob(value) for name, value in logprobs.items()}


def found(one):
    return [beam.tokens for beam in one.best()]


def test_an_end_counts_however_it_ranks():
    """The end is less likely than the continuation, which turns out to be a bad one."""
    one = search()
    one.advance([table(t1=-1.0, t0=-2.0)])
    one.advance([table(t1=-50.0, t2=-60.0)])
    assert not one.open and found(one) == [(EOS,)]
    assert one.shown(one.best()[0]) == ()
    ignoring = search(ignore_eos=True)
    ignoring.advance([table(t1=-1.0, t0=-2.0)])
    ignoring.advance([table(t1=-50.0, t2=-60.0)])
    assert found(ignoring) == [(1, 1)]


def test_beams_compete_and_know_whom_they_continue():
    one = search(width=2, rounds=3)
    one.advance([table(t1=-1.0, t2=-1.5, t3=-9.0, t4=-9.0)])
    one.advance([table(t1=-3.0, t2=-4.0), table(t1=-0.5, t2=-0.6)])
    assert [beam.tokens for beam in one.beams] == [(2, 1), (2, 2)] and [beam.parent for beam in one.beams] == [1, 1]
    assert one.open


def test_length_penalty_counts_the_prompt_and_not_the_end():
    """-3 over 2 tokens against -4 over 4: per token, prompt included, the longer one is better."""
    for penalty, expected in ((1.0, (1, 1)), (0.0, (EOS,))):
        one = search(length_penalty=penalty)
        one.advance([table(t0=-3.0, t1=-2.0)])
        one.advance([table(t1=-2.0)])
        assert found(one) == [expected]


def test_it_ends_with_the_context():
    one = search(rounds=9, longest=4)
    for _ in range(2):
        assert one.open
        one.advance([table(t1=-1.0)])
    assert not one.open and found(one) == [(1, 1)]
