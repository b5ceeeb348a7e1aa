"""Reading tokenizers from files: a Hugging Face directory, a GGUF file, or an adapter that adds tokens.

A directory is read with the `tokenizers` library alone. `transformers` is imported only if there is no tokenizer.json. An
adapter's tokenizer is read when it is first needed.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path
from threading import Lock
from typing import Any

import tokenizers
from tokenizers import AddedToken

from quire.config.config import Config
from quire.config.plugins import load_general
from quire.files.adapter import has_tokenizer
from quire.files.gguf import read_gguf
from quire.files.reading import check_regular_files, error_summary, read_bytes, read_object, read_text, reading, shown
from quire.files.resolve import TEKKEN, ModelFiles, resolve_model
from quire.text.backends import LibraryBackend, TransformersBackend, is_panic, set_ends
from quire.text.chat import compile_template, count_lexemes, read_template
from quire.text.other_tokenizers import read_tekken, tokenizer_from_gguf
from quire.text.regex_cost import check_stages
from quire.text.tokenizer import Tokenizer
from quire.types.adapter import AdapterRef
from quire.types.errors import AdapterError, ModelError, RequestError

MAX_TEMPLATE_BYTES = 16 << 20
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load_tokenizer(files: ModelFiles, *, tokenizer: str | None = None, revision: str | None = None) -> Tokenizer:
    """The tokenizer of a model, or of another directory, GGUF file or hub id given as `tokenizer`."""
    return read_named(files.path, tokenizer, revision)


def read_named(path: Path, tokenizer: str | None, revision: str | None) -> Tokenizer:
    """Return the tokenizer at a model's path, or another one that is named."""
    return read_tokenizer(path if tokenizer is None else resolve_model(tokenizer, revision=revision, weights=False).path)


def read_tokenizer(path: Path) -> Tokenizer:
    with reading(path, "its tokenizer cannot be used"):
        return _read_tokenizer(path)


def _read_tokenizer(path: Path) -> Tokenizer:
    if path.name == TEKKEN:
        return read_tekken(path)
    if path.is_dir() and not (path / "tokenizer.json").exists() and (path / TEKKEN).is_file():
        return read_tekken(path / TEKKEN)
    if path.suffix == ".gguf":
        return tokenizer_from_gguf(read_gguf(path).metadata, str(path))
    config = read_object(path / "tokenizer_config.json") or {}
    for name, value in (read_object(path / "special_tokens_map.json") or {}).items():
        config.setdefault(name, value)
    backend: LibraryBackend | TransformersBackend
    if (path / "tokenizer.json").exists():
        backend = LibraryBackend(_read_library_tokenizer(path / "tokenizer.json", config))
    else:
        backend, config = _ask_transformers(path, config)
    return Tokenizer(
        backend,
        special_tokens=_special_tokens(config),
        chat_templates=_chat_templates(path, config),
        clean_up_tokenization_spaces=bool(config.get("clean_up_tokenization_spaces", False)),
        init_kwargs=config,
    )


