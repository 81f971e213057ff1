"""Script of test_bf16_adamw.py: parameters that four ranks shard, and a run of two ranks that resumes.

python tests/trainer/bf16_adamw_run.py FOLDER
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from rank_scripts import fork_runs, leave
from test_bf16_adamw import NUM_STEPS, gradient_of, rows_of, whole_parameters
from tiny_run import TinyGRPO, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightrl import FSDP2Strategy
from lightrl.models.bf16_adamw import MOMENTS, BF16AdamW


class InBF16(TinyGRPO):
    def configure_optimizers(self) -> Any:
        return BF16AdamW(self.parameter_groups(), betas=(0.9, 0.95))


def trained(folder: Path, ckpt_path: Path | None = None, **flags: Any) -> dict[str, Any]:
    """Trains four iterations of two updates, and saves after two iterations; or the last two, from a checkpoint."""
    module = InBF16(num_minibatches=2)
    saving = [] if ckpt_path else [ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1, filename="{step}")]
    saves: dict[str, Any] = {"callbacks": saving, "enable_checkpointing": bool(saving), "ckpt_path": ckpt_path}
    trainer = train(folder, module, max_steps=4, gradient_clip_val=0.1, **saves, **flags)
    state = {name: trainer.optimizers[0].state[item] for name, item in module.policy.named_parameters()}
    tensors = {f"{name} {key}": value for name, values in state.items() for key, value in values.items()}
    tensors |= dict(module.policy.named_parameters())
    return {
        "num_trained": len(module.trained),
        "tensors": {name: getattr(item, "full_tensor", lambda item=item: item)() for name, item in tensors.items()},
    }


def sharded(rank: int) -> dict[str, Any]:
    """This rank's rows of each parameter and its moments: replicas of shards, and experts divided before FSDP2."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    whole = whole_parameters()
    parameters = {"number": whole["number"]}
    for name in ("matrix", "row"):
        shard = distribute_tensor(whole[name].detach(), mesh, [Replicate(), Shard(0)])
        parameters[name] = torch.nn.Parameter(shard)
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(distribute_tensor(whole["experts"].detach(), mesh["inner"], [Shard(0)]))
    parameters["experts"] = fully_shard(module, mesh=mesh["outer"]).weight
    optimizer = BF16AdamW([parameters[name] for name in whole])
    for step in range(NUM_STEPS):
        for name, item in parameters.items():
            gradient = gradient_of(whole[name], step)[rows_of(rank)[name]]
            if isinstance(item, DTensor):
                options = {"run_check": False, "shape": item.shape, "stride": item.stride()}
                gradient = DTensor.from_local(gradient, item.device_mesh, item.placements, **options)
            item.grad = gradient
        optimizer.step()
    local = {name: [item, *(optimizer.state[item][key] for key in MOMENTS)] for name, item in parameters.items()}
    for name, items in local.items():
        local[name] = [item.to_local() if isinstance(item, DTensor) else item for item in items]
    return local


def on_rank(num_ranks: int) -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    if num_ranks == 4:
        dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=num_ranks)
        leave(sharded(int(os.environ["LOCAL_RANK"])), folder / "sharded")
        dist.destroy_process_group()
        return
    flags: list[dict[str, Any]] = [{"strategy": FSDP2Strategy(offload_to_cpu=each)} for each in (["optimizer"], [])]
    whole = trained(folder / "whole", devices=2, **flags[0])
    resumed = trained(folder / "resumed", folder / "whole" / "step=2.ckpt", devices=2, **flags[1])
    leave([whole, resumed], folder)


if __name__ == "__main__":
    sys.exit(fork_runs([2, 4], on_rank))
