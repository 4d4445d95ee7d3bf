"""A run with ``inner.deterministic``: trainer processes with different settings compute the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import trio

from farandole.node.trainer.trainer import open_trainer
from farandole.protocol.run.manifest import Manifest
from farandole.protocol.trainer import trainer_messages as messages

from ...patience import PATIENCE
from ..small_runs import small_manifest
from ..trainer_commands import prepare_for

pytestmark = pytest.mark.started  # libraries read the number of threads when they are loaded

# Products large enough to be divided among threads.
MODEL = {"num_layers": 2, "width": 64, "num_heads": 2, "hidden": 128, "context": 512, "vocabulary": 256}
STEPS = 3

has_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no CUDA device here")


async def digest_after_steps(manifest: Manifest, folder: Path, texts: Path, device: str, threads: int) -> bytes:
    """Return BLAKE3 of the fp32 contribution of a trainer process with ``threads`` threads (``OMP_NUM_THREADS``)."""
    command = prepare_for(manifest, folder, data=[str(texts)], device=device, threads=threads)
    with trio.fail_after(PATIENCE):
        async with open_trainer(command, None) as trainer:
            await trainer.send(messages.Train(0, STEPS))
            while True:
                report = await trainer.receive()
                if isinstance(report, messages.Encoded) and report.digest is not None:
                    return report.digest


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=has_cuda)])
async def test_trainers_with_other_threads_and_another_environment_compute_the_same_bits(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    manifest = small_manifest(
        model=MODEL, inner={"batch_size": 4, "learning_rate": 1e-2, "warmup_steps": 1, "deterministic": True}
    )
    monkeypatch.delenv("MKL_CBWR", raising=False)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    first = await digest_after_steps(manifest, tmp_path / "a", texts, device, 1)
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    assert await digest_after_steps(manifest, tmp_path / "b", texts, device, 3) == first