def _read_library_tokenizer(path: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    content = read_bytes(path)
    check_stages(path, content)
    library = f"the `tokenizers` library ({tokenizers.__version__})"
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{path}: {library} cannot read it ({error_summary(error)})") from None
    # before the first text: a fixed padding may have any length
    tokenizer.no_truncation()
    tokenizer.no_padding()
    try:
        _add_tokens(tokenizer, config)
        _set_prefix_space(tokenizer, config)
        _set_added_ends(tokenizer, config)
    except BaseException as error:
        if not is_panic(error):
            raise
        raise ModelError(f"{path}: {library} cannot tokenize with it ({error_summary(error)})") from None
    return tokenizer


def _add_tokens(tokenizer: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Tokens that only tokenizer_config.json knows, or knows to be special."""
    present = {token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()}
    required = [_added_token(token) for _, token in sorted(_decoder_entries(config))]
    required += [AddedToken(name, normalized=False, special=True) for name in _special_names(config)]
    missing = {token.content: token for token in required if present.get(token.content) not in (True, token.special)}
    tokenizer.add_tokens(list(missing.values()))


def _decoder_entries(config: Mapping[str, Any]) -> Iterable[tuple[int, Mapping[str, Any]]]:
    entries = config.get("added_tokens_decoder") or {}
    return ((int(token_id), entry) for token_id, entry in entries.items())


def _added_token(entry: Mapping[str, Any]) -> AddedToken:
    flags = {name: bool(entry[name]) for name in ("single_word", "lstrip", "rstrip", "normalized", "special") if name in entry}
    return AddedToken(str(entry["content"]), **flags)


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, ... and names of the model's own such as image_token."""
    tokens = {name: _content(config.get(name)) for name in NAMED}
    extra = config.get("extra_special_tokens")
    if isinstance(extra, Mapping):
        tokens |= {name: _content(token) for name, token in extra.items()}
    return {name: token for name, token in tokens.items() if token}


def _special_names(config: Mapping[str, Any]) -> list[str]:
    lists = [config.get("additional_special_tokens"), config.get("extra_special_tokens")]
    listed = [_content(token) for tokens in lists if isinstance(tokens, list) for token in tokens]
    return [*_special_tokens(config).values(), *(name for name in listed if name)]


def _content(token: Any) -> str | None:
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _set_prefix_space(tokenizer: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    required = config.get("add_prefix_space")
    if isinstance(required, bool) and isinstance(tokenizer.pre_tokenizer, tokenizers.pre_tokenizers.ByteLevel):
        tokenizer.pre_tokenizer.add_prefix_space = required


def _set_added_ends(tokenizer: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """add_bos_token and add_eos_token, where given, overrule what tokenizer.json puts around a text."""
    start, end = _ends(tokenizer)
    required = [list(start), list(end)]
    for side, (flag, name) in enumerate((("add_bos_token", "bos_token"), ("add_eos_token", "eos_token"))):
        token = _content(config.get(name))
        if isinstance(config.get(flag), bool) and (token is not None or not config[flag]):
            required[side] = [str(token)] if config[flag] else []
    if required == [start, end]:
        return
    set_ends(tokenizer, *required)


def _ends(tokenizer: tokenizers.Tokenizer) -> tuple[list[str], list[str]]:
    """The tokens that the post-processor puts before and after a text."""
    plain, full = (tokenizer.encode("a", add_special_tokens=flag).tokens for flag in (False, True))
    for i in range(len(full) - len(plain) + 1):
        if full[i : i + len(plain)] == plain:
            return full[:i], full[i + len(plain) :]
    return full, []


def _chat_templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """chat_template.jinja and additional_chat_templates/, else chat_template.json, else what tokenizer_config.json has."""
    found: dict[str, str] = {}
    stored = config.get("chat_template") or (read_object(path / "chat_template.json") or {}).get("chat_template")
    where = path / ("tokenizer_config.json" if config.get("chat_template") else "chat_template.json")
    if isinstance(stored, str):
        found["default"] = stored
    elif isinstance(stored, Mapping):
        found |= stored
    elif isinstance(stored, list):
        found |= {entry["name"]: entry["template"] for entry in stored}
    elif stored is not None:
        raise ModelError(f"{where}: chat_template must be a string, or several with names, got {shown(stored)}")
    for name, template in found.items():
        if not isinstance(template, str):
            raise ModelError(f"{where}: the chat_template {shown(name)} must be a string, got {shown(template)}")
    for file in [path / "chat_template.jinja", *sorted((path / "additional_chat_templates").glob("*.jinja"))]:
        if file.exists():
            found["default" if file.name == "chat_template.jinja" else file.stem] = read_text(file, MAX_TEMPLATE_BYTES)
    return found


def _ask_transformers(path: Path, config: Mapping[str, Any]) -> tuple[LibraryBackend | TransformersBackend, dict[str, Any]]:
    """Only a SentencePiece model or a Python class: a fast tokenizer is made of it if that can be done."""
    check_regular_files(path)
    present = sorted(
        p.name for p in path.iterdir() if "token" in p.name or p.name in ("vocab.json", "merges.txt", "spiece.model")
    )
    if not present:
        raise ModelError(
            f"{path}: there is no tokenizer here (no tokenizer.json); pass tokenizer= with a directory or hub id that has one"
        )
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ModelError(
            f"{path}: there is no tokenizer.json, only {present}, which needs `transformers`: "
            "pip install transformers sentencepiece, "
            "or pass tokenizer= with a directory or hub id that has a tokenizer.json"
        ) from None
    load_general()  # general plug-ins may register tokenizers
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
    except Exception as error:  # missing extras (sentencepiece, protobuf, tiktoken), unknown classes, broken files
        if config.get("auto_map"):
            raise ModelError(
                f"{path}: the tokenizer needs code from its own repository, which is never run, whatever is trusted; "
                "pass tokenizer= with a directory or hub id that has a tokenizer.json"
            ) from error
        raise ModelError(f"{path}: `transformers` cannot make a tokenizer of {present} ({error_summary(error)})") from error
    named = {name: str(token) for name in NAMED if (token := getattr(tokenizer, name, None)) is not None}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if isinstance(backend, tokenizers.Tokenizer):
        return LibraryBackend(backend), {**config, **named}
    return TransformersBackend(tokenizer), {**config, **named}


def open_tokenizer(config: Config) -> Tokenizer | None:
    """Open the model's tokenizer; None with skip_tokenizer_init."""
    args = config.args
    if args.skip_tokenizer_init:
        return None
    tokenizer = load_tokenizer(config.facts.files, tokenizer=args.tokenizer, revision=args.tokenizer_revision)
    if args.chat_template is not None:
        tokenizer.chat_template = read_template(args.chat_template)
    return tokenizer


MAX_ADAPTER_TOKENIZERS = 64  # in memory
LONGEST_TEMPLATE = 1 << 16  # characters: more than any that is known has
MAX_LEXEMES = 16_000  # of all templates: several times as many as any that is known has, and compiled in half a second
TEMPLATES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")  # where they may be


class AdapterTokenizers:
    """Tokenizers of adapters. fixed_template: the user chose the chat template, and it is used for all adapters."""

    def __init__(self, base: Tokenizer | None, fixed_template: bool = False) -> None:
        self._base, self._fixed = base, fixed_template
        self._read: OrderedDict[str, Tokenizer] = OrderedDict()  # by version
        self._lock = Lock()

    def of(self, lora: AdapterRef | None) -> Tokenizer | None:
        """Return the adapter's tokenizer if it adds tokens and has tokenizer files, else the model's. Thread-safe."""
        if lora is None or not lora.added or self._base is None:
            return self._base
        with self._lock:
            found = self._read.get(lora.version)
            if found is not None:
                self._read.move_to_end(lora.version)
                return found
        found = self._open(lora, self._base)
        with self._lock:
            self._read[lora.version] = found
            while len(self._read) > MAX_ADAPTER_TOKENIZERS:
                self._read.popitem(last=False)
        return found

    def _open(self, lora: AdapterRef, base: Tokenizer) -> Tokenizer:
        if not has_tokenizer(lora.path):
            return base
        try:
            found = read_tokenizer(Path(lora.path))
        except ModelError as error:
            raise AdapterError(str(error), "lora_path") from error
        if base.short and not found.short:
            # threads tokenize for adapters, and nothing can end a thread
            raise AdapterError(
                f"{lora.path}/tokenizer.json: the normalizer and pre_tokenizer of an adapter must be fast for any text; "
                "these may take very long. Remove the file to use the model's tokenizer.",
                "lora_path",
            )
        if base.chat_template is not None and (self._fixed or found.chat_template is None):
            found.chat_template = base.chat_template
        else:
            _check_templates(lora.path, found.chat_template)
        return found


def _check_templates(path: str, templates: str | dict[str, str] | None) -> None:
    """Raise an error for templates with which every chat would fail."""
    file = next(file for file in (Path(path) / name for name in TEMPLATES) if file.is_file() or file.name == TEMPLATES[-1])
    left = MAX_LEXEMES
    for template in [templates] if isinstance(templates, str) else (templates or {}).values():
        if len(template) > LONGEST_TEMPLATE:
            raise AdapterError(f"{file}: a chat template may have at most {LONGEST_TEMPLATE:,} characters", "lora_path")
        left -= count_lexemes(template, left)
        if left < 0:
            raise AdapterError(f"{file}: chat templates may have at most {MAX_LEXEMES:,} words and signs", "lora_path")
        try:
            compile_template(template)
        except RequestError as error:
            raise AdapterError(f"{file}: {error}", "lora_path") from error
