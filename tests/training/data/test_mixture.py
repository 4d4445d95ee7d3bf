"""Texts with weights: each gives its share of the sequences, and the batches follow from their key."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from farandole.protocol.run.manifest import DataConfig, InnerConfig, Manifest
from farandole.protocol.run.models import preset
from farandole.training.base.errors import DataError
from farandole.training.data.dataset import Bring, Mixture, build_sampler

CODE, WEB = ord("c"), ord("w")
MANIFEST = Manifest(
    "mixture",
    msgspec.structs.replace(preset("tiny"), context=8),
    data=DataConfig(source="text", held_out=0.2),
    inner=InnerConfig(batch_size=64),
)


@pytest.fixture
def paths(tmp_path: Path) -> tuple[Path, Path]:
    """A short text and one a hundred times as long."""
    for name, letter, num_files in (("code", "c", 20), ("web", "w", 40)):
        (tmp_path / name).mkdir()
        for number in range(num_files):
            (tmp_path / name / str(number)).write_text(letter * (number + 20) * (50 if name == "web" else 1))
    return tmp_path / "code", tmp_path / "web"


def mixture(bring: Bring, manifest: Manifest = MANIFEST, author: bytes = b"alice") -> Mixture:
    made = build_sampler(manifest, b"run", author, bring)
    assert isinstance(made, Mixture)
    return made


def share(batches: list[np.ndarray], letter: int) -> float:
    rows = np.concatenate(batches)
    assert rows.shape[1] == 9
    return float((rows == letter).any(1).mean())


def test_each_text_gives_its_share_however_long_it_is(paths: tuple[Path, Path]) -> None:
    mixed = mixture(Bring(paths, weights=(3, 1)))

    assert share([mixed.batch(step) for step in range(100)], CODE) == pytest.approx(0.75, abs=0.03)
    assert share([mixed.held_out_batch(step) for step in range(100)], CODE) == pytest.approx(0.75, abs=0.03)
    assert not any(((batch == CODE).any(1) & (batch == WEB).any(1)).any() for batch in map(mixed.batch, range(100)))
    plain = build_sampler(MANIFEST, b"run", b"alice", Bring(paths))
    assert share([plain.batch(step) for step in range(100)], CODE) < 0.1


def test_batches_follow_from_run_author_and_step(paths: tuple[Path, Path]) -> None:
    bring = Bring(paths, weights=(0.3, 0.7))
    alice, bob = mixture(bring), mixture(bring, author=b"bob")
    alice.batch(7)

    assert np.array_equal(alice.batch(3), mixture(bring).batch(3))
    assert np.array_equal(alice.of_author(b"bob").batch(3), bob.batch(3))
    assert not np.array_equal(alice.batch(3), bob.batch(3))
    assert np.array_equal(alice.held_out_batch(3), bob.held_out_batch(3))
    assert alice.corpus == bob.corpus != mixture(Bring(paths, weights=(0.4, 0.6))).corpus
    # The same on every machine and in every release: what another node replays.
    assert (alice.batch(3)[:16] == CODE).any(1).tolist() == [bool(int(bit)) for bit in "1100000100010101"]


def test_all_texts_keep_their_cache_files(paths: tuple[Path, Path], tmp_path: Path) -> None:
    parts = [tmp_path / f"part{number}" for number in range(7)]
    for path in parts:
        path.mkdir()
        (path / "a").write_text(path.name * 50)
        (path / "b").write_text(path.name * 60)
    manifest = msgspec.structs.replace(MANIFEST, data=DataConfig(source="text", held_out=0))

    mixture(Bring(tuple(parts), weights=(1.0,) * 7, cache=tmp_path / "tokens"), manifest)

    assert len(list((tmp_path / "tokens").iterdir())) == 7
    with pytest.raises(DataError, match=r"takes more than the 0\.0 MB"):
        mixture(Bring(tuple(parts), weights=(1.0,) * 7, cache=tmp_path / "small", cache_bytes=2_000), manifest)


def test_weights_that_do_not_fit_are_refused(paths: tuple[Path, Path]) -> None:
    with pytest.raises(DataError, match="--data-weight is given 1 times and --data 2 times: give one weight for each"):
        mixture(Bring(paths, weights=(1.0,)))
    epochs = msgspec.structs.replace(MANIFEST, data=DataConfig(source="text", epochs=1))
    with pytest.raises(DataError, match=r"each document is trained on once per epoch; weights .* would repeat some"):
        mixture(Bring(paths, weights=(1.0, 2.0)), epochs)


def test_a_text_that_is_too_short_is_named(paths: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "short").write_text("text")

    with pytest.raises(DataError, match=r"--data .*short: too little text"):
        mixture(Bring((*paths, tmp_path / "short"), weights=(1.0, 1.0, 1.0)))
