"""Times of collectives against published measurements, which `sim/links.py` names."""

import pytest

from quire.sim.links import LINKS, NETWORKS, Fabric, Span, make_fabric
from quire.types.errors import ConfigError

KIB, MIB = 1 << 10, 1 << 20
ALL_REDUCE = [  # link, ranks, bytes, microseconds of the fastest way
    *(("nvlink4", 2, size, us) for size, us in ((512, 3.7), (32 * KIB, 4.5), (MIB // 2, 7))),
    *(("nvlink4", 4, size * MIB, us) for size, us in ((0.5, 10), (1, 14), (2, 21), (3, 23), (4, 28))),
    *(("nvlink4", 6, size * MIB, us) for size, us in ((0.5, 13), (1, 16), (2, 21), (3, 25), (4, 31))),
    *(("nvlink4", 8, size, us) for size, us in ((512, 5.9), (32 * KIB, 7.8))),
    *(("nvlink4", 8, size * MIB, us) for size, us in ((0.5, 11), (1, 14), (2, 18), (4, 27), (8, 46), (64, 316), (128, 561))),
    *(("nvlink5", 8, size * KIB, us) for size, us in ((16, 7), (64, 8), (256, 9), (512, 11))),
    *(("nvlink5", 8, size * MIB, us) for size, us in ((1, 17), (2, 22), (4, 29), (16, 72), (64, 219), (128, 393))),
    ("pcie4", 8, 8, 42),
]


@pytest.mark.parametrize(("link", "ranks", "size", "measured"), ALL_REDUCE)
def test_sums_are_near_what_was_measured(link, ranks, size, measured):
    seconds = Fabric(LINKS[link]).all_reduce(size, Span(ranks))
    assert 1 / 1.5 < 1e6 * seconds / measured < 1.5


@pytest.mark.parametrize(("size", "measured"), [(2, 10.9), (8, 27.4), (32, 95.3), (128, 363.2)])
def test_all_gathers_are_near_what_was_measured(size, measured):
    assert 1 / 1.3 < 1e6 * Fabric(LINKS["nvlink4"]).all_gather(size * MIB, Span(8)) / measured < 1.3


def test_two_nodes():
    fabric = Fabric(LINKS["nvlink4"], NETWORKS["ndr"])
    assert fabric.span(8) == Span(8, 1) and fabric.span(16) == Span(16, 2)
    assert 1 / 1.4 < 1e6 * fabric.all_reduce(8, fabric.span(16)) / 47 < 1.4
    large = 1 << 30  # each port carries 1/8 of it, and a rank sends and receives it once
    assert fabric.all_reduce(large, fabric.span(16)) == pytest.approx(large / 8 / 45e9 + 2 * 7 / 8 * large / 365e9, rel=0.01)
    assert fabric.send(large, True) > fabric.send(large, False) > 0


def test_what_decides_a_time():
    fast, slow = Fabric(LINKS["nvlink4"], NETWORKS["ndr"]), Fabric(LINKS["pcie4"], NETWORKS["hdr"])
    for collective in ("all_reduce", "all_gather", "all_to_all"):
        for span in (Span(2), Span(8), Span(16, 2)):
            times = [getattr(fast, collective)(size, span) for size in (0, 1 << 10, 1 << 20, 1 << 26)]
            assert times == sorted(times) and times[0] > 0
            assert getattr(slow, collective)(1 << 26, span) > times[-1]
        assert getattr(fast, collective)(1 << 20, Span(1)) == 0.0
        assert getattr(fast, collective)(1 << 20, Span(16, 2)) > getattr(fast, collective)(1 << 20, Span(8))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((8, None, None, "a card"), "--link is required for a card"),
        ((16, "nvlink4", None, "h200"), "--network is required for 16 h200 on several nodes"),
        ((8, "token ring", None, "h200"), "--link must be one of nvlink3, .*; got token ring"),
        ((16, "nvlink4", "pigeons", "h200"), "--network must be one of hdr, ndr; got pigeons"),
    ],
)
def test_unknown_links(given, message):
    with pytest.raises(ConfigError, match=message):
        make_fabric(*given)
