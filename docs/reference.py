"""Writes the pages that the code itself determines, reference.md and errors.md: python docs/reference.py."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import msgspec
import typer

from farandole.node.base.causes import CAUSES, CHECKS, check_of
from farandole.node.base.config.file import SETTINGS, default_of
from farandole.node.base.config.toml_file import expected, members_of
from farandole.node.base.errors import Exit
from farandole.node.cli import whole_app
from farandole.protocol.run.exclusions import EXCLUSIONS
from farandole.protocol.run.manifest import Manifest

_BY_VARIABLE: Final = {setting.variable: setting for setting in SETTINGS}
_HEAD: Final = """\
# Reference

Every command and setting of farandole; [errors.md](errors.md) has the exit codes. Made by `make reference`; do not edit
it by hand.

These mean the same in each command that has them (`COMMAND --help` says which):

- `--home <dir>`: The node's data directory. Default: `FARANDOLE_HOME`, or ~/.farandole
- `--config <file>`: Settings file; flags take precedence. Default: `FARANDOLE_CONFIG`, or config.toml in it
- `--json`: Print JSON, for scripts.
"""
_COMMON: Final = {"home", "config", "as_json", "json"}
_SETTINGS: Final = """\
## Settings

What a volunteer decides about a node. Each is a key in the settings file (`config.toml` in the node's folder, or what
`--config` or `FARANDOLE_CONFIG` names), a flag, and an environment variable: `upload_mbit`, `--upload-mbit`,
`FARANDOLE_UPLOAD_MBIT`; a switch has two flags, `--relay` and `--no-relay`. Order of precedence: flag, environment
variable, `farandole limit`, settings file, default. `farandole config init` writes a file with all of them, and
`farandole config show` checks it and shows where each value comes from.
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
EXITS: Final = {
    Exit.OK: ("Done; of `join` and `relay`: left cleanly.", ""),
    Exit.NOT_WELL: (
        "`farandole doctor` found a fault that keeps a node from working; or `run plan` found no settings that fit; or "
        "a defect of farandole (a traceback).",
        "Doctor: follow the remedy after each `->`. Plan: take a smaller model, or members with more memory or a "
        "faster line. A traceback: report it.",
    ),
    Exit.USAGE: ("Wrong options or arguments.", "Run the command with `--help`."),
    Exit.BAD_INPUT: (
        "The command cannot work with what it was given or found: an invite, a manifest, a run file, a settings file "
        "or a scenario that is not valid; a file that is there already; or no run, round or checkpoint yet.",
        "The message says which, and what to do. For an invite, copy the whole line again.",
    ),
    Exit.NO_NODE: (
        "No node runs with this data directory, or it does not answer.",
        "Start it (`farandole join`), or name its data directory with `--home`. If it runs, see the end of its `log`.",
    ),
    Exit.CANNOT_JOIN: (
        "The node could not join; the last lines say which step failed and what to do.",
        "Run `farandole doctor INVITE` to find the reason. If the invite is old, any member can make a newer one.",
    ),
    Exit.HOME_IN_USE: (
        "Another node runs with this data directory.",
        "`farandole leave` ends it. To run both, give this one its own data directory with `--home`.",
    ),
    Exit.TRAINER_FAILED: (
        "The trainer process cannot run here: device, memory, data.",
        "The last lines give the reason. Often `--device cpu` or another `--data` helps.",
    ),
    Exit.VERDICT_FAILED: (
        "The testnet ran, and its verdict is not a pass; or `run audit` found a round that is not as its author says.",
        "For a testnet, see the reasons in report.json, and the nodes' logs next to it. For an audit, tell the run's "
        "creator which author it names.",
    ),
    Exit.INTERRUPTED: (
        "Ctrl-C before the command had finished, a second request to leave while a node was leaving, or the answer to "
        "a question was no.",
        "Run the command again. A node loses only the training since its last checkpoint.",
    ),
}
"""What each exit code means, and what to do about it."""
_DOCTOR: Final = """\
## What the doctor finds

Fix each `failed` first: the node does not work until then. With a `warning` it works, but not as well as it could.
`farandole doctor --json` gives all findings with the names of their causes. Here are those that need something done.
Words *in italics* are filled in.
"""
_FIELD: Final = re.compile(r"\{(\w+)[^}]*\}")
_EXCLUSIONS: Final = """\
## Settings that exclude each other

A run file or a node that uses both is refused, with the reason.
"""


