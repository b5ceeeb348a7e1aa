"""What machines must have in common: those whose engines serve the same model, and those whose ranks divide one engine.

Machine 0's arguments apply everywhere. A machine whose version, model files or arguments differ is refused, and both machines
log what differs.
"""

import json
from dataclasses import MISSING, fields
from typing import Any

from quire import __version__
from quire.config.args import EngineArgs
from quire.config.config import Config
from quire.config.fields import FLOAT_NAMES
from quire.config.resolve import find_files, wants_weights
from quire.files.identity import WEIGHTS, identity
from quire.files.reading import shown
from quire.types.errors import ModelError

ARGUMENTS = (
    "dtype", "quantization", "kv_cache_dtype", "max_model_len", "load_format", "model_impl", "hf_overrides", "seed"
)  # fmt: skip
Terms = dict[str, Any]  # JSON: version, files (name -> digest), arguments, and model: the path of the files on that machine


def terms_of(args: EngineArgs) -> Terms:
    """Machine 0's."""
    return _terms(args, wants_weights(args), ARGUMENTS)


def own_terms(args: EngineArgs) -> Terms:
    """Another machine's: of arguments those that were given. Whether weights are wanted, machine 0 knows."""
    given = [name for name in ARGUMENTS if getattr(args, name) != _default(name)]
    try:
        return _terms(args, wants_weights(args), given)
    except ModelError:
        return _terms(args, False, given)


def difference(ours: Terms, theirs: Terms) -> str | None:
    """What another machine has to change, if anything."""
    if theirs.get("version") != ours["version"]:
        return f"its Quire is {shown(theirs.get('version'))}, machine 0's is {ours['version']}"
    if found := _different_file(ours["files"], _object(theirs, "files")):
        return f"its model is not machine 0's: {found}"
    for name, value in _object(theirs, "arguments").items():
        if name in ours["arguments"] and value != ours["arguments"][name]:
            return f"its {name} is {shown(value)}, machine 0's is {shown(ours['arguments'][name])}; leave it out there"
    return None


def draft_files(config: Config) -> dict[str, str]:
    """Digests of the draft model's files; empty without a draft model or head in files of its own."""
    facts = config.draft_facts if config.draft_head is None else config.draft_head.facts
    return {} if facts is None else identity(facts.files)


def refuse_other_draft(config: Config, expected: dict[str, str]) -> None:
    """Raise ModelError if this machine's draft model differs from machine 0's: ranks must verify the same draft tokens."""
    if expected and (found := _different_file(expected, draft_files(config))):
        assert config.speculation is not None
        raise ModelError(f"the draft model {config.speculation.model} is not machine 0's: {found}")


def _different_file(ours: dict[str, str], theirs: dict[str, Any]) -> str | None:
    """The first file that differs, and how. Weights that machine 0 does not read are not compared."""
    for name in sorted({*ours, *theirs}):
        if ours.get(name) == theirs.get(name) or (name == WEIGHTS and name not in ours):
            continue
        how = "is missing" if name not in theirs else "should not be there" if name not in ours else "is another one"
        return f"{shown(name)} {how}"
    return None


def _terms(args: EngineArgs, weights: bool, names: "tuple[str, ...] | list[str]") -> Terms:
    files = find_files(args, weights)
    arguments = {name: getattr(args, name) for name in names}
    if "dtype" in arguments:
        arguments["dtype"] = FLOAT_NAMES.get(args.dtype, args.dtype)
    told = {"version": __version__, "files": identity(files), "arguments": arguments, "model": str(files.path.absolute())}
    return dict(json.loads(json.dumps(told, default=repr)))


def _default(name: str) -> Any:
    [field] = [field for field in fields(EngineArgs) if field.name == name]
    return field.default if field.default_factory is MISSING else field.default_factory()


def _object(theirs: Terms, name: str) -> dict[str, Any]:
    found = theirs.get(name)
    return found if isinstance(found, dict) else {}
