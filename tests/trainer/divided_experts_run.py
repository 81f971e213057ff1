"""Script of test_divided_experts.py: a mixture's experts in one process, and divided over four ranks.

    python tests/trainer/divided_experts_run.py FOLDER short|long|two

All runs start from `FOLDER/model`, and from `FOLDER/adapter` if it exists; if `FOLDER/sliced` exists, tensor ranks
split the model too. Each run leaves its model in `FOLDER/<run>` and, on rank 0, the metrics of its updates in
`FOLDER/<run>.updates`. With `two`, two ranks train, and divide experts after a resume.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from rank_scripts import fork_runs
from replay_run import OtherRoutes
from several_ranks_run import Recorded
from tiny_run import Digits, make_trainer

from lightrl import FSDP2Strategy, HuggingFaceExport, LocalEngine, LoRA, ModelSpec, Parallel3DStrategy, Role, WeightSync

# One of eight trajectories is lost, so one of four ranks has none in a minibatch.
SETTINGS: dict[str, Any] = {"num_minibatches": 2, "microbatch_tokens": 20, "decoupled": True, "loses_some": True}
ADAM = {"is_adam": True, "lr": 1e-2}
CLIP = 0.2  # below the first gradient norm


def train(
    folder: Path,
    name: str,
    *,
    engine: Any = None,
    optimizer: dict[str, Any] | None = None,
    ckpt_path: Path | None = None,
    **spread: Any,
) -> None:
    """Trains two iterations of two updates, and saves after the first."""
    torch.set_num_threads(1)
    lora = LoRA(adapter=str(folder / "adapter")) if (folder / "adapter").exists() else None
    policy = Role(ModelSpec(path=str(folder / "model"), tokenizer="tiny_run.tokenizer"), lora=lora)
    module = Recorded(policy=policy, **SETTINGS, **(optimizer or ADAM))
    callbacks: list[Any] = [HuggingFaceExport(str(folder / name))]
    callbacks += [WeightSync(verify=False)] if isinstance(engine, OtherRoutes) else []  # its routes were not used
    if ckpt_path is None:
        callbacks += [
            ModelCheckpoint(folder / f"{name} saved", every_n_train_steps=1, save_top_k=-1, filename="{step}")
        ]
    trainer = make_trainer(
        folder / f"{name} files",
        max_steps=2,
        engine=engine or LocalEngine(threads=1),
        gradient_clip_val=CLIP,
        enable_checkpointing=ckpt_path is None,
        callbacks=callbacks,
        **spread,
    )
    trainer.fit(module, datamodule=Digits(), ckpt_path=ckpt_path)
    if trainer.is_global_zero:
        torch.save(module.updates, folder / f"{name}.updates")


def ranks(num: int, ep: int, **settings: Any) -> dict[str, Any]:
    return {"devices": num, "strategy": FSDP2Strategy(ep=ep, **settings)}


def split(**sizes: Any) -> dict[str, Any]:
    return {"devices": 4, "strategy": Parallel3DStrategy(**sizes)}


def on_rank(folder: Path, is_short: bool, size: int) -> None:
    native, replayed = (LocalEngine(threads=1, record_routes=False), OtherRoutes(threads=1))
    if size == 1:
        train(folder, "one")
        if not is_short:
            train(folder, "one, native", engine=native)
            train(folder, "one, replayed", engine=replayed)
        return
    if size == 2:
        train(folder, "two", **ranks(2, 1))
        train(folder, "two, then divided", ckpt_path=folder / "two saved" / "step=1.ckpt", **ranks(2, 2))
        return
    train(folder, "four", **ranks(4, 2))
    train(folder, "untrained", optimizer={"lr": 0.0}, **ranks(4, 2))
    train(folder, "stages", **split(pp=2, ep=2))
    train(folder, "untrained stages", optimizer={"lr": 0.0}, **split(pp=2, ep=2))
    if (folder / "sliced").exists():
        train(folder, "slices", **split(tp=2, ep=2))
        train(folder, "untrained slices", optimizer={"lr": 0.0}, **split(tp=2, ep=2))
    if is_short:
        return
    train(folder, "stages, replayed", engine=replayed, **split(pp=2, ep=2, activation_checkpointing=True))
    train(folder, "slices, replayed", engine=replayed, **split(tp=2, ep=4))
    train(folder, "stages, shared rows", **split(pp=2, cp=2, ep=2))
    for name in ("stages", "slices", "stages, shared rows"):
        train(folder, f"{name}, then none", ckpt_path=folder / f"{name} saved" / "step=1.ckpt", **ranks(4, 2))
    train(folder, "four, native", engine=native, **ranks(4, 4, activation_checkpointing=True))
    train(folder, "four, replayed", engine=replayed, **ranks(4, 2, activation_checkpointing=True))
    train(folder, "replicas", **ranks(4, 2, num_replicas=2, reduce_every_microbatch=True))
    train(folder, "shared rows", **ranks(4, 2, cp=2))
    train(folder, "kept", **ranks(4, 2, reshard_after_forward=False))
    train(folder, "plain", **ranks(4, 1))
    saved = folder / "four saved" / "step=1.ckpt"
    train(folder, "four, then another ep", ckpt_path=saved, **ranks(4, 4))
    train(folder, "four, then replicas", ckpt_path=saved, **ranks(4, 2, num_replicas=2))
    train(folder, "four, then shared rows", ckpt_path=saved, **ranks(4, 1, cp=4))
    train(folder, "shared rows, then none", ckpt_path=folder / "shared rows saved" / "step=1.ckpt", **ranks(4, 1))
    train(folder, "four, then none", ckpt_path=saved, **ranks(4, 1))
    train(folder, "four, then stages", ckpt_path=saved, **split(pp=2, ep=2))
    train(folder, "stages, then slices", ckpt_path=folder / "stages saved" / "step=1.ckpt", **split(tp=2, ep=2))
    train(folder, "plain, then ep", ckpt_path=folder / "plain saved" / "step=1.ckpt", **ranks(4, 2))


if __name__ == "__main__":
    sizes = [1, 2 if sys.argv[2] == "two" else 4]
    sys.exit(fork_runs(sizes, partial(on_rank, Path(sys.argv[1]), sys.argv[2] != "long")))
