"""`quire completion bash|zsh|fish`: print a script that completes commands, flags and their values in a shell."""

import argparse
from typing import Any

from quire.cli.shell_scripts import SCRIPTS, read_tree

EXAMPLES = """to try it in this shell:
  source <(quire completion bash)
  source <(quire completion zsh)
  quire completion fish | source

to keep it:
  bash   quire completion bash > ~/.local/share/bash-completion/completions/quire
  zsh    quire completion zsh > ~/.zfunc/_quire     (with `fpath+=~/.zfunc` before `compinit` in ~/.zshrc)
  fish   quire completion fish > ~/.config/fish/completions/quire.fish"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "completion",
        help="print a completion script for bash, zsh or fish",
        description="Prints a script by which a shell completes commands, flags and their values. It is made from the flags of "
        "this version: print it again after an upgrade.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=tuple(SCRIPTS), metavar="SHELL", help=f"the shell: {', '.join(SCRIPTS)}")
    parser.set_defaults(run=run)


def run(namespace: argparse.Namespace) -> int:
    from quire.cli.main import make_parser

    print(SCRIPTS[namespace.shell](read_tree(make_parser())), end="")
    return 0
