"""What each rank of the cluster in `test_mixed_run` runs: a loop that attaches to the node in FARANDOLE_HOME.

The model is farandole's own, cut by FSDP2, and trains on random bytes; the ranks share each batch.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import farandole
from farandole.protocol.run.manifest import ModelConfig
from farandole.training.model.model import build_model

MODEL: Final = ModelConfig(num_layers=2, width=64, num_heads=4, hidden=128, context=64, vocabulary=256)
BATCH: Final = 8


def main() -> None:
    model = build_model(MODEL, 0)
    distributed.init_process_group("gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    with farandole.NoLoCo(model, optimizer, tokens_per_step=BATCH * MODEL.context) as joined:
        print(f"rank {rank} begins at round {joined.round}", flush=True)
        while not joined.is_over:
            batch = torch.randint(MODEL.vocabulary, (BATCH // ranks, MODEL.context + 1))
            loss = model(batch[:, :-1], batch[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            joined.report(loss.item())
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
