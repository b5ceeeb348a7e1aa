"""What an engine finds out about drafts is there for the next one."""

import json
import os
import threading
from types import SimpleNamespace

import pytest
from tiny import make_model, open_model

from quire import SamplingParams
from quire.engine import speculation as store
from quire.files import cache

NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3, "num_speculative_tokens": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("learnt"))


def test_the_next_engine_knows(model, tmp_path, monkeypatch):
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "new"))
    first = open_model(model, dtype="float32", speculative_config=NGRAM)
    speculation = first.llm_engine.core.scheduler.speculation
    loop = {"prompt_token_ids": [9, 8, 7, 6] * 12}
    params = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
    [plain] = first.generate([loop], params, use_tqdm=False)
    for _ in range(5):
        speculation._costs.took(1, 0, 1.0)
        speculation._costs.took(1, 3, 1.25)
    first.llm_engine.shutdown()
    [told] = json.loads((tmp_path / "new" / store.NAME).read_text()).values()
    second = open_model(model, dtype="float32", speculative_config=NGRAM)
    costs = second.llm_engine.core.scheduler.speculation._costs
    assert costs.most >= 3 and costs.measured() == {int(r): {int(d): x for d, x in f.items()} for r, f in told["costs"].items()}
    [again] = second.generate([loop], params, use_tqdm=False)
    assert list(again.outputs[0].token_ids) == list(plain.outputs[0].token_ids)
    second.llm_engine.shutdown()


GOOD = {"costs": {2: {4: 1.5}}, "right": (0.5, 1.0, 9)}
BROKEN = {
    "empty": "",
    "a list": "[1]",
    "cut off": "{",
    "deep": "[" * 200_000,
    "deep within": '{"%s": {"costs": {}}, "x": ' + '{"x":' * 600 + "1" + "}" * 601,
    "large": '{"%s": {"costs": {}}}' + " " * cache.MAX_STORE_BYTES,
    "a number": '{"%s": 3}',
    "costs are a number": '{"%s": {"costs": 1}}',
    "a word": '{"%s": {"costs": {"1": {"2": "x"}}}}',
    "a negative cost": '{"%s": {"costs": {"1": {"2": -1}}}}',
    "no finite cost": '{"%s": {"costs": {"1": {"2": Infinity}}}}',
    "a cost of 400 digits": '{"%s": {"costs": {"1": {"2": 1' + "0" * 400 + "}}}}",
    "negative drafts": '{"%s": {"costs": {"1": {"-3": 1.0}}}}',
    "no rows": '{"%s": {"costs": {"0": {"1": 1.0}}}}',
    "rows without end": '{"%s": {"costs": {"99999999999999999999": {"1": 1.0}}}}',
    "too many sizes": json.dumps({"%s": {"costs": {"1": {str(n): 1.0 for n in range(1, 1000)}}}}),
    "endless outcomes": '{"%s": {"costs": {}, "right": [0.5, 0.5, Infinity]}}',
    "more than all": '{"%s": {"costs": {}, "right": [0.5, 2.0, 3]}}',
    "no share": '{"%s": {"costs": {}, "right": [NaN, 0.5, 3]}}',
}


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """What an engine with this key knows, whose file is this."""
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    monkeypatch.setattr(store, "_key", lambda config: "key")
    config = SimpleNamespace(args=SimpleNamespace(distributed_executor_backend=None))
    return tmp_path / store.NAME, lambda: store.open_acceptance_store(config)


@pytest.mark.parametrize("broken", [pytest.param(text, id=name) for name, text in BROKEN.items()])
def test_a_file_that_is_broken_means_finding_out_again(broken, opened, caplog):
    path, open_it = opened
    path.write_text(broken.replace("%s", "key"))
    found = open_it()
    if found["known"] is not None:  # somebody else's part is broken, and is dropped
        assert found["known"] == {"costs": {}} and not caplog.messages
    else:
        assert len(caplog.messages) == 1 and str(path) in caplog.text
    found["remember"](GOOD)
    assert open_it()["known"] == {"costs": {2: {4: 1.5}}, "right": (0.5, 1.0, 9)} and list(cache.read_json_store(path)) == [
        "key"
    ]
    assert list(path.parent.iterdir()) == [path]


def test_what_is_no_file_is_left_alone(opened, caplog):
    """A pipe is not waited for; what is written is put in its place at once. A directory stays."""
    path, open_it = opened
    assert open_it()["known"] is None and not caplog.messages  # there is nothing yet
    os.mkfifo(path)
    found = open_it()
    assert found["known"] is None and "not a regular file" in caplog.text
    found["remember"](GOOD)
    assert open_it()["known"]["costs"] == GOOD["costs"]
    path.unlink()
    path.mkdir()
    found = open_it()
    found["remember"](GOOD)
    assert found["known"] is None and list(path.parent.iterdir()) == [path]
    store._write(path / "no" / "where" / store.NAME, "key", GOOD)
    store._write(path / "no" / "where" / store.NAME / "file" / store.NAME, "key", GOOD)  # no directory can be made there


def test_the_longest_forgotten_go(opened):
    path, _ = opened
    for name in ("key", *(f"other {i}" for i in range(store.MAX_ENGINES))):
        store._write(path, name, GOOD)
    assert len(cache.read_json_store(path)) == store.MAX_ENGINES and "key" not in cache.read_json_store(path)


def test_two_write_at_once(opened):
    """Whoever reads finds a whole file, of one or of both."""
    path, open_it = opened
    writers = [threading.Thread(target=lambda: [store._write(path, "key", GOOD) for _ in range(50)]) for _ in range(2)]
    for writer in writers:
        writer.start()
    found = [open_it()["known"] for _ in range(50)]
    for writer in writers:
        writer.join()
    assert all(known is None or known["costs"] == GOOD["costs"] for known in found) and open_it()["known"] is not None
    assert list(path.parent.iterdir()) == [path]
