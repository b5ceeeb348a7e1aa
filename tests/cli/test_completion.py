"""`quire completion` prints scripts that the shells themselves run here, where they are installed."""

import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from quire.cli.main import COMMANDS, main, make_parser
from quire.cli.shell_scripts import SCRIPTS, read_tree


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("completion")
    tree = read_tree(make_parser())
    found = {name: directory / f"quire.{name}" for name in SCRIPTS}
    for name, path in found.items():
        path.write_text(SCRIPTS[name](tree))
    (directory / "model with spaces.gguf").touch()
    return found


def needs(shell: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"{shell} is not installed")


def in_bash(scripts: dict[str, Path], *words: str) -> list[str]:
    """Return the completions of the last word."""
    code = f'source {scripts["bash"]}; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _quire; printf "%s\\n" "${{COMPREPLY[@]}}"'
    command = ["bash", "--norc", "-c", code, "bash", "quire", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=scripts["bash"].parent)
    assert done.stderr == ""
    return [line for line in done.stdout.splitlines() if line]


def in_fish(scripts: dict[str, Path], line: str) -> list[str]:
    command = ["fish", "--no-config", "-c", f"source {scripts['fish']}; complete -C 'quire {line}'"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=scripts["fish"].parent)
    return [row.partition("\t")[0] for row in done.stdout.splitlines()]


def in_zsh(scripts: dict[str, Path], *lines: str) -> list[str]:
    """Return each line as it is after the Tab key, from an interactive shell on a terminal."""
    directory = scripts["zsh"].parent
    script = "\n".join(
        [
            f"autoload -Uz compinit; compinit -D; source {scripts['zsh']}",
            'probe() { zle complete-word; print -r -- "$BUFFER" >> answers; BUFFER=""; zle accept-line }',
            "zle -N probe; bindkey '^I' probe; unsetopt beep; PROMPT=''",
            "print ready > ready",
            "",
        ]
    )
    (directory / "setup.zsh").write_text(script)
    for name in ("answers", "ready"):
        (directory / name).unlink(missing_ok=True)
    master, slave = pty.openpty()
    typed = "source ./setup.zsh\n" + "".join(f"quire {line}\t" for line in lines) + "exit\n"
    shell = subprocess.Popen(
        ["zsh", "-f", "-i"], stdin=slave, stdout=slave, stderr=slave, cwd=directory, start_new_session=True
    )
    try:
        os.close(slave)
        os.write(master, typed.encode())
        while True:
            try:
                if not os.read(master, 4096):
                    break
            except OSError:  # the shell has ended
                break
        assert shell.wait(60) is not None
    finally:
        shell.kill()
        shell.wait()
        os.close(master)
    assert (directory / "ready").exists()
    return (directory / "answers").read_text().splitlines()


@pytest.mark.parametrize("shell", SCRIPTS)
def test_every_command_and_visible_flag_is_in_the_script(shell: str, scripts: dict[str, Path]) -> None:
    script = scripts[shell].read_text()
    for command in read_tree(make_parser()):
        for name in command.path.split():
            assert name in script
        for flag in command.flags:
            for name in flag.names:
                assert re.search(rf"(?<![\w-]){re.escape(name if shell != 'fish' else name.lstrip('-'))}(?![\w-])", script)


def test_flags_that_help_hides_are_not_completed(scripts: dict[str, Path]) -> None:
    for path in scripts.values():
        assert "fully-sharded-loras" not in path.read_text()


def test_bash_completes_commands_flags_and_values(scripts: dict[str, Path]) -> None:
    assert set(COMMANDS) <= set(in_bash(scripts, ""))
    assert in_bash(scripts, "ser") == ["serve"]
    assert in_bash(scripts, "serve", "--max-model-l") == ["--max-model-len"]
    assert in_bash(scripts, "serve", "--dtype", "bf") == ["bfloat16"]
    assert in_bash(scripts, "serve", "--dtype", "=", "bf") == ["bfloat16"]
    assert in_bash(scripts, "serve", "--dtype", "=") == ["auto", "half", "float16", "bfloat16", "float", "float32"]
    assert in_bash(scripts, "completion", "f") == ["fish"]
    assert in_bash(scripts, "bench", "lat") == ["latency"]
    assert "--batch-size" in in_bash(scripts, "bench", "latency", "--ba")
    assert in_bash(scripts, "serve", "--port", "8") == []
    assert in_bash(scripts, "serve", "smol") == ["smollm2"]
    assert in_bash(scripts, "serve", "model") == ["model with spaces.gguf"]
    assert in_bash(scripts, "run", "smollm2", "serve", "--syst") == []  # `serve` is a prompt here
    assert in_bash(scripts, "chat", "smollm2", "--syst") == ["--system"]


@needs("fish")
def test_fish_completes_commands_flags_and_values(scripts: dict[str, Path]) -> None:
    assert set(COMMANDS) <= set(in_fish(scripts, ""))
    assert in_fish(scripts, "serve --max-model-l") == ["--max-model-len"]
    assert in_fish(scripts, "serve --kv-cache-dtype fp8_e4") == ["fp8_e4m3"]
    assert in_fish(scripts, "completion z") == ["zsh"]
    assert in_fish(scripts, "bench latency --batch-s") == ["--batch-size"]
    assert {"smollm2", "model with spaces.gguf"} <= set(in_fish(scripts, "serve "))
    assert in_fish(scripts, "run smollm2 serve --syst") == []


@needs("zsh")
def test_zsh_completes_commands_flags_and_values(scripts: dict[str, Path]) -> None:
    typed = {
        "ser": "quire serve ",
        "serve --max-model-l": "quire serve --max-model-len=",
        "serve --kv-cache-dtype fp8_e4": "quire serve --kv-cache-dtype fp8_e4m3 ",
        "serve --kv-cache-dtype=fp8_e4": "quire serve --kv-cache-dtype=fp8_e4m3 ",
        "completion z": "quire completion zsh ",
        "bench lat": "quire bench latency ",
        "bench latency --batch-s": "quire bench latency --batch-size=",
        "serve smol": "quire serve smollm2 ",
        "serve model": "quire serve model\\ with\\ spaces.gguf ",
    }
    assert [line.rstrip() for line in in_zsh(scripts, *typed)] == [line.rstrip() for line in typed.values()]


def test_it_imports_no_torch_and_says_how_it_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    code = "import sys; from quire.cli.main import main; main(['completion', 'bash']); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.endswith("False\n")
    with pytest.raises(SystemExit):
        main(["completion", "--help"])
    assert "source <(quire completion bash)" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["completion", "tcsh"])
    assert ended.value.code == 2
    assert "SHELL must be one of bash, zsh, fish; got 'tcsh'" in capsys.readouterr().err
