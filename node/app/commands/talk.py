"""``farandole sample``, ``chat`` and ``serve``: text from the newest weights, or from those of a folder."""

from __future__ import annotations

import contextlib
import itertools
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from farandole.protocol.wire.errors import FarandoleError
from farandole.training.model.sampling import USUAL_TEMPERATURE, USUAL_TOP_K, Sampling

from ...base.settings import NodeSettings
from .options import AsJson, takes_settings
from .output import print_json

if TYPE_CHECKING:
    from ...inspect.loaded_model import LoadedModel  # imports torch

# Text is decoded from its beginning on, and many models take a forward pass of the whole context for each token.
MAX_TOKENS: Final = 10_000

ModelFolder = Annotated[
    Path | None,
    typer.Argument(
        metavar="FOLDER",
        help="Folder of a model, written by `checkpoint pull`, `export` or `import`; or one of transformers or peft.",
        show_default="the newest checkpoint of this node",
        exists=True,
        file_okay=False,
    ),
]
NumTokens = Annotated[
    int, typer.Option("--tokens", "-n", min=1, max=MAX_TOKENS, metavar="N", help="Generate at most N tokens.")
]
Temperature = Annotated[
    float, typer.Option(min=0.0, help="Higher is more varied; 0 always takes the likeliest token.", metavar="T")
]
# The device's setting is the trainer's: `device` in the settings file must not decide about these commands.
ComputesOn = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="DEVICE",
        help="cpu, cuda, cuda:1, mps or auto. A GPU shares its memory with a running trainer.",
    ),
]


@takes_settings("base", "tokenizer", "allow_model")
def sample(
    settings: NodeSettings,
    folder: ModelFolder = None,
    prompt: Annotated[
        str, typer.Option(metavar="TEXT", help="The text to continue.", show_default="none: a new document")
    ] = "",
    num_tokens: NumTokens = 200,
    temperature: Temperature = USUAL_TEMPERATURE,
    top_k: Annotated[
        int, typer.Option(min=0, metavar="K", help="Draw from the K likeliest tokens only; 0: from all.")
    ] = USUAL_TOP_K,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the random draws.", metavar="SEED")] = 0,
    computes_on: ComputesOn = "cpu",
    as_json: AsJson = False,
) -> None:
    """Print text that a model generates: from this node's newest checkpoint, even while it trains, or from a folder.

    The text ends after N tokens, or where the model ends the document. On one machine, the same weights and options
    give the same text. Control characters are replaced, because the weights come from strangers.

    Examples: [cyan]farandole sample[/cyan]; [cyan]farandole sample model --prompt "def main("[/cyan];
    [cyan]farandole sample --temperature 0 --tokens 50 --json[/cyan]
    """
    from ...base.system.terminal import without_controls

    model = _load(settings, folder, computes_on)
    text = model.generate(model.tokens_of(prompt), num_tokens, Sampling(temperature, top_k, seed))
    pieces = map(without_controls, text.pieces())
    if as_json:
        print_json({"prompt": prompt, "text": "".join(pieces), "tokens": text.tokens, **model.facts})
        return
    typer.echo(model.origin, err=True)
    try:
        for piece in itertools.chain([without_controls(prompt)], pieces):
            sys.stdout.write(piece)
            sys.stdout.flush()
    finally:
        sys.stdout.write("\n")
        sys.stdout.flush()
    if text.is_ended and not text.tokens:
        typer.echo("the model ended the document at once: try a --prompt, or another --seed", err=True)


