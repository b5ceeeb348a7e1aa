from array import array

from quire.cache.prefix import extend_keys, root


def keys(tokens: list[int], salt: tuple[str, ...] = ()) -> list[bytes]:
    out: list[bytes] = []
    extend_keys(out, array("i", tokens), 2, salt)
    return out


def test_only_full_pages_have_keys_and_each_depends_on_all_before():
    a, b = keys([1, 2, 3, 4, 5]), keys([9, 2, 3, 4])
    assert len(a) == 2
    assert all(len(key) == 32 for key in a)
    assert a[1] != b[1], "the same page after another beginning"


def test_the_chain_can_be_continued():
    out = keys([1, 2, 3])
    extend_keys(out, array("i", [1, 2, 3, 4, 5, 6]), 2, ())
    assert out == keys([1, 2, 3, 4, 5, 6])


def test_a_salt_changes_every_key_and_parts_do_not_run_together():
    assert not set(keys([1, 2, 3, 4])) & set(keys([1, 2, 3, 4], ("tenant",)))
    assert len({root(()), root(("",)), root(("ab", "c")), root(("a", "bc")), root(("abc",))}) == 5
