"""What each of two ranks runs in `test_distributed_checkpoint`: a model that FSDP2 has cut, saved by PyTorch.

checkpoint_program.py RANK RANKS FILE CHECKPOINT
"""

from __future__ import annotations

import sys

from torch import distributed
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

from tests.training.ranks_program import build, cut

if __name__ == "__main__":
    rank, num_ranks, meeting, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=num_ranks)
    model = build()
    cut(model, "fsdp", num_ranks)
    save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
    distributed.destroy_process_group()