def reference() -> str:
    """Return the page about all commands and settings as Markdown."""
    command: Any = typer.main.get_command(whole_app())
    excluded = (
        (f"`{each.setting}`", ", ".join(f"`{name}`" for name in each.others), each.reason) for each in EXCLUSIONS
    )
    rows = []
    for setting in SETTINGS:
        if not setting.is_hidden:
            default = f"`{default_of(setting)}`" if setting.default not in (None, []) else default_of(setting)
            note = "" if setting.flag else " (Without a flag.)"
            rows.append((f"`{setting.name}`", setting.expected, default, setting.help + note))
    settings = (
        _SETTINGS,
        table("| key | value | default | meaning |", rows),
        "",
        run_settings(),
        _EXCLUSIONS,
        table("| setting | excludes | because |", excluded),
        "",
    )
    return "\n".join(
        itertools.chain([_HEAD], _commands(command, typer.Context(command, info_name="farandole")), settings)
    )


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
            yield _about_command(child, within)


def _about_command(command: Any, context: Any) -> str:
    parts = [f"## {context.command_path}", _markdown(command.help)]
    taken, options = [], []
    for parameter in command.get_params(context):
        if parameter.envvar in _BY_VARIABLE:
            taken.append(_BY_VARIABLE[parameter.envvar])
        elif parameter.name != "help" and not parameter.hidden and parameter.name not in _COMMON:
            options.append(_option(parameter, context))
    if options:
        parts.append("\n".join(options))
    if len(taken) == len(SETTINGS):
        parts.append("And every [setting](#settings).")
    elif taken:
        names = ", ".join(f"`{setting.name}`" for setting in taken)
        parts.append(f"And the [settings](#settings) {names}.")
    return "\n\n".join(parts) + "\n"


def _option(parameter: Any, context: Any) -> str:
    """Return the line about an option or argument."""
    names, told = parameter.get_help_record(context)
    meaning = parameter.help or ""
    extra = told.removeprefix(meaning).strip().removeprefix("[").removesuffix("]")
    names = parameter.metavar if parameter.param_type_name == "argument" else names.replace(" range>", ">")
    default = f" ({extra})" if extra else ""
    return f"- `{names}`: {_markdown(meaning)}{default}"


def _markdown(text: str) -> str:
    """Return Rich's markup as Markdown."""
    return re.sub(r"\[cyan\](.*?)\[/cyan\]", r"`\1`", text)


def catalogue() -> str:
    """Return the page about exit codes and what the doctor can find as Markdown."""
    exits = ((str(code.value), code.name, *EXITS[code]) for code in Exit)
    causes = (
        # Placeholders are set in italics.
        (f"`{name}`", level, *(_FIELD.sub(r"*\1*", text) for text in (found, remedy)))
        for check in CHECKS
        for name, (level, found, remedy) in CAUSES.items()
        if check_of(name) == check and remedy
    )
    of_codes = table("| code | name | meaning | what to do |", exits)
    of_causes = table("| cause | | it says | what to do |", causes)
    return "\n".join([_ERRORS, "## Exit codes\n", of_codes, "", _DOCTOR, of_causes, ""])


_RUN_HEAD: Final = """\
## Settings of a run

What a run's creator writes into its run file, for `farandole run create`. [examples/run.toml](../examples/run.toml)
explains the usual ones, and [researcher.md](researcher.md#describe-the-run) when to choose which. `farandole run show`
prints those of a run. They never change: another setting is another run. What a run file leaves out has the default;
*chosen*: `farandole run create` chooses it for your model and home lines, and prints it with the reason.
"""
_TOP: Final = ("name", "seed", "admission", "private", "audits")
# Sections that people write; commands write the others.
_SECTIONS: Final = ("model", "tokenizer", "data", "inner", "outer", "rounds", "pipeline", "screening")
# What a run file has in place of what the manifest has: key, value, meaning.
_RUN_FILE: Final = {
    "model": (
        ("preset", "a preset's name in quotes", "the sizes below; the section's other keys change them"),
        ("hf", "a folder or a config.json, in quotes", "a Hugging Face model, which the sizes below follow from"),
        ("own", '"package.module:function"', "a module of your own"),
        ("config", "a table", "the arguments of that function"),
    ),
    "tokenizer": (
        ("file", "a path in quotes", "a file of Hugging Face `tokenizers`; without it, each byte is a token"),
    ),
    "inner": (
        ("warmup_tokens", "a number above 0", "in place of `warmup_steps`: tokens of one member"),
        ("total_tokens", "a number above 0", "in place of `total_steps`: tokens of one member"),
    ),
}
_REPLACED: Final = frozenset({"model.hf", "model.own", "model.external", "tokenizer.kind", "tokenizer.sha256"})
# Bounds that only models made elsewhere may fall below.
_LEAST: Final = {"model.width": 8, "model.hidden": 8, "model.context": 8, "model.vocabulary": 2, "model.num_heads": 1}
# Left open, these are chosen (`farandole.protocol.planning.planning`).
_CHOSEN: Final = frozenset(
    {
        *("inner.optimizer", "inner.learning_rate", "inner.warmup_steps"),
        *("outer.codec", "outer.fragments"),
        *("rounds.round_seconds", "rounds.exchange_seconds", "rounds.overlap", "pipeline.codec"),
    }
)
_RUN_HEADER: Final = "| key | value | default | meaning |"


