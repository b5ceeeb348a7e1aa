"""Tiny random checkpoints with a tokenizer and the files of sentence-transformers."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from encoder_families import SIZES, Encoder, save_encoder
from tiny_model import make_tokenizer

CLS, SEP = 0, 1


def save_text_encoder(folder: Path, family: Encoder | None = None) -> tuple[Any, Any]:
    """Save BERT, or a family with 320 tokens, and a tokenizer that adds CLS and SEP. Return transformers' model and it."""
    from tokenizers import Tokenizer, processors

    model = save_encoder(family or Encoder("BertModel", "BertConfig", {**SIZES, "vocab_size": 320}), folder)
    make_tokenizer(folder)
    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    special = [(tokenizer.id_to_token(index), index) for index in (CLS, SEP)]
    (cls, _), (sep, _) = special
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}", pair=f"{cls} $A {sep} $B:1 {sep}:1", special_tokens=special
    )
    tokenizer.save(path)
    return model, tokenizer


def write_modules(
    folder: Path, modules: Sequence[tuple[str, str, Mapping[str, Any] | None]], settings: Mapping[str, Any] | None = None
) -> None:
    """Write modules.json after a Transformer. modules: folder, type and config of each. settings: of the whole model."""
    listed = [("", "sentence_transformers.models.Transformer"), *((path, kind) for path, kind, _ in modules)]
    rows = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(listed)]
    (folder / "modules.json").write_text(json.dumps(rows))
    for path, _, config in modules:
        if config is not None:
            (folder / path).mkdir(exist_ok=True)
            (folder / path / "config.json").write_text(json.dumps(config))
    if settings is not None:
        (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
