"""``farandole run``: start a run, look at one, invite to one."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from farandole.protocol.errors import ManifestError

from ...base.settings import NodeSettings
from .options import AsJson, Home, takes_settings
from .output import own_invite, print_answer, print_json, read_manifest, split_source, write_manifest

if TYPE_CHECKING:
    from farandole.protocol.invite import Invite
    from farandole.protocol.manifest import Manifest, SignedManifest

    from ...loop.stages.measuring import MeasuredCut

run_app = typer.Typer(help="Start a run, look at one, invite to one.", no_args_is_help=True)


@run_app.command("create")
@takes_settings("allow_model")
def create_run(
    settings: NodeSettings,
    run_file: Annotated[Path, typer.Argument(metavar="RUN.TOML", help="The settings: see examples/run.toml.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="Where to write the manifest.", show_default="beside RUN.TOML")
    ] = None,
    invite_address: Annotated[
        list[str] | None,
        typer.Option(
            "--invite-address",
            metavar="MULTIADDR",
            help="Print an invite with this multiaddr (ends in /p2p/...); repeatable.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a manifest that is there: another run.")] = False,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Cut the model into its stages by the time that its parts take here, on the GPU if any."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Sign a run file with this node's key: the manifest, which never changes again.

    Example: [cyan]farandole run create run.toml[/cyan], then [cyan]farandole join run.manifest[/cyan];
    [cyan]farandole run create run.toml --measure[/cyan] (of a model that is cut into stages)
    """
    from farandole.protocol.invite import Invite, encode_invite
    from farandole.protocol.manifest import sign_manifest

    from ...base.identity import load_or_create_key
    from ...store.run_file import load_run_file

    manifest = load_run_file(run_file, time.time(), settings.allow_model)
    path = out or run_file.with_suffix(".manifest")
    if path.exists() and not force:
        raise ManifestError(f"{path} is there already; --force replaces it (by another run), --out writes elsewhere")
    measured = None
    if measure:
        from ...loop.stages.measuring import cut_by_measuring

        manifest, measured = cut_by_measuring(manifest, settings.allow_model)
    signed = sign_manifest(manifest, load_or_create_key(settings.key))
    invite = encode_invite(Invite(signed.run_id, tuple(invite_address))) if invite_address else None
    write_manifest(path, signed)
    if as_json:
        import msgspec

        figures = {} if measured is None else {"measured": msgspec.to_builtins(measured)}
        print_json({"run_id": signed.run_id.hex(), "manifest": str(path), "invite": invite, **figures})
        return
    if measured is not None:
        _show_measured(measured)
    typer.echo(f"run {signed.run_id.hex()}")
    brings = _brings(manifest)
    typer.echo(f"manifest in {path}; start its first node with: farandole join {path}{brings}")
    if invite:
        typer.echo(f"others join with: farandole join {invite}{brings}")


def _brings(manifest: Manifest) -> str:
    """What each node's command line has beside the run, as this run is."""
    model = f" --allow-model {manifest.model.own.function}" if manifest.model.own else ""
    data = " --data PATH" if manifest.data.source == "text" else ""
    return model + data + (" --tokenizer FILE" if manifest.tokenizer.sha256 else "")


def _show_measured(measured: MeasuredCut) -> None:
    from rich.console import Console

    from ...loop.stages.measuring import cuts_table

    typer.echo(
        f"for one microbatch, there and back, a layer takes {measured.layer_seconds:.3g} s and both ends "
        f"{measured.ends_seconds:.3g} s on {measured.device}"
    )
    Console().print(cuts_table(measured))


@run_app.command("show")
def show_run(
    source: Annotated[str, typer.Argument(metavar="MANIFEST|INVITE", help="A manifest file, or an invite.")],
    as_json: AsJson = False,
) -> None:
    """Print what a manifest or an invite says, after checking it.

    Example: [cyan]farandole run show run.manifest[/cyan]
    """
    from farandole.protocol.invite import decode_invite

    invite, path = split_source(source)
    if invite is not None:
        _show_invite(decode_invite(invite), as_json)
    elif path is not None:
        _show_manifest(*read_manifest(path), as_json)


@run_app.command("invite")
def make_invite(
    home: Home,
    manifest: Annotated[
        Path | None, typer.Option("--manifest", help="Of this manifest's run, instead of the running node's.")
    ] = None,
    address: Annotated[
        list[str] | None,
        typer.Option("--address", metavar="MULTIADDR", help="To dial first (ends in /p2p/...); repeatable."),
    ] = None,
) -> None:
    """Print an invite: one line, all that others need to join.

    Example: [cyan]farandole run invite[/cyan] on a machine where a node of the run is on
    """
    from farandole.protocol.invite import Invite, encode_invite

    if manifest is None:
        typer.echo(own_invite(home, address))
    elif address:
        typer.echo(encode_invite(Invite(read_manifest(manifest)[1].run_id, tuple(address))))
    else:
        raise ManifestError("an invite from a manifest needs at least one --address that others can dial")


def _show_invite(invite: Invite, as_json: bool) -> None:
    run_id, admission = invite.run_id.hex(), invite.admission.hex()
    lines = [f"invite to run {run_id}", *(f"  dials {address}" for address in invite.addresses)]
    if admission:
        lines.append("  with an admission")
    value = {"run_id": run_id, "addresses": list(invite.addresses), "admission": admission}
    print_answer(as_json, value, "\n".join(lines))


def _show_manifest(manifest: Manifest, signed: SignedManifest, as_json: bool) -> None:
    import msgspec

    from farandole.protocol.identity import peer_id_of

    settings: dict[str, Any] = msgspec.to_builtins(manifest)
    run_id, creator = signed.run_id.hex(), peer_id_of(signed.creator)
    lines = [f"run {run_id}", f"by  {creator}", *_setting_lines(settings)]
    print_answer(as_json, {"run_id": run_id, "creator": creator, "manifest": settings}, "\n".join(lines))


def _setting_lines(settings: dict[str, Any]) -> Iterator[str]:
    """As in a run file: plain values first, then the sections."""
    for name, value in sorted(settings.items(), key=lambda item: isinstance(item[1], dict)):
        if isinstance(value, dict):
            yield f"[{name}]"
            yield from (f"  {key} = {json.dumps(entry)}" for key, entry in value.items())
        else:
            yield f"{name} = {json.dumps(value)}"
