from array import array

from quire.cache.prefix import extend_keys, root


def keys(tokens: list[int], salt: tuple[str, ...] = (), marks=()) -> list[bytes]:
    out: list[bytes] = []
    extend_keys(out, array("i", tokens), 2, salt, marks)
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


def test_keys_of_text_keep_their_values():
    """Engines of several versions may share what they have cached."""
    assert keys([1, 2, 3, 4], ("tenant",))[-1].hex() == "ee73d6e824ab9fa65726d59a64e1b80f5dbac0bc740ebd180ca79fb3efc0f031"


def test_a_mark_changes_the_keys_from_its_page_on():
    plain, marked = keys([1, 2, 3, 4, 5, 6]), keys([1, 2, 3, 4, 5, 6], marks=((3, "a"),))
    assert [a == b for a, b in zip(plain, marked, strict=True)] == [True, False, False]
    assert keys([1, 2, 3, 4], marks=((4, "a"),)) == keys([1, 2, 3, 4]), "it is on a page that is not full"


def test_keys_depend_on_text_place_and_order_of_marks():
    marks = [
        ((2, "a"),),
        ((3, "a"),),
        ((2, "b"),),
        ((2, "a"), (2, "b")),
        ((2, "a"), (3, "b")),
        ((2, "ab"),),
        ((2, "a"), (4, "b")),
    ]
    found = [keys([1, 2, 3, 4, 5, 6], marks=each) for each in marks]
    assert len({each[-1] for each in found}) == len(marks)
    assert found[0][1] == found[-1][1] and len({each[1] for each in found}) == len(marks) - 1


def test_a_marked_chain_can_be_continued():
    marks = ((1, "a"), (3, "b"), (4, "c"))
    for first in range(7):
        out = keys([1, 2, 3, 4, 5, 6][:first], marks=marks)
        extend_keys(out, array("i", [1, 2, 3, 4, 5, 6]), 2, (), marks)
        assert out == keys([1, 2, 3, 4, 5, 6], marks=marks)
