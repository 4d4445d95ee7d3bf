"""``farandole lora``: fine-tune a model together, by adapters of a base model that each member has."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from farandole.protocol.wire.errors import ManifestError

from ...base.settings import NodeSettings
from .options import AsJson, takes_settings
from .runs import sign_run_file

lora_app = typer.Typer(
    help="Fine-tune a model together: adapters (LoRA) of a base model that each member has.", no_args_is_help=True
)


@lora_app.command("create")
@takes_settings("base", "data")
def create_lora(
    settings: NodeSettings,
    rank: Annotated[int, typer.Option(min=1, help="Rank of the adapters, r.")] = 16,
    as_json: AsJson = False,
) -> None:
    """Write a run file for adapters, lora.toml, and sign it, lora.manifest. Everybody brings text of their own.

    Only the adapters travel: the base stays where it is, and the text never leaves its member.

    Example: [cyan]farandole lora create --base Qwen3-8B --rank 16 --data my-texts[/cyan], then what it prints; others
    use [cyan]farandole join INVITE --base Qwen3-8B --data their-texts[/cyan]
    """
    if settings.base is None:
        raise ManifestError("which model? name your copy of the base, a Hugging Face folder, with --base FOLDER")
    run_file, path = Path("lora.toml"), Path("lora.manifest")
    if run_file.exists() or path.exists():
        raise ManifestError(f"{run_file} or {path} is there already: make the new run in another folder")
    base = settings.base.resolve()
    place = json.dumps(str(base), ensure_ascii=False)  # TOML has no surrogates
    text = f'name = "lora"\nmodel = {{lora = {place}, rank = {rank}}}\ndata = {{source = "text"}}\n'
    run_file.write_text(text, encoding="utf-8")
    try:
        sign_run_file(settings, run_file, path, as_json=as_json, is_started=bool(settings.data))
    except BaseException:  # Ctrl-C too: the next try finds no half of a run
        run_file.unlink()
        raise
    if settings.data and not as_json:
        places = [f"--base {shlex.quote(str(base))}", *(f"--data {shlex.quote(str(each))}" for each in settings.data)]
        typer.echo(f"start its first node with: farandole join {path} {' '.join(places)}")
