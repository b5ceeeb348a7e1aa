"""structured_outputs_config: what is taken, what is refused by name."""

import dataclasses

import pytest

from quire.config.args import EngineArgs
from quire.types.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"backend": "xgramar"}, "backend must be one of auto, guidance, xgrammar"),
        ({"disable_any_whitespace": 1}, "disable_any_whitespace must be true or false"),
        ({"enable_in_reasoning": True}, "a grammar begins where the reasoning ends"),
        ({"reasoning_parser": "qwen3"}, "an argument of its own"),
        ({"whitespace": "x"}, "has no 'whitespace'"),
    ],
)
def test_what_is_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        EngineArgs(structured_outputs_config=given)


@pytest.mark.parametrize("backend", ["xgrammar", "outlines", "lm-format-enforcer"])
def test_other_backends_are_hints(backend, caplog):
    args = dataclasses.replace(EngineArgs(structured_outputs_config={"backend": backend}), max_num_seqs=1)
    assert caplog.text.count(f"backend='{backend}' changes nothing here") == 1
    assert args.structured_outputs_config == {"backend": "guidance"}


def test_what_is_taken():
    EngineArgs(structured_outputs_config={"backend": "guidance", "disable_fallback": True, "reasoning_parser": ""})
    assert EngineArgs().structured_outputs_config == {}
