"""Mistral's tekken.json as a tokenizer: a byte-level BPE whose merges follow from the ranks of its tokens.

Chats are written as mistral-common writes them, by a template for each version of the format; their texts were compared.
"""

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from quire.files.reading import read_object
from quire.text.backends import LibraryBackend, set_ends
from quire.text.tokenizer import Tokenizer
from quire.types.errors import ModelError

BOS, EOS, PAD, UNKNOWN = "<s>", "</s>", "<pad>", "<unk>"
# files without special_tokens have these
_CONTROL = (
    UNKNOWN, BOS, EOS, "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
    "[TOOL_CALLS]", "[IMG]", PAD, "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip
_VERSIONS = ("v3", "v7", "v11", "v13")

_HEAD = """{%- set ns = namespace(first=-1, last=-1, system='') -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}
{%- if ns.first < 0 -%}{%- set ns.first = loop.index0 -%}{%- endif -%}{%- endif -%}
{%- if m.role == 'system' and not TAGGED -%}
{%- set ns.system = ns.system + m.content + '\\n\\n' -%}{%- endif -%}
{%- endfor -%}
{{- bos_token -}}
{%- for m in messages -%}
{%- if m.role == 'system' -%}
{%- if TAGGED -%}{{- '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' -}}{%- endif -%}
{%- elif m.role == 'user' -%}
{%- if tools and loop.index0 == ns.TOOLS_AT -%}
{{- '[AVAILABLE_TOOLS][' -}}
{%- for t in tools -%}
{{- {'type': 'function', 'function': {'name': t.function.name, 'description': t.function.description or '',
    'parameters': t.function.parameters or {}}} | tojson -}}{%- if not loop.last -%}{{- ', ' -}}{%- endif -%}
{%- endfor -%}
{{- '][/AVAILABLE_TOOLS]' -}}
{%- endif -%}
{{- '[INST]' -}}{%- if loop.index0 == ns.last -%}{{- ns.system -}}{%- endif -%}{{- m.content + '[/INST]' -}}
{%- elif m.role == 'assistant' -%}
{{- m.content or '' -}}
{%- if m.tool_calls -%}CALLS{%- endif -%}
{{- eos_token -}}
{%- elif m.role == 'tool' -%}
RESULT
{%- endif -%}
{%- endfor -%}"""
_LISTED_CALLS = """{{- '[TOOL_CALLS][' -}}{%- for c in m.tool_calls -%}
{{- {'name': c.function.name, 'arguments': c.function.arguments, 'id': c.id} | tojson -}}
{%- if not loop.last -%}{{- ', ' -}}{%- endif -%}{%- endfor -%}{{- ']' -}}"""
_CALLS = """{%- for c in m.tool_calls -%}
{{- '[TOOL_CALLS]' + c.function.name ID+ '[ARGS]' + (c.function.arguments | tojson) -}}{%- endfor -%}"""
_JSON_RESULT = "{{- '[TOOL_RESULTS]' + ({'content': m.content, 'call_id': m.tool_call_id} | tojson) + '[/TOOL_RESULTS]' -}}"
_RESULT = "{{- '[TOOL_RESULTS]' ID+ m.content + '[/TOOL_RESULTS]' -}}"


def chat_template(version: str) -> str:
    """Return the template of a format: v3, v7, v11 or v13."""
    listed = version in ("v3", "v7")
    calls = _LISTED_CALLS if listed else _CALLS.replace("ID", "+ '[CALL_ID]' + c.id " if version == "v11" else "")
    result = _JSON_RESULT
    if version != "v3":
        result = _RESULT.replace("ID", "" if version == "v13" else "+ m.tool_call_id + '[TOOL_CONTENT]' ")
    text = _HEAD.replace("CALLS", calls, 1).replace("RESULT\n", result + "\n", 1)
    text = text.replace("TAGGED", str(version != "v3").lower())
    return text.replace("TOOLS_AT", "first" if version == "v13" else "last")


def read_tekken(path: Path) -> Tokenizer:
    content = read_object(path)
    if content is None:
        raise ModelError(f"{path}: no such file")
    config = content.get("config")
    if not isinstance(config, Mapping) or not isinstance(content.get("vocab"), list):
        raise ModelError(f"{path}: it is not a tekken.json: it has no config and vocab")
    version = str(config.get("version"))
    if version not in _VERSIONS:
        raise ModelError(
            f"{path}: version must be one of {', '.join(_VERSIONS)}; got {version}. Use the model's tokenizer.json"
        )
    specials = _specials(content, int(config["default_num_special_tokens"]))
    ranked = _ranked(path, content["vocab"], int(config["default_vocab_size"]) - len(specials))
    tokenizer = _library(specials, ranked, str(config["pattern"]))
    named = {"bos_token": BOS, "eos_token": EOS, "unk_token": UNKNOWN, "pad_token": PAD}
    named = {name: token for name, token in named.items() if token in specials}
    return Tokenizer(
        LibraryBackend(tokenizer),
        special_tokens=named,
        chat_templates={"default": chat_template(version)},
        init_kwargs={"tokenizer_class": "Tekken", "version": version},
    )


def _specials(content: Mapping[str, Any], count: int) -> list[str]:
    """Return the special tokens by id. Ids without one have a filler."""
    given = content.get("special_tokens")
    names = {int(token["rank"]): str(token["token_str"]) for token in given} if given else dict(enumerate(_CONTROL))
    return [names.get(i, f"<SPECIAL_{i}>") for i in range(count)]


def _ranked(path: Path, vocab: list[Any], count: int) -> list[bytes]:
    """Return the bytes of the tokens by rank."""
    try:
        ranked = [base64.b64decode(token["token_bytes"], validate=True) for token in sorted(vocab, key=lambda t: t["rank"])]
    except (KeyError, TypeError, binascii.Error) as error:
        raise ModelError(f"{path}: its vocab cannot be read ({error!r})") from None
    if len(set(ranked[:count])) != count:
        raise ModelError(f"{path}: its vocab must have {count} different tokens; got {len(set(ranked[:count]))}")
    return ranked[:count]


def _library(specials: list[str], ranked: list[bytes], pattern: str) -> tokenizers.Tokenizer:
    letters = _letters()
    spelled = ["".join(letters[byte] for byte in token) for token in ranked]
    ids = {name: i for i, name in enumerate(specials)} | {name: len(specials) + i for i, name in enumerate(spelled)}
    known = dict(zip(spelled, range(len(spelled)), strict=True))
    merges = []
    for name in spelled:
        # any two tokens that make a third are merged, the third's rank decides when
        pairs = [(name[:i], name[i:]) for i in range(1, len(name)) if name[:i] in known and name[i:] in known]
        if len(pairs) > 1:
            pairs.sort(key=lambda pair: (known[pair[0]], known[pair[1]]))
        merges += pairs
    tokenizer = tokenizers.Tokenizer(models.BPE(ids, merges, ignore_merges=True))
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), whole])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in specials])
    if BOS in specials:
        set_ends(tokenizer, [BOS], [])
    return tokenizer


def _letters() -> list[str]:
    """Return the letter of each byte in a byte-level vocabulary: itself where it is visible, else one from 256 on."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = (byte for byte in range(256) if byte not in visible)
    return [letter for _, letter in sorted([(b, chr(b)) for b in visible] + [(b, chr(256 + i)) for i, b in enumerate(hidden)])]
