"""Script of test_muon.py: three updates of a model that FSDP2 shards, on two ranks, and a resume after the second.

python tests/models/muon_run.py FOLDER
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from rank_scripts import fork_runs, leave
from test_muon import gradients_of, make_optimizer, updated
from tiny import tiny_model
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def on_rank(num_ranks: int) -> None:
    dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=num_ranks)

    def sharded() -> torch.nn.Module:
        model = tiny_model()
        for layer in model.model.layers:
            fully_shard(layer)
        return fully_shard(model)

    def share(parameter: DTensor, whole: torch.Tensor) -> DTensor:
        return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)

    model = sharded()
    optimizer = make_optimizer(model)
    weights = updated(model, optimizer, 2, share)
    again = make_optimizer(model)
    again.load_state_dict(optimizer.state_dict())
    gradients_of(model, 2, share)
    again.step()
    last = {name: item.full_tensor().detach() for name, item in model.named_parameters()}
    momenta = [state["momentum_buffer"] for state in again.state.values() if "momentum_buffer" in state]
    assert all(isinstance(item, DTensor) and item.to_local().numel() < item.numel() for item in momenta)
    leave({"second": weights, "third": last}, Path(sys.argv[1]))
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(fork_runs([2], on_rank))
