"""Tokenizers of adapters that add tokens to a model's own: read from the adapter's directory when they are first wanted."""

from collections import OrderedDict
from pathlib import Path
from threading import Lock

from quire.files.adapter import has_tokenizer
from quire.text.chat import compile_template, count_lexemes
from quire.text.tokenizer import Tokenizer
from quire.text.tokenizer_files import read_tokenizer
from quire.types.adapter import AdapterRef
from quire.types.errors import AdapterError, ModelError, RequestError

MOST = 64  # that are kept
LONGEST_TEMPLATE = 1 << 16  # characters: more than any that is known has
MOST_LEXEMES = 16_000  # of all templates: several times as many as any that is known has, and compiled in half a second
TEMPLATES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")  # where they may be


class AdapterTokenizers:
    """`fixed_template`: the chat template was chosen by hand, and is that of all."""

    def __init__(self, base: Tokenizer | None, fixed_template: bool = False) -> None:
        self._base, self._fixed = base, fixed_template
        self._read: OrderedDict[str, Tokenizer] = OrderedDict()  # by version
        self._lock = Lock()

    def of(self, lora: AdapterRef | None) -> Tokenizer | None:
        """The model's own, unless the adapter adds tokens and has files that say which. May be called by any thread."""
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
            while len(self._read) > MOST:
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
    """Raises what would be wrong with every chat."""
    file = next(file for file in (Path(path) / name for name in TEMPLATES) if file.is_file() or file.name == TEMPLATES[-1])
    left = MOST_LEXEMES
    for template in [templates] if isinstance(templates, str) else (templates or {}).values():
        if len(template) > LONGEST_TEMPLATE:
            raise AdapterError(f"{file}: a chat template may have at most {LONGEST_TEMPLATE:,} characters", "lora_path")
        left -= count_lexemes(template, left)
        if left < 0:
            raise AdapterError(f"{file}: chat templates may have at most {MOST_LEXEMES:,} words and signs", "lora_path")
        try:
            compile_template(template)
        except RequestError as error:
            raise AdapterError(f"{file}: {error}", "lora_path") from error
