"""Options that several commands take; options for settings are generated from the settings' own declarations."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final, get_args, get_type_hints

import typer
from typer.core import TyperArgument, TyperOption

from ...base.config.file import CONFIG_NAME, CONFIG_VARIABLE, read_config, read_limits
from ...base.config.setting import PANELS, Setting, settings_of
from ...base.settings import HOME_VARIABLE, NodeSettings, default_home

# By click's names for them.
_SOURCES: Final = {"COMMANDLINE": "flag", "ENVIRONMENT": "environment", "DEFAULT_MAP": "file"}
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Home = Annotated[
    Path,
    typer.Option(
        "--home",
        default_factory=default_home,
        envvar=HOME_VARIABLE,
        show_envvar=False,
        help="The node's data directory.",
        show_default="~/.farandole",
        file_okay=False,
        is_eager=True,  # the settings file is in it
    ),
]


def _read_limits(context: typer.Context, home: Path) -> Path:
    """Take from the kept limits what no flag or variable gives; ``--config`` may be read before or after this."""
    if not context.resilient_parsing:
        context.default_map = {**(context.default_map or {}), **read_limits(Path(home))}
    return home


# The folder of a node whose settings are wanted.
_SETTINGS_HOME = copy.copy(get_args(Home)[1])
_SETTINGS_HOME.callback = _read_limits


def _read_config(context: typer.Context, path: Path | None) -> Path:
    """Take from the settings file what no flag or variable gives; only a file named by the user must exist."""
    for parameter in context.command.params:
        if isinstance(parameter, TyperArgument | TyperOption):
            parameter.show_envvar = True  # no help is asked for: errors must name a variable with a wrong value
    place = path or Path(context.params["home"]) / CONFIG_NAME
    if not context.resilient_parsing and (path or place.exists()):
        context.default_map = {**read_config(place), **(context.default_map or {})}
    return place


ConfigFile = Annotated[
    Path,
    typer.Option(
        "--config",
        callback=_read_config,
        envvar=CONFIG_VARIABLE,
        show_envvar=False,
        help="Settings file. Flags and environment variables take precedence; the variable of --upload-mbit, for "
        "example, is FARANDOLE_UPLOAD_MBIT.",
        show_default=f"{CONFIG_NAME} in the node's folder",
        dir_okay=False,
        is_eager=True,
    ),
]


Command = Callable[..., None]


def takes_settings(*names: str, must_exist: bool = True, of_run_file: bool = False) -> Callable[[Command], Command]:
    """Give a command ``--home``, ``--config``, and options for the named settings, or for all settings of a daemon.

    Its first parameter gets the `NodeSettings` made from them. Its other parameters are its own options and arguments,
    including ``config``, the settings file's path, if it wants that. Paths that do not exist are refused, unless
    ``must_exist`` is False. With ``of_run_file`` the argument is a run file, where a daemon's is an invite.
    """
    chosen = [setting for setting in settings_of(NodeSettings) if not names or setting.name in names]
    # Help shows panels in the order of their first options.
    chosen.sort(key=lambda setting: PANELS.index(setting.panel))
    argument: dict[str, Any] = {}
    if of_run_file:
        argument = {"help": "The run's settings, as for `run create`.", "unset": "run.toml", "placeholder": "RUN.TOML"}
    elif names:  # only a whole node takes a manifest too, and the doctor needs no invite
        unset = "the run that this folder knows" if "announce" in names else "the run of the node that runs here"
        argument = {"help": "An invite to the run.", "unset": unset}
    chosen = [replace(setting, **argument) if setting.is_argument else setting for setting in chosen]

    def decorate(command: Command) -> Command:
        hints = get_type_hints(command, include_extras=True)
        _, *own = inspect.signature(command).parameters.values()

        @functools.wraps(command)
        def run(context: typer.Context, home: Path, config: Path, **given: Any) -> None:
            values = {setting.name: given.pop(setting.name) for setting in chosen}
            if "config" in hints:
                given["config"] = config
            ways = {name: context.get_parameter_source(name) for name in values}
            sources = {name: _SOURCES.get(way.name, "default") for name, way in ways.items() if way is not None}
            command(NodeSettings(home=home, sources=sources, **values).with_base(), **given)

        parameters = [
            _parameter("context", typer.Context, inspect.Parameter.empty),
            _parameter("home", Annotated[Path, _SETTINGS_HOME], inspect.Parameter.empty),
            _parameter("config", ConfigFile, None),
            *(_parameter(each.name, hints[each.name], each.default) for each in own if each.name != "config"),
            *(_parameter(each.name, _option(each, must_exist), each.default) for each in chosen),
        ]
        # The attributes that typer reads.
        vars(run).update(__signature__=inspect.Signature(parameters))
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def reader_of(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return ``parse``, which raises `ValueError`, as typer takes it: raising `typer.BadParameter`."""

    def read(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return read


def _parameter(name: str, annotation: object, default: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _option(setting: Setting, must_exist: bool) -> Any:
    """Return the field's type, annotated so that typer makes an option of it."""

    def check(value: Any) -> Any:
        if not setting.is_allowed(value):
            raise typer.BadParameter(f"expected {setting.expected}")
        return setting.read(value)

    told: dict[str, Any] = {
        "help": f"{setting.help} ({setting.bounds[0].upper()}{setting.bounds[1:]}.)"
        if setting.bounds
        else setting.help,
        "envvar": setting.variable,
        "show_envvar": False,  # the help of ``--config`` says how variables are called
        "callback": check,
    }
    if placeholder := setting.placeholder or setting.unit.upper():
        told["metavar"] = placeholder
    if setting.unset:
        told["show_default"] = setting.unset
    if setting.kind is Path or Path in get_args(setting.kind):
        told.update(exists=must_exist, dir_okay=setting.placeholder != "FILE")
    if setting.is_hidden:
        told["hidden"] = True
    if setting.is_argument:
        return Annotated[setting.annotation, typer.Argument(**told)]
    return Annotated[setting.annotation, typer.Option(setting.flag, rich_help_panel=setting.panel, **told)]
