"""The tokenizer an engine was asked for."""

from quire.config.config import Config
from quire.text.chat import read_template
from quire.text.tokenizer import Tokenizer
from quire.text.tokenizer_files import load_tokenizer


def open_tokenizer(config: Config) -> Tokenizer | None:
    """None if none is wanted (skip_tokenizer_init)."""
    args = config.args
    if args.skip_tokenizer_init:
        return None
    tokenizer = load_tokenizer(config.facts.files, tokenizer=args.tokenizer, revision=args.tokenizer_revision)
    if args.chat_template is not None:
        tokenizer.chat_template = read_template(args.chat_template)
    return tokenizer
