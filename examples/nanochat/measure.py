"""Measure a model that `farandole checkpoint pull` has written, in nanochat's bits per byte of a shard.

python measure.py model held-out.parquet tokenizer.json
python measure.py model shard_06542.parquet tokenizer.json --context 2048 --rows 1000
"""

from __future__ import annotations

import argparse
from pathlib import Path

from nanochat_model.bits import bits_per_byte
from nanochat_model.files import read_tokenizer, token_bytes, tokens_in
from nanochat_model.gpt import GPT, HEAD_WIDTH, build
from safetensors.torch import load_file

CONTEXT, ROWS = 256, 200
# Of the weights in a checkpoint, which has the optimizer's vectors too.
WEIGHTS = "slow/"


def pulled_model(folder: Path, context: int, head_width: int = HEAD_WIDTH) -> GPT:
    """Return the model in a folder; its weights say how deep it is, and how many tokens it has."""
    weights = {
        name.removeprefix(WEIGHTS): tensor
        for name, tensor in load_file(folder / "checkpoint.safetensors").items()
        if name.startswith(WEIGHTS)
    }
    depth = len({name.split(".")[1] for name in weights if name.startswith("layers.")})
    vocabulary = len(weights["ends.embedding.weight"])
    sizes = {"depth": depth, "context": context, "vocabulary": vocabulary, "head_width": head_width}
    model = GPT(build(sizes))
    model.load_state_dict(weights)
    return model


def main() -> None:
    """Read the command line, and print the measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="the folder of the model")
    parser.add_argument("shard", type=Path, help="text that no home has trained on")
    parser.add_argument("tokenizer", type=Path, help="the run's tokenizer.json")
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens of a row (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=ROWS, help="rows of text, at most (default: %(default)s)")
    arguments = parser.parse_args()
    tokenizer = read_tokenizer(arguments.tokenizer)
    model = pulled_model(arguments.model, arguments.context)
    tokens = tokens_in([arguments.shard], tokenizer)
    bits = bits_per_byte(model, tokens, token_bytes(tokenizer), arguments.context, arguments.rows)
    print(f"{bits:.3f} bits per byte")


if __name__ == "__main__":
    main()
