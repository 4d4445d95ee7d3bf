"""Checks that a documented command could be typed: its program exists, and takes these options."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import typer

from farandole.node.cli import whole_app
from farandole.testnet.bench.commands import command_of

from .markdown import ROOT

# Programs other than farandole that pages may use: those that tests play, and the others by the reason.
PLAYED = "cat cd chmod cp curl grep jq kill ls mkdir mv mypy pytest python python3 ruff lint-imports source"
NOT_PLAYED = {
    "changes the system": "apt chown loginctl rm systemctl timedatectl",
    "needs the network or another machine": "docker git pip pipx pre-commit ssh uv",
    "needs a GPU, or systemd": "nvidia-smi journalctl",
    "is not installed with farandole": "lm_eval",
    "sets up an environment; what its targets run is tested by itself": "make",
    "starts two processes with torch, as tests/node/test_own_loop.py does": "torchrun",
}


@cache
def whole_command() -> Any:
    """Return farandole's command, made once: typer makes all of it at each use of an application."""
    return typer.main.get_command(whole_app())


def check(words: Sequence[str]) -> None:
    """Raise an error with the problem if a command line could not be typed."""
    program = Path(words[0]).name
    if program == "farandole":
        check_farandole(words[1:])
    elif program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        unknown = [word for word in words[1:] if "=" not in word and word not in targets]
        assert not unknown, f"no target of the Makefile: {unknown}"
    else:
        known = " ".join((PLAYED, *NOT_PLAYED.values()))
        assert program in known.split(), f"{program}: list it in {__name__}, and say whether tests may play it"


def check_farandole(arguments: Sequence[str]) -> None:
    """Parse as typer does, without checking values: typer has no public types for an application's commands."""
    command = whole_command()
    context: Any = typer.Context(command, info_name="farandole", **command.context_settings)
    while True:
        given, rest, _ = command.make_parser(context).parse_args(list(arguments))
        if not (hasattr(command, "list_commands") and rest):
            break
        name, *arguments = rest
        command = command.get_command(context, name)
        assert command is not None, f"no command {name!r} in {context.command_path}"
        if context.info_name == "bench":
            command = command_of(name)
        context = typer.Context(command, info_name=name, parent=context)
    if given.get("help"):
        return
    assert not rest, f"{context.command_path} takes no argument {rest}"
    assert given or not hasattr(command, "list_commands"), f"{context.command_path} needs a command"
    missing = [each.name for each in command.params if each.required and not given.get(each.name)]
    assert not missing, f"{context.command_path} needs {missing}"


def check_name(words: Sequence[str]) -> None:
    """Check words that begin with a command's name; its required arguments may be missing."""
    command = whole_command()
    path = "farandole"
    for word in words:
        if not hasattr(command, "list_commands"):
            return
        context: Any = typer.Context(command, info_name=path)
        command = command.get_command(context, word)
        assert command is not None, f"no command {word!r} in {path}"
        path = f"{path} {word}"


def is_played(words: Sequence[str]) -> bool:
    """Return whether tests may run the command on their own machine."""
    program = Path(words[0]).name
    return program == "farandole" or (program in PLAYED.split() and shutil.which(program) is not None)
