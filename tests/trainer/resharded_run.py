"""Script of test_resharded.py for two and four processes: runs that save, and runs that continue saved ones."""

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from rank_scripts import fork_runs, leave
from tiny_run import CONFIG, Digits, TinyGRPO, make_trainer
from torch import Tensor

from lightrl import PPO, AdaptiveKL, FSDP2Strategy, HuggingFaceExport, LoRA, ModelSpec, Parallel3DStrategy, Role
from lightrl.errors import LightRLError
from lightrl.models.tuning import held_tensors, tuning_of
from lightrl.strategies import AtomicCheckpointIO, whole

# Two layers and two key-value heads, so that it can be split both ways.
SPEC = ModelSpec(
    config={**CONFIG, "num_hidden_layers": 2, "num_key_value_heads": 2}, tokenizer="tiny_run.tokenizer", seed=3
)
ADAPTED = {name: Role(SPEC, lora=LoRA(rank=2)) for name in ("policy", "critic")}
EXPORTS: dict[str, dict[str, Any]] = {"policy": {}, "critic": {"role": "critic"}, "merged policy": {"merged": True}}
ON_BODY = {
    "critic": "shared",
    "reference": AdaptiveKL(0.1, Role(replace(SPEC, seed=4), offload=True), decay=0.5),  # a moving one is saved
}


class TinyPPO(TinyGRPO, PPO):
    """Has a critic of its own by default; keeps the metrics of each update.

    Trains by Adam, whose state has two tensors for each parameter, with an epsilon as large as lr: a weight is then off
    by at most as much as its gradient. The usual 1e-8 divides the rounding of a tiny gradient by itself.
    """

    def __init__(self, policy: ModelSpec | Role = SPEC, **settings: Any) -> None:
        super().__init__(policy, num_minibatches=2, **settings)
        self.updates: list[dict[str, float]] = []

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameter_groups(), eps=self.lr)

    def on_minibatch_end(self, metrics: dict[str, float], index: int, total: int) -> None:
        self.updates.append(dict(metrics))


def train(folder, name, *, settings=None, ckpt_path=None, **spread):
    """Trains four iterations, saves after two of them and exports at the end; or goes on from `ckpt_path`."""
    module = TinyPPO(**(settings or {}))
    callbacks: list[Any] = []
    if ckpt_path is None:
        callbacks += [ModelCheckpoint(folder / name, every_n_train_steps=2, save_top_k=-1, filename="{step}")]
        callbacks += [HuggingFaceExport(str(folder / f"{name} {kind}"), **EXPORTS[kind]) for kind in EXPORTS]
    trainer = make_trainer(
        folder, max_steps=4, callbacks=callbacks, enable_checkpointing=ckpt_path is None, gradient_clip_val=0.5,
        **spread,
    )  # fmt: skip
    trainer.fit(module, datamodule=Digits(), ckpt_path=ckpt_path)
    return {"updates": module.updates, "weights": {} if "strategy" in spread else weights_of(module)}


def weights_of(module: Any) -> dict[str, Tensor]:
    """The policy's whole weights with adapters merged, gathered without what syncs them; collective."""
    policy = module.policy
    held = held_tensors(policy)
    return {
        name: tuning_of(policy).merge(policy, name, [whole(held[source]) for source in sources]).detach().clone()
        for name, sources in tuning_of(policy).sources(policy).items()
    }


class Killed(TinyPPO):
    """Writes nothing to the disk from its second iteration on, and is killed in the third."""

    def on_policy_updated(self, weight_version: int) -> None:
        if weight_version == 2:
            for writes in (self.trainer.strategy, self.trainer.strategy.checkpoint_io):
                if pending := getattr(writes, "_writes", None):
                    pending.wait()
            os.fsync = lambda file: time.sleep(600)  # type: ignore[assignment]
        if weight_version == 3:
            os.kill(os.getpid(), signal.SIGKILL)


class SavesAnObject(Callback):
    """It cannot be loaded with weights_only=True."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": TinyPPO}


def refusal(folder: Path, module: TinyPPO) -> str:
    """What is said about the checkpoint of two ranks, which does not fit this module."""
    trainer = make_trainer(folder, max_steps=4, devices=2, strategy="FSDP2Strategy")
    try:
        trainer.fit(module, datamodule=Digits(), ckpt_path=folder / "two ranks" / "step=2.ckpt")
    except ValueError as error:
        return str(error)
    return ""


def dry_run(folder: Path, *callbacks: Callback) -> str:
    """The error of fast_dev_run about the state."""
    trainer = make_trainer(folder, fast_dev_run=True, callbacks=list(callbacks), devices=2, strategy="FSDP2Strategy")
    try:
        trainer.fit(TinyPPO(), datamodule=Digits())
    except LightRLError as error:
        return str(error)
    return ""


def work(size: int, folder: Path) -> dict[str, Any]:
    """What each of so many ranks does."""
    found: dict[str, Any] = {}
    if size == 2:
        found["two ranks"] = train(folder, "two ranks", devices=2, strategy=FSDP2Strategy(save_async=True))
        offloads = FSDP2Strategy(offload_to_cpu=("optimizer", "activations"))
        saved = folder / "two ranks" / "step=2.ckpt"
        found["two ranks, then offloaded"] = train(folder, "d", ckpt_path=saved, devices=2, strategy=offloads)
        found["dry runs"] = [dry_run(folder), dry_run(folder, SavesAnObject())]
        wider = replace(SPEC, config={**SPEC.config, "intermediate_size": 24})  # type: ignore[dict-item]
        found["another model"] = refusal(folder, TinyPPO(wider))
        SPEC.load_model().save_pretrained(folder / "base")
        for name, strategy in (("adapters", FSDP2Strategy()), ("adapters in stages", Parallel3DStrategy(pp=2))):
            found[name] = train(folder, name, settings=ADAPTED, devices=2, strategy=strategy)
        return found
    stages, tensors = {"pp": 2, "dp": 2, "tp": 1}, {"pp": 1, "dp": 2, "tp": 2}
    for name, settings in (("split", {}), ("on the body", ON_BODY)):
        run: dict[str, Any] = {"settings": settings, "devices": 4}
        found[name] = train(folder, name, strategy=Parallel3DStrategy(**stages), **run)
        run["ckpt_path"] = folder / name / "step=2.ckpt"
        found[f"{name} otherwise"] = train(folder, "a", strategy=Parallel3DStrategy(**tensors), **run)
        found[f"{name}, then sharded"] = train(folder, "b", strategy=FSDP2Strategy(), **run)
    path = folder / "two ranks" / "step=2.ckpt"
    found["two ranks, then four"] = train(folder, "c", ckpt_path=path, devices=4, strategy=FSDP2Strategy())
    return found


def main() -> int:
    torch.set_num_threads(1)
    folder, size = Path(sys.argv[1]), int(sys.argv[2])
    if size > 1:
        return fork_runs([size], lambda size: leave(work(size, folder), folder))
    strategy: dict[str, Any] = {"plugins": [AtomicCheckpointIO(save_async=True)]}
    if sys.argv[3] == "folder":
        strategy = {"strategy": FSDP2Strategy(save_async=True), "devices": 1}
    save = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=0, save_last=True)
    make_trainer(folder, max_steps=4, callbacks=[save], enable_checkpointing=True, **strategy).fit(Killed(), Digits())
    return 0


if __name__ == "__main__":
    sys.exit(main())
