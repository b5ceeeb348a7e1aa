"""Compiled kernels are counted, and kept where the user or Quire wants them."""

import pytest

pytest.importorskip("triton")

from triton import knobs

from quire.ops.kernels.launcher import Variants, choose_cache


def test_the_compilers_news_are_counted_and_passed_on(monkeypatch):
    heard = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda **told: heard.append(told))
    variants = Variants().install()
    for hit in (False, True, False):
        knobs.compilation.listener(src=None, metadata={}, metadata_group={}, times=None, cache_hit=hit)
    assert (variants.compilations, variants.loads) == (2, 1)
    assert [told["cache_hit"] for told in heard] == [False, True, False]


@pytest.mark.parametrize("chosen", ["TRITON_CACHE_DIR", "TRITON_HOME"])
def test_the_users_place_for_compiled_kernels_wins(chosen, monkeypatch, tmp_path):
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "ours"))
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.delenv(name, raising=False)
    choose_cache()
    assert str(knobs.cache.dir) == str(tmp_path / "ours" / "triton")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv(chosen, str(tmp_path / "theirs"))
    choose_cache()
    assert str(knobs.cache.dir).startswith(str(tmp_path / "theirs"))
