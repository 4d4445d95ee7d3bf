"""``farandole checkpoint``: take a whole model out of a run, pass it on, go on from it."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import typer

from farandole.protocol.wire.errors import ManifestError

from ...base.settings import NodeSettings
from .options import AsJson, Home, takes_settings
from .output import print_answer, say_chosen, write_manifest

# More replicas hardly improve the mean, and each is a download of the whole model.
MAX_MERGED: Final = 16

checkpoint_app = typer.Typer(
    help="Take a whole model out of a run, pass it on, go on from it.",
    no_args_is_help=True,
)

Folder = Annotated[
    Path,
    typer.Argument(metavar="FOLDER", help="Folder of a model, written by `checkpoint pull` or `import`.", exists=True),
]
RunFile = Annotated[
    Path, typer.Argument(metavar="RUN.TOML", help="The new run, as for `run create`; what it leaves out stays.")
]
ImportedRunFile = Annotated[
    Path, typer.Argument(metavar="RUN.TOML", help="The new run, as for `run create`, without the model.")
]
Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", metavar="NEW.MANIFEST", help="The new manifest.", show_default="beside RUN.TOML"),
]


@checkpoint_app.command("pull")
@takes_settings("invite", "port", "listen", "bootstrap", "upload_mbit", "download_mbit", "mdns")
def pull_model(
    settings: NodeSettings,
    to: Annotated[Path, typer.Option("--to", metavar="FOLDER", help="A new folder.")] = Path("model"),
    merge: Annotated[
        int, typer.Option(min=1, max=MAX_MERGED, metavar="K", help="Take K replicas of each stage, and their mean.")
    ] = 1,
    as_json: AsJson = False,
) -> None:
    """Take the whole model out of a run, as a folder: each stage from the members that hold it, without training.

    Without an invite it is the run of the node that runs here. In a run for invited members, name a member's data
    directory (--home), or give an invite; the command then takes one of its --uses. Late in a run the mean of several
    replicas is better than any of them. An interrupted pull goes on later, while a member holds that checkpoint.

    Examples: [cyan]farandole checkpoint pull farandole1... --to model --merge 4[/cyan]; then
    [cyan]farandole checkpoint export model --to model-hf[/cyan]
    """
    from ...base.identity import load_or_create_key
    from ...base.nurseries import run_to_end
    from ...inspect.pull import pull
    from ...join.invites import own_invite
    from .output import open_progress

    settings = replace(settings, invite=settings.invite or own_invite(settings.home, uses=0))
    key = load_or_create_key(settings.key)
    with open_progress() as (say, show):
        task = partial(pull, settings, to, key, merge=merge, say=say, show=show)
        try:
            checkpoint_id = run_to_end(task)
        except KeyboardInterrupt:
            say(f"interrupted: the next pull to {to} goes on with what has come")
            raise
    name = checkpoint_id.hex()
    print_answer(as_json, {"folder": str(to), "id": name}, f"{to} holds the model; its id is {name}")


@checkpoint_app.command("resume")
def resume_run(home: Home, folder: Folder, run_file: RunFile, out: Out = None, as_json: AsJson = False) -> None:
    """Make a new run that goes on from a checkpoint: with other stages, nodes, codec or length, the model the same.

    What the run file leaves out is as it was. The learning rate's schedule and epochs of the data go on where they
    were.

    Example: [cyan]farandole checkpoint resume model run.toml -o more.manifest[/cyan], then
    [cyan]farandole join more.manifest --start model[/cyan]
    """
    from farandole.protocol.run.manifest import sign_manifest

    from ...base.config.toml_file import read_toml
    from ...base.identity import load_or_create_key
    from ...store.consolidated.folder import read_folder
    from ...store.consolidated.resume import other_slices, resumed_manifest

    path = _new_file(out, run_file)
    before, file = read_folder(folder), read_toml(run_file)
    with file.named():
        manifest = resumed_manifest(before, file.values, run_file.parent, time.time())
    signed = sign_manifest(manifest, load_or_create_key(home / "key"))
    write_manifest(path, signed, home, as_json, start=folder)
    if manifest.data.epochs and not as_json:
        assert manifest.start is not None, "it is resumed"
        epochs, why = manifest.start.epochs, other_slices(before.manifest, manifest)
        typer.echo(
            f"its data begins anew, with epoch 1: {why or 'the folder does not say how far that was'}"
            if epochs is None
            else f"its data goes on in epoch {epochs.epoch + 1} of {manifest.data.epochs}, at nodes with the same text"
        )


@checkpoint_app.command("import")
def import_model(
    home: Home,
    hf_folder: Annotated[
        Path, typer.Argument(metavar="HF_FOLDER", help="config.json and model.safetensors.", exists=True)
    ],
    run_file: ImportedRunFile,
    to: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where its weights go, as a checkpoint.", show_default="RUN-start"),
    ] = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Make a run that goes on training a Llama or GPT-2 of Hugging Face. Nothing is downloaded.

    Example: [cyan]farandole checkpoint import ./gpt2 run.toml[/cyan], then
    [cyan]farandole join run.manifest --start run-start[/cyan]
    """
    from farandole.protocol.planning.planning import given_by
    from farandole.protocol.run.manifest import decode_body

    from ...base.config.toml_file import read_toml
    from ...base.identity import load_or_create_key
    from ...store.consolidated.resume import import_model

    path, to = _new_file(out, run_file), to or run_file.with_name(f"{run_file.stem}-start")
    key, file = load_or_create_key(home / "key"), read_toml(run_file)
    with file.named():
        written, signed = import_model(hf_folder, file.values, run_file.parent, to, key, time.time())
    say_chosen(written, decode_body(signed.body), given_by(file.values))
    write_manifest(path, signed, home, as_json, start=to)


@checkpoint_app.command("export")
def export_model(
    folder: Folder,
    to: Annotated[Path, typer.Option("--to", metavar="HF_FOLDER", help="A new folder.")],
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="The run's tokenizer file, if it has one; it goes along.", exists=True, dir_okay=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a Hugging Face folder: config.json, model.safetensors, tokenizer; for transformers and programs like it.

    Of a run that trains adapters: adapter_config.json, adapter_model.safetensors; `PeftModel.from_pretrained` loads it.

    Example: [cyan]farandole checkpoint export model --to model-hf[/cyan]
    """
    from ...store.consolidated.folder import read_folder
    from ...store.consolidated.hf_folder import export_hf

    names = export_hf(read_folder(folder), to, tokenizer)
    print_answer(as_json, {"folder": str(to), "files": names}, f"{to} holds {', '.join(names)}")


def _new_file(out: Path | None, run_file: Path) -> Path:
    path = out or run_file.with_suffix(".manifest")
    if path.exists():
        raise ManifestError(f"{path} is there already: remove it, or name another with --out")
    return path