def run_settings() -> str:
    """Return the chapter about the settings of a run."""
    fields = {field.name: field for field in msgspec.structs.fields(Manifest)}
    parts = [_RUN_HEAD, table(_RUN_HEADER, _rows("", [fields[name] for name in _TOP], _meanings(Manifest))), ""]
    for section in _SECTIONS:
        parts += _section(section, members_of(fields[section].type), fields[section].default)
    return "\n".join(parts)


def _section(name: str, structs: Sequence[type[msgspec.Struct]], default: Any) -> Iterator[str]:
    """Yield the lines about a section; of several structs, which ``kind`` names, first the settings that all have."""
    shared = set.intersection(*(set(struct.__struct_fields__) for struct in structs))
    written = ((f"`{key}`", value, "", meaning) for key, value, meaning in _RUN_FILE.get(name, ()))
    yield f"### [{name}]\n"
    if len(structs) == 1:
        yield f"{_sentences(structs[0].__doc__ or '')}\n"
    elif name == "outer":
        momentum = "`alpha`, `beta`, `gamma` or `momentum`"
        yield f"Without `kind`, a run gets `plain`, or `noloco` if the section sets {momentum}.\n"
    else:
        yield f"Without `kind`, a run gets `{default.kind}`.\n"
    if common := [field for field in msgspec.structs.fields(structs[0]) if field.name in shared]:
        yield table(_RUN_HEADER, [*written, *_rows(name, common, _meanings(structs[0]))])
        yield ""
    for struct in structs if len(structs) > 1 else []:
        yield f'With `kind = "{struct.__struct_config__.tag}"`: {_sentences(struct.__doc__ or "")}\n'
        if own := [field for field in msgspec.structs.fields(struct) if field.name not in shared]:
            yield table(_RUN_HEADER, _rows(name, own, _meanings(struct)))
            yield ""


def _rows(
    section: str, fields: Sequence[msgspec.structs.FieldInfo], meanings: Mapping[str, str]
) -> Iterator[tuple[str, ...]]:
    for field in fields:
        place = f"{section}.{field.name}"
        if place in _REPLACED:
            continue
        value = expected(field.type)
        if place in _LEAST:
            value = value.replace(", 0 to ", f", {_LEAST[place]} to ")
        default = field.default
        if default in (msgspec.NODEFAULT, None):
            told = ""
        else:
            told = f"`{default:g}`" if isinstance(default, float) else f"`{json.dumps(default)}`"
        meaning = _sentences(meanings.get(field.name, ""))
        yield f"`{field.name}`", value, "chosen" if place in _CHOSEN else told, meaning


def _meanings(struct: type) -> dict[str, str]:
    """Return the docstrings of a struct's fields, those of its bases included."""
    found: dict[str, str] = {}
    for each in reversed(struct.__mro__):
        if not each.__module__.startswith("farandole."):
            continue
        [definition] = ast.parse(inspect.getsource(each)).body
        assert isinstance(definition, ast.ClassDef), "it is a struct's source"
        for field, told in pairwise(definition.body):
            match field, told:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = text
    return found


def _sentences(docstring: str) -> str:
    """Return a docstring's first paragraph in one line, with names as in Markdown."""
    text = " ".join(inspect.cleandoc(docstring).split("\n\n")[0].split())
    return re.sub(r"``([^`]*)``", r"`\1`", text).replace("null:", "left out:")


def table(header: str, rows: Iterable[Sequence[str]]) -> str:
    """Return rows of cells as a table, below the line ``header``."""
    cells = ((cell.replace("|", r"\|").replace("\n", " ") for cell in row) for row in rows)
    lines = ("".join(f"| {cell} " for cell in row) + "|" for row in cells)
    return "\n".join([header, "|" + "---|" * (header.count("|") - 1), *lines])


def main() -> None:
    """Write the pages."""
    folder = Path(__file__).parent
    (folder / "reference.md").write_text(reference())
    (folder / "errors.md").write_text(catalogue())


if __name__ == "__main__":
    main()
