"""Make nanochat's files: Parquet shards of a text, and a tokenizer that has learned from them.

python prepare.py nanochat-data                                     # the sources of Python's standard library
python prepare.py nanochat-data --text book.txt --text more/        # text files, and all of a folder
python prepare.py nanochat-data --tokenizer ~/.cache/nanochat/tokenizer/tokenizer.pkl   # nanochat's own, for its shards
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from nanochat_model.files import (
    SHARDS_NAME,
    TOKENIZER_NAME,
    read_tokenizer,
    shards_of,
    texts_in,
    train_tokenizer,
    write_shards,
)
from rich.progress import Progress

SHARDS, VOCABULARY = 9, 4_096
# Of a suffix that is not hidden or binary.
_TEXT_SUFFIXES = frozenset({".py", ".txt", ".md", ".rst", ".c", ".h"})


def prepare(
    folder: Path,
    texts: Iterable[Path] = (),
    num_shards: int = SHARDS,
    vocabulary: int = VOCABULARY,
    megabytes: float = 1_000.0,
) -> None:
    """Write a tokenizer and the shards of texts into a folder; without texts: of the standard library."""
    with Progress() as progress:
        task = progress.add_task("reading texts", total=None)
        documents = list(documents_in(texts, round(megabytes * 1e6)))
        progress.update(task, description=f"writing {num_shards} shards of {len(documents)} documents")
        write_shards(documents, folder / SHARDS_NAME, num_shards)
        progress.update(task, description=f"learning {vocabulary} tokens")
        tokenizer = train_tokenizer(texts_in(shards_of(folder / SHARDS_NAME)[0]), vocabulary)
        tokenizer.save(str(folder / TOKENIZER_NAME))
        progress.update(
            task, description=f"{folder} has {num_shards} shards and {TOKENIZER_NAME}", total=1, completed=1
        )


def documents_in(paths: Iterable[Path], most_bytes: int) -> Iterable[str]:
    """Yield files as documents until they have so many bytes together."""
    total = 0
    for path in paths or [Path(sysconfig.get_path("stdlib"))]:
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            if path.is_dir() and (file.suffix not in _TEXT_SUFFIXES or "site-packages" in file.parts):
                continue
            raw = file.read_bytes()
            if total >= most_bytes:
                return
            total += len(raw)
            if text := raw.decode(errors="replace"):
                yield text


def main() -> None:
    """Read the command line, and make the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the files go")
    parser.add_argument("--text", type=Path, action="append", default=[], help="a file or folder; repeatable")
    parser.add_argument("--tokenizer", type=Path, help="only write tokenizer.json of this tokenizer.pkl")
    parser.add_argument("--shards", type=int, default=SHARDS, help="the last is for measuring (default: %(default)s)")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY, help="tokens to learn (default: %(default)s)")
    parser.add_argument("--megabytes", type=float, default=1_000.0, help="of text, at most (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.tokenizer is None:
        prepare(arguments.folder, arguments.text, arguments.shards, arguments.vocabulary, arguments.megabytes)
        return
    try:
        tokenizer = read_tokenizer(arguments.tokenizer)
    except (OSError, ValueError) as error:
        parser.exit(1, f"error: {error}\n")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(arguments.folder / TOKENIZER_NAME))
    print(f"{arguments.folder / TOKENIZER_NAME}: {tokenizer.get_vocab_size()} tokens, for [model] vocabulary")


if __name__ == "__main__":
    main()
