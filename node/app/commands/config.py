"""``farandole config``: the settings file, and where each value comes from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from farandole.protocol.wire.errors import FarandoleError

from ...base.config.file import CONFIG_NAME, SETTINGS, config_text, read_limits
from ...base.settings import NodeSettings
from .options import AsJson, Home, takes_settings
from .output import print_json

config_app = typer.Typer(help="Write the settings file, and show settings.", no_args_is_help=True)


@config_app.command("init")
def init_config(
    home: Home,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Write a settings file into the node's folder, with every setting, its meaning, and its default or an
    example, commented out.

    Example: [cyan]farandole config init[/cyan]
    """
    from ...base.identity import make_home

    make_home(home)
    path = home / CONFIG_NAME
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(config_text())
    except FileExistsError as error:
        raise FarandoleError(f"{path} is there already; --force replaces it") from error
    except OSError as error:
        raise FarandoleError(f"cannot write {path}: {error.strerror}") from error
    typer.echo(f"settings in {path}: remove the # before a setting to use it; the node reads the file when it starts")


@config_app.command("show")
@takes_settings(*(setting.name for setting in SETTINGS), must_exist=False)
def show_config(settings: NodeSettings, config: Path, as_json: AsJson = False) -> None:
    """Print every setting, and where its value comes from: a flag, the environment, `farandole limit`, the settings
    file or the default.

    Add flags of `farandole join` to see their effect. Exit code 3 if the file is wrong: each fault is named.
    Whether its devices, paths and addresses exist, farandole doctor finds out.

    Examples: [cyan]farandole config show[/cyan]; [cyan]farandole config show --json | jq .settings.slow[/cyan]
    """
    from rich.console import Console
    from rich.table import Table

    limits = {name: "farandole limit" for name in read_limits(settings.home) if settings.sources[name] == "file"}
    sources = {**settings.sources, **limits}
    values = {setting.name: getattr(settings, setting.name) for setting in SETTINGS}
    if as_json:
        shown = {name: {"value": value, "source": sources[name]} for name, value in values.items()}
        print_json({"home": str(settings.home), "file": str(config) if config.exists() else None, "settings": shown})
    else:
        typer.echo(f"home  {settings.home}")
        typer.echo(f"file  {config}{'' if config.exists() else ' (not there)'}")
        table = Table("setting", "value", "from", box=None)
        for setting in SETTINGS:
            source, value = sources[setting.name], values[setting.name]
            origin = f"{source} {setting.variable}" if source == "environment" else source
            told = setting.unset if value is None else json.dumps(value, default=str)
            table.add_row(setting.name, told, origin, style="dim" if source == "default" else "")
        Console(markup=False).print(table)
