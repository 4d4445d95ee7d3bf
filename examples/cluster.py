"""The small GPT of own_loop.py, cut over the processes that torchrun starts: together they are one member of a run.

torchrun --nproc-per-node 2 cluster.py --create my-run      # makes a run, and trains
torchrun --nproc-per-node 2 cluster.py farandole1...        # trains with those who are there
torchrun --nproc-per-node 2 cluster.py                      # trains with the node that runs here

A member that is one process (own_loop.py) trains in the same run. torchrun starts all ranks again when one is lost, if
it is asked to (--max-restarts 100, with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment: otherwise they look
for each other where the lost ones were); they go on from their node's last checkpoint. Here ranks are processes on the
CPU. With GPUs: init_process_group("cpu:gloo,cuda:nccl"), torch.cuda.set_device(LOCAL_RANK), and a mesh of "cuda".
"""

import torch
from own_loop import GPT, train
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

distributed.init_process_group("gloo")
mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
torch.manual_seed(0)  # the same first weights in each rank
model = GPT()
for layer in model.layers.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
torch.manual_seed(1 + distributed.get_rank())  # and other batches
train(model, distributed.get_world_size(), distributed.get_rank())
distributed.destroy_process_group()
