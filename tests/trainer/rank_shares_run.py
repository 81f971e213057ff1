"""Script of test_rank_shares.py: two ranks and a server that the run starts, weights written by both.

python rank_shares_run.py FOLDER run | merged | kills
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from fake_sglang import python_of_fakes
from rank_scripts import leave
from resharded_run import weights_of
from safetensors.torch import load_file
from tiny_run import CONFIG, POLICY, Digits, TinyGRPO, make_trainer
from transformers import AutoConfig

from lightrl import FSDP2Strategy, LoRA, Role, SGLangEngine
from lightrl.weights import Bucket
from lightrl.weights.disk import ShareWriter

RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "merged": {"lora": LoRA(rank=2)},
    "served": {"lora": LoRA(rank=2), "adapters": "served"},
}


def server(folder: Path) -> str:
    """A Python of fake servers with a model of the policy's config."""
    AutoConfig.for_model(**CONFIG).save_pretrained(folder / "model")
    words = ["--model-path", str(folder / "model"), "--enable-lora", "--max-lora-rank", "2", "--lora-target-modules"]
    form = LoRA(rank=2).served_form(Role(POLICY, lora=LoRA(rank=2)).load_model(), 1)
    return python_of_fakes(folder, *words, *form.config["target_modules"])


def train(folder: Path, *, lora: Any = None, adapters: Any = "merged") -> dict[str, Any]:
    """Trains; gives the trainer's weights, the files of the last version, and the probe's difference."""
    folder.mkdir(exist_ok=True)
    module = TinyGRPO(Role(POLICY, lora=lora))
    engine = SGLangEngine(
        servers=1, sglang_python=server(folder), adapters=adapters, weight_folder=str(folder / "weights")
    )
    trainer = make_trainer(
        folder, engine=engine, devices=2, strategy=FSDP2Strategy(),
    )  # fmt: skip
    trainer.fit(module, datamodule=Digits())
    last = sorted((folder / "weights").glob("version-*"))[-1]
    parts = {path.name: load_file(path) for path in sorted(last.glob("*.safetensors"))}
    return {
        "version": last.name,
        "files": {name: sorted(tensors) for name, tensors in parts.items()},
        "written": {name: value for tensors in parts.values() for name, value in tensors.items()},
        "weights": weights_of(module),
        "probe": float(trainer.callback_metrics["sync/probe_abs_dlogp_nats"]),
        "versions": [int(experience.version_bounds[1].max()) for experience in module.experiences],
    }


def kill_rank_1_during_a_write() -> None:
    """Of version 2; an export of a rank then has bytes on the disk, but no index."""
    add, added = ShareWriter.add, [0]

    def add_and_die(self: ShareWriter, bucket: Bucket) -> None:
        add(self, bucket)
        added[0] += 1
        if added[0] == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    if os.environ.get("LOCAL_RANK") == "1":
        ShareWriter.add = add_and_die  # type: ignore[method-assign]


def main() -> None:
    torch.set_num_threads(1)
    folder, how = Path(sys.argv[1]), sys.argv[2]
    if how == "kills":
        kill_rank_1_during_a_write()
        train(folder)
        return
    names = [how] if how in RUNS else [name for name in RUNS if name != "merged"]
    leave({name: train(folder / name, **RUNS[name]) for name in names}, folder)


if __name__ == "__main__":
    main()
