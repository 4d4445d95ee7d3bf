"""The command line: each command reads its options, calls one function, and prints (`farandole.node.app.commands`).

Starting is fast because nothing heavy is imported before a command needs it: neither torch nor libp2p for help,
``id``, ``run ...``, ``status``, ``peers`` and ``leave``.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from functools import cache
from importlib.metadata import entry_points
from typing import Annotated, Final, NoReturn

import typer

from farandole.protocol.wire.errors import FarandoleError

from .app.commands.checkpoints import checkpoint_app
from .app.commands.config import config_app
from .app.commands.control import dial, join, leave, limit, pause, relay, resume, show_id, start
from .app.commands.plan import plan_run
from .app.commands.runs import lora_app, run_app
from .app.commands.status import dashboard, doctor, peers, status
from .app.commands.talk import chat, sample, serve
from .base.errors import Exit
from .base.system.terminal import show_all_characters

EXTENSIONS: Final = "farandole.commands"
"""Entry points that are groups of commands: `farandole testnet`."""

app = typer.Typer(
    name="farandole",
    epilog="A node's settings are options, environment variables, or lines of a file: farandole config init.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
run_app.command("plan")(plan_run)
for panel, commands in {
    "Train": (start, join, limit, pause, resume, leave),
    "Look": (status, peers, dashboard, doctor),
    "Connect": (relay, dial),
    "Use the model": (sample, chat, serve),
}.items():
    for shown in commands:
        app.command(rich_help_panel=panel)(shown)
for name, group in {"run": run_app, "checkpoint": checkpoint_app, "lora": lora_app, "config": config_app}.items():
    app.add_typer(group, name=name)
app.command("id")(show_id)


def _print_version(is_asked_for: bool) -> None:
    if is_asked_for:
        from .base.project import VERSION

        typer.echo(VERSION)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Train one model together with others, peer to peer: no coordinator, no account."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit with its code (`Exit`).

    Errors that farandole raises on purpose become one line and an exit code; others are defects, and stay as they are,
    with a note that says so.
    """
    show_all_characters()
    if sys.platform == "win32":
        typer.echo("error: native Windows is not supported: install farandole in WSL2 (docs/install.md)", err=True)
        sys.exit(Exit.BAD_INPUT)
    try:
        whole_app()(args=arguments)
    except FarandoleError as error:
        from .base.control import ControlError, NoNodeError

        typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
        is_lost = isinstance(error, ControlError) and error.code in ("timeout", "internal")
        sys.exit(Exit.NO_NODE if is_lost or isinstance(error, NoNodeError) else Exit.BAD_INPUT)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(Exit.INTERRUPTED)
    except Exception as error:  # any defect; it stays as it is, with a note
        from .base.project import VERSION

        error.add_note(f"This is a defect of farandole {VERSION}")
        raise
    sys.exit(Exit.OK)


@cache
def whole_app() -> typer.Typer:
    """Return the node's commands with the groups of entry points: this room does not import `farandole.testnet`."""
    for group in entry_points(group=EXTENSIONS):
        app.add_typer(group.load(), name=group.name)
    _join_lines_of_help(app)
    return app


def _join_lines_of_help(application: typer.Typer) -> None:
    """Make each paragraph of a command's docstring one line: help wraps it at the terminal's width, not at ours."""
    for command in application.registered_commands:
        if command.help is None and command.callback is not None and (text := inspect.getdoc(command.callback)):
            command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
    for group in application.registered_groups:
        if group.typer_instance is not None:
            _join_lines_of_help(group.typer_instance)
