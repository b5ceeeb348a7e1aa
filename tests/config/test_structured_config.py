"""structured_outputs_config: what is taken, what is refused by name."""

import dataclasses

import pytest

from quire.config.args import EngineArgs
from quire.features.structured import host as structured
from quire.types.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"backend": "xgramar"}, "backend must be one of auto, guidance, xgrammar"),
        ({"disable_any_whitespace": 1}, "disable_any_whitespace must be true or false"),
        ({"enable_in_reasoning": True}, "a grammar begins where the reasoning ends"),
        ({"reasoning_parser": "qwen3"}, "use the argument reasoning_parser"),
        ({"whitespace": "x"}, "has no field 'whitespace'"),
    ],
)
def test_what_is_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        EngineArgs(structured_outputs_config=given)


@pytest.mark.parametrize("backend", ["outlines", "lm-format-enforcer"])
def test_other_backends_are_hints(backend, caplog):
    args = dataclasses.replace(EngineArgs(structured_outputs_config={"backend": backend}), max_num_seqs=1)
    assert caplog.text.count(f"backend='{backend}' has no effect") == 1
    assert args.structured_outputs_config == {"backend": "guidance"}


@pytest.mark.parametrize("installed", [True, False])
def test_xgrammar_is_used_where_it_is_installed(installed, monkeypatch, caplog):
    monkeypatch.setattr(structured, "find_spec", lambda name: object() if installed else None)
    taken = EngineArgs(structured_outputs_config={"backend": "xgrammar"}).structured_outputs_config
    assert structured.structured_backend(taken) == ("xgrammar" if installed else "guidance")
    assert ("requires quire[xgrammar]" in caplog.text) is not installed
    if not installed:
        with pytest.raises(ConfigError, match="requires the package xgrammar"):
            EngineArgs(structured_outputs_config={"backend": "xgrammar", "disable_fallback": True})


def test_what_is_taken():
    EngineArgs(structured_outputs_config={"backend": "guidance", "disable_fallback": True, "reasoning_parser": ""})
    assert EngineArgs().structured_outputs_config == {}
