"""``farandole sample``: text from the newest weights."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from ...base.settings import NodeSettings
from .options import AsJson, takes_settings
from .output import print_json

# Each token takes a forward pass of the whole context, and text is decoded from its beginning on.
MAX_TOKENS: Final = 10_000


# The device's setting is the trainer's: `device` in the settings file must not decide about this command.
@takes_settings("base", "tokenizer", "allow_model")
def sample(
    settings: NodeSettings,
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="FOLDER",
            help="Folder of a model, written by `checkpoint pull` or `import`.",
            show_default="the newest checkpoint of this node",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    prompt: Annotated[
        str, typer.Option(metavar="TEXT", help="The text to continue.", show_default="none: a new document")
    ] = "",
    num_tokens: Annotated[
        int, typer.Option("--tokens", "-n", min=1, max=MAX_TOKENS, metavar="N", help="Generate at most N tokens.")
    ] = 200,
    temperature: Annotated[
        float,
        typer.Option(min=0.0, help="Higher is more varied; 0 always takes the likeliest token.", metavar="T"),
    ] = 0.8,
    top_k: Annotated[
        int, typer.Option(min=0, metavar="K", help="Draw from the K likeliest tokens only; 0: from all.")
    ] = 50,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the random draws.", metavar="SEED")] = 0,
    computes_on: Annotated[
        str,
        typer.Option(
            "--device",
            metavar="DEVICE",
            help="cpu, cuda, cuda:1, mps or auto. A GPU shares its memory with a running trainer.",
        ),
    ] = "cpu",
    as_json: AsJson = False,
) -> None:
    """Print text that a model generates: from this node's newest checkpoint, even while it trains, or from a folder.

    The text ends after N tokens, or where the model ends the document. On one machine, the same weights and options
    give the same text. Control characters are replaced, because the weights come from strangers.

    Examples: [cyan]farandole sample[/cyan]; [cyan]farandole sample model --prompt "def main("[/cyan];
    [cyan]farandole sample --temperature 0 --tokens 50 --json[/cyan]
    """
    from farandole.training.model.sampling import Sampling

    from ...base.system.terminal import without_controls
    from ...base.system.tuning import TRAINING_NICENESS, lower_thread_priority
    from ...inspect.sample import prepare_sample

    if folder is None:
        lower_thread_priority(TRAINING_NICENESS)
    text = prepare_sample(settings, folder, prompt, num_tokens, Sampling(temperature, top_k, seed), computes_on)
    if as_json:
        print_json({"prompt": prompt, "text": "".join(text.pieces()), "tokens": text.tokens, **text.weights.facts})
        return
    typer.echo(text.weights.origin, err=True)
    try:
        for piece in itertools.chain([without_controls(prompt)], text.pieces()):
            sys.stdout.write(piece)
            sys.stdout.flush()
    finally:
        sys.stdout.write("\n")
        sys.stdout.flush()
    if text.is_ended and not text.tokens:
        typer.echo("the model ended the document at once: try a --prompt, or another --seed", err=True)
