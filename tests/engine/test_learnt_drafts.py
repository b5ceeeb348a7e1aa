"""What an engine finds out about drafts is there for the next one."""

import json

import pytest
from tiny import make_model, open_model

from quire import SamplingParams
from quire.engine import learnt

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
    [told] = json.loads((tmp_path / "new" / learnt.NAME).read_text()).values()
    second = open_model(model, dtype="float32", speculative_config=NGRAM)
    costs = second.llm_engine.core.scheduler.speculation._costs
    assert costs.measured(1, 3) and costs.learnt() == {
        int(r): {int(d): x for d, x in f.items()} for r, f in told["costs"].items()
    }
    [again] = second.generate([loop], params, use_tqdm=False)
    assert list(again.outputs[0].token_ids) == list(plain.outputs[0].token_ids)
    second.llm_engine.shutdown()


BROKEN = (
    "[" * 100_000,
    '{"%s": {"costs": {}, "right": [NaN, 0.5, 3]}}',
    "",
    "[1]",
    "{",
    '{"%s": 3}',
    '{"%s": {"costs": {"1": {"2": "x"}}}}',
    '{"%s": {"costs": {"1": {"2": -1}}}}',
    '{"%s": {"costs": 1}}',
)


@pytest.mark.parametrize("broken", BROKEN, ids=range(len(BROKEN)))
def test_a_file_that_is_broken_means_finding_out_again(broken, tmp_path):
    path = tmp_path / learnt.NAME
    path.write_text(broken.replace("%s", "key"))
    assert learnt._known(learnt._read(path).get("key")) is None
    learnt._write(path, "key", {"costs": {2: {4: 1.5}}, "right": (0.5, 1.0, 9)})
    assert learnt._known(learnt._read(path)["key"]) == {"costs": {2: {4: 1.5}}, "right": (0.5, 1.0, 9)}
    for i in range(learnt.MOST):
        learnt._write(path, f"other {i}", {})
    assert len(learnt._read(path)) == learnt.MOST and "key" not in learnt._read(path)
    (tmp_path / "file").write_text("")
    learnt._write(tmp_path / "file" / learnt.NAME, "key", {})  # there is no such directory, and none can be made