@takes_settings("base", "tokenizer", "allow_model")
def chat(
    settings: NodeSettings,
    folder: ModelFolder = None,
    system: Annotated[
        str, typer.Option(metavar="TEXT", help="What the model is told first.", show_default="nothing")
    ] = "",
    num_tokens: NumTokens = 500,
    temperature: Temperature = USUAL_TEMPERATURE,
    computes_on: ComputesOn = "cpu",
) -> None:
    """Talk to a model: to this node's newest checkpoint, even while it trains, or to that of a folder.

    Ctrl-C ends an answer, Ctrl-D the chat. The model sees the chat so far, without its beginning when that no longer
    fits. A node's newer weights are taken before each answer. A model without a chat template of its own gets "User:
    ..." and "Assistant:".

    Examples: [cyan]farandole chat[/cyan]; [cyan]farandole chat model --system "You are a pirate."[/cyan];
    [cyan]farandole chat adapters --base Qwen3-8B[/cyan]
    """
    from ...base.system.terminal import without_controls

    model = _load(settings, folder, computes_on)
    typer.echo(f"{model.origin}. Ctrl-C ends an answer, Ctrl-D the chat", err=True)
    if is_typed := sys.stdin.isatty():
        with contextlib.suppress(ImportError):  # not each Python has it
            import readline  # noqa: F401 - `input` then has a history
    first = [{"role": "system", "content": system}] if system else []
    said: list[dict[str, str]] = []
    while True:
        try:
            line = input("> " if is_typed else "")
        except (KeyboardInterrupt, EOFError) as error:
            typer.echo()
            if isinstance(error, EOFError):
                return
            continue
        if not line.strip():
            continue
        said.append({"role": "user", "content": line})
        answer = ""
        try:
            model.refresh()
            # An eighth of the context, at least, is left for the answer.
            room = model.context - min(num_tokens, model.context // 8)
            while len((chat := model.tokens_of_chat([*first, *said]))[0]) > room:
                if len(said) == 1:
                    raise FarandoleError(f"too long: {len(chat[0])} tokens, and the model sees {model.context}")
                del said[:2]
            limit = min(num_tokens, model.context - len(chat[0]))
            text = model.generate(chat[0], limit, Sampling(temperature, USUAL_TOP_K, len(said)), chat[1])
            for piece in text.pieces():
                answer += piece
                typer.echo(without_controls(piece), nl=False)
        except KeyboardInterrupt:
            pass
        except FarandoleError as error:
            typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
            said.pop()
            continue
        typer.echo()
        said.append({"role": "assistant", "content": answer})


@takes_settings("base", "tokenizer", "allow_model")
def serve(
    settings: NodeSettings,
    folder: ModelFolder = None,
    serves_at: Annotated[
        int, typer.Option("--port", min=0, max=65_535, help="Port on 127.0.0.1; 0: a free one.")
    ] = 8000,
    computes_on: ComputesOn = "cpu",
) -> None:
    """Serve a model to programs of this machine by OpenAI's API: this node's, even while it trains, or a folder's.

    It has /v1/models, /v1/completions and /v1/chat/completions, and needs no key. One answer is made at a time; a
    node's newer weights are taken before each. No page of another server can use it from a browser. Ctrl-C ends it.

    Of a model in stages, a node of stage 0 serves the whole, and the others compute their stages for it: run this at
    one of each.

    Examples: [cyan]farandole serve[/cyan]; [cyan]farandole serve adapters --base Qwen3-8B --port 8080[/cyan]
    """
    from ...base.nurseries import run_to_end
    from ...inspect.loaded_model import load_newest
    from .. import serving

    model = load_newest(settings, folder, computes_on)
    typer.echo(model.origin, err=True)
    if model.stage and model.manifest:
        from ...inspect.remote_stages import serve_stage

        typer.echo(f"stage {model.stage} is computed for members that generate text. Ctrl-C ends it", err=True)
        with contextlib.suppress(KeyboardInterrupt):
            serve_stage(settings.home, model.stage, model.manifest, model.compute)
        return
    with contextlib.suppress(KeyboardInterrupt):
        run_to_end(partial(serving.serve, model, serves_at))


def _load(settings: NodeSettings, folder: Path | None, device: str) -> LoadedModel:
    """Load the newest weights, or the folder's; seconds, minutes if they come over the network."""
    typer.echo("loading the model", err=True)
    from ...inspect.loaded_model import load_newest

    return load_newest(settings, folder, device)
