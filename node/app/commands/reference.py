"""Pages generated from the code itself: ``docs/reference.md`` and ``docs/errors.md``."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Annotated, Any, Final

import typer

from ...base.config.file import SETTINGS, default_of
from ...base.exits import Exit
from .output import table

_BY_VARIABLE: Final = {setting.variable: setting for setting in SETTINGS}
_HEAD: Final = """\
# Reference

Every command and setting of farandole; [errors.md](errors.md) has the exit codes. Made by `make reference`; do not edit
it by hand.

These mean the same in each command that has them (`COMMAND --help` says which):

| option | meaning | default |
|---|---|---|
| `--home <dir>` | The node's data directory. | env var: FARANDOLE_HOME; default: (~/.farandole) |
| `--config <file>` | Settings file; flags take precedence. | env var: FARANDOLE_CONFIG; default: config.toml |
| `--json` | Print JSON, for scripts. | |
"""
_COMMON: Final = {"home", "config", "as_json", "json"}
_SETTINGS: Final = """\
## Settings

What a volunteer decides about a node. Each is a flag, an environment variable, and a key in the settings file
(`config.toml` in the node's folder, or what `--config` or `FARANDOLE_CONFIG` names). Order of precedence: flag,
environment variable, settings file, default. `farandole config init` writes a file with all of them,
`farandole config check` checks one, and `farandole config show` shows where each value comes from.
For a setting with several values, repeat the flag, separate the values by spaces in the variable (paths by `:`), or
write a list in the file. Relative paths in the file start at its folder.
"""
_ERRORS: Final = """\
# What can be wrong, and what to do

Every exit code of farandole, and everything that `farandole doctor` can find, with its remedy. Made by
`make reference`; do not edit it by hand.

The first line of `farandole status` shows the state of a running node; `farandole doctor INVITE` examines this machine,
the way to the run's members, and what they see of it. Exit codes and names of causes are stable: scripts may rely on
them.
"""
_DOCTOR: Final = """\
## What the doctor finds

The report shows failures first, then warnings, each with its remedy, and one line with the checks that passed. Its
last line lists the checks that were skipped, and why; `--verbose` shows a line for every check. Fix each `failed`
first: the node does not work until then. With a `warning` it works, but not as well as it could. `farandole doctor
--json` gives all findings with the names of their causes. Words *in italics* are filled in.
"""
_FIELD: Final = re.compile(r"\{(\w+)[^}]*\}")
_EXCLUSIONS: Final = """\
## Settings that exclude each other

A run file or a node that uses both is refused, with the reason.
"""


def print_reference(
    context: typer.Context, errors: Annotated[bool, typer.Option("--errors", help="What can be wrong instead.")] = False
) -> None:
    """Print the reference of all commands and settings, or what can be wrong and the exit codes, as Markdown."""
    if errors:
        parts = _catalogue()
    else:
        root = context.find_root()
        from .run_settings import run_settings

        settings = (_SETTINGS, _settings(), "", run_settings(), _EXCLUSIONS, _exclusions(), "")
        parts = itertools.chain([_HEAD], _commands(root.command, root), settings)
    typer.echo("\n".join(parts), nl=False)


def _commands(command: Any, context: Any) -> Iterator[str]:
    """Yield a section for each command below ``command``; typer has no public types for an application's commands."""
    for name in command.list_commands(context):
        child = command.get_command(context, name)
        if child.hidden:
            continue
        within = typer.Context(child, info_name=name, parent=context)
        if hasattr(child, "list_commands"):
            yield from _commands(child, within)
        else:
            yield _section(child, within)


def _section(command: Any, context: Any) -> str:
    # Without the name of this process's program.
    path = f"farandole{context.command_path.removeprefix(context.find_root().command_path)}"
    parts = [f"## {path}", f"    {path} {' '.join(command.collect_usage_pieces(context))}", _markdown(command.help)]
    taken, rows = [], []
    for parameter in command.get_params(context):
        if parameter.envvar in _BY_VARIABLE:
            taken.append(_BY_VARIABLE[parameter.envvar])
        elif parameter.name != "help" and not parameter.hidden and parameter.name not in _COMMON:
            rows.append(_row(parameter, context))
    if rows:
        parts.append(table("| option | meaning | default |", rows))
    if len(taken) == len(SETTINGS):
        parts.append("And every [setting](#settings).")
    elif taken:
        flags = ", ".join(f"`{setting.flag or setting.name}`" for setting in taken)
        parts.append(f"And the [settings](#settings) {flags}.")
    return "\n\n".join(parts) + "\n"


def _row(parameter: Any, context: Any) -> tuple[str, ...]:
    names, told = parameter.get_help_record(context)
    meaning = parameter.help or ""
    extra = told.removeprefix(meaning).strip().removeprefix("[").removesuffix("]")
    if parameter.envvar and not parameter.show_envvar:
        extra = f"env var: {parameter.envvar}; {extra}"
    names = parameter.metavar if parameter.param_type_name == "argument" else names.replace(" range>", ">")
    return f"`{names}`", _markdown(meaning), extra.removeprefix("default: ")


def _settings() -> str:
    rows = []
    for setting in SETTINGS:
        if setting.about.is_hidden:
            continue
        about = setting.about
        flag = f"`{setting.flag}`" if setting.flag else f"`{about.placeholder}`, without a flag"
        default = f"`{default_of(setting)}`" if setting.default not in (None, []) else default_of(setting)
        rows.append((f"`{setting.name}`", flag, f"`{setting.variable}`", setting.expected, default, about.help))
    return table("| key | flag | variable | value | default | meaning |", rows)


def _exclusions() -> str:
    from farandole.protocol.run.exclusions import EXCLUSIONS

    rows = ((f"`{each.setting}`", ", ".join(f"`{name}`" for name in each.others), each.reason) for each in EXCLUSIONS)
    return table("| setting | excludes | because |", rows)


def _markdown(text: str) -> str:
    """Return Rich's markup as Markdown."""
    return re.sub(r"\[cyan\](.*?)\[/cyan\]", r"`\1`", text)


def _catalogue() -> Iterator[str]:
    """Yield the page of what can be wrong, in paragraphs."""
    from ..doctor.causes import CAUSES, CHECKS, check_of  # with what ``--help`` does not need

    yield _ERRORS
    exits = ((str(code.value), code.name, code.meaning, code.remedy) for code in Exit)
    yield "## Exit codes\n"
    yield table("| code | name | meaning | what to do |", exits) + "\n"
    yield _DOCTOR
    for check, about in CHECKS.items():
        yield f"### {check}: {about}\n"
        rows = (
            (f"`{name}`", cause.level, _fields(cause.found), _fields(cause.remedy))
            for name, cause in CAUSES.items()
            if check_of(name) == check
        )
        yield table("| cause | | it says | what to do |", rows) + "\n"


def _fields(text: str) -> str:
    """Return the text with its placeholders set in italics."""
    return _FIELD.sub(r"*\1*", text)
