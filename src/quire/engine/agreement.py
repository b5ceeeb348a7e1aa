"""What machines with engines behind one server must have in common, so that a request has the same tokens on each of them.

Machine 0's arguments count everywhere. Another one that was given others is refused, instead of being overruled in silence.
"""

import json
from dataclasses import MISSING, fields
from typing import Any

from quire import __version__
from quire.config.args import FLOAT_NAMES, EngineArgs
from quire.config.resolve import wants_weights
from quire.files.identity import WEIGHTS, identity
from quire.files.reading import shown
from quire.files.resolve import resolve_model
from quire.types.errors import ModelError

ARGUMENTS = (
    "dtype", "quantization", "kv_cache_dtype", "max_model_len", "load_format", "model_impl", "hf_overrides", "seed"
)  # fmt: skip
Terms = dict[str, Any]  # JSON: version, files, arguments


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
    own, files = ours["files"], _object(theirs, "files")
    for name in sorted({*own, *files}):
        if own.get(name) == files.get(name) or (name == WEIGHTS and name not in own):  # nobody reads them
            continue
        how = "is missing" if name not in files else "should not be there" if name not in own else "is another one"
        return f"its model is not machine 0's: {shown(name)} {how}"
    for name, value in _object(theirs, "arguments").items():
        if name in ours["arguments"] and value != ours["arguments"][name]:
            return f"its {name} is {shown(value)}, machine 0's is {shown(ours['arguments'][name])}; leave it out there"
    return None


def _terms(args: EngineArgs, weights: bool, names: "tuple[str, ...] | list[str]") -> Terms:
    files = resolve_model(
        args.model, revision=args.revision, download_dir=args.download_dir, token=args.hf_token, weights=weights
    )
    arguments = {name: getattr(args, name) for name in names}
    if "dtype" in arguments:
        arguments["dtype"] = FLOAT_NAMES.get(args.dtype, args.dtype)
    told = {"version": __version__, "files": identity(files), "arguments": arguments}
    return dict(json.loads(json.dumps(told, default=repr)))


def _default(name: str) -> Any:
    [field] = [field for field in fields(EngineArgs) if field.name == name]
    return field.default if field.default_factory is MISSING else field.default_factory()


def _object(theirs: Terms, name: str) -> dict[str, Any]:
    found = theirs.get(name)
    return found if isinstance(found, dict) else {}
