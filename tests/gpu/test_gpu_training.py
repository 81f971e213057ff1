"""Training on the device: FSDP2 on one GPU as one process, memory handed over, resume, the quickstart."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from several_ranks_run import Recorded
from tiny_run import Digits, TinyGRPO, are_equal, make_trainer, weights

from lightrl import FSDP2Strategy, LocalEngine
from lightrl.callbacks.learning_curve import HELD_OUT_ACCURACY
from lightrl.strategies.offload import HOST, move_state

ROOT = Path(__file__).parents[2]
GOAL = 0.92  # the worst of five seeds had 93.3 % on a CPU


def first_update(folder: Path, accelerator: str, precision: str = "32-true", **strategy: Any) -> dict[str, float]:
    module = Recorded(num_minibatches=2, microbatch_tokens=20)
    spread = {"strategy": FSDP2Strategy(**strategy.pop("fsdp"))} if strategy else {}
    engine = LocalEngine(dtype="float32")
    trainer = make_trainer(
        folder, engine=engine, accelerator=accelerator, devices=1, precision=precision, max_steps=1, **spread
    )
    trainer.fit(module, datamodule=Digits())
    assert engine.device.type == trainer.strategy.root_device.type
    return module.updates[0]


@pytest.mark.parametrize(
    ("precision", "settings"),
    [
        ("32-true", {}),
        ("bf16-mixed", {}),
        ("bf16-mixed", {"activation_checkpointing": True}),
        ("bf16-mixed", {"offload_to_cpu": ["parameters"]}),
        ("bf16-mixed", {"offload_to_cpu": ["optimizer", "activations"]}),
        ("bf16-mixed", {"compile_layers": True}),
        ("bf16-true", {}),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore")
def test_fsdp2_on_one_device_updates_as_one_process_does(
    precision: str, settings: dict[str, Any], accelerator: str, tmp_path: Path
) -> None:
    one = first_update(tmp_path, accelerator, precision)
    sharded = first_update(tmp_path, accelerator, precision, fsdp=settings)
    bound = 1e-3 if precision == "32-true" else 2**-6
    assert sharded["grad_norm"] == pytest.approx(one["grad_norm"], rel=bound)
    assert sharded["loss"] == pytest.approx(one["loss"], abs=bound)
    assert sharded["behavior_abs_dlogp_nats"] == pytest.approx(one["behavior_abs_dlogp_nats"], abs=bound)


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_resumed_run_has_the_weights_of_an_uninterrupted_one(accelerator: str, tmp_path: Path) -> None:
    def run(name: str, ckpt_path: Path | None) -> TinyGRPO:
        module = TinyGRPO(num_minibatches=2)
        saving = ModelCheckpoint(tmp_path / name, every_n_train_steps=2, save_top_k=-1, filename="{step}")
        trainer = make_trainer(
            tmp_path, accelerator=accelerator, devices=1, max_steps=4, callbacks=[saving], enable_checkpointing=True
        )
        trainer.fit(module, datamodule=Digits(), ckpt_path=ckpt_path)
        return module

    whole, resumed = run("whole", None), run("resumed", tmp_path / "whole" / "step=2.ckpt")
    if accelerator == "cpu":
        assert are_equal(weights(whole), weights(resumed))
    for name, value in weights(whole).items():  # kernels on a GPU may add in another order
        torch.testing.assert_close(weights(resumed)[name], value, rtol=1e-3, atol=1e-4)


def test_optimizer_state_leaves_the_device_and_comes_back(device: torch.device) -> None:
    model = torch.nn.Linear(512, 512, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(1, 512, device=device)).sum().backward()
    optimizer.step()
    held = {name: value.clone() for name, value in optimizer.state[model.weight].items()}
    move_state(optimizer, HOST)
    assert optimizer.state[model.weight]["exp_avg"].is_pinned() == (device.type == "cuda")
    assert optimizer.state[model.weight]["exp_avg"].device.type == "cpu"
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free = torch.cuda.memory_allocated()
        move_state(optimizer, device)
        assert torch.cuda.memory_allocated() - free >= 2 * 4 * (512 * 512 + 512)
    else:
        move_state(optimizer, device)
    assert all(torch.equal(value, held[name]) for name, value in optimizer.state[model.weight].items())
    optimizer.step()


@pytest.mark.slow
@pytest.mark.timeout(580)
def test_the_quickstart_learns_its_task(accelerator: str, tmp_path: Path) -> None:
    short = [] if accelerator == "gpu" else ["--trainer.max_steps=2", "--trainer.val_check_interval=2"]
    config = ["--config", "examples/quickstart/grpo.yaml", f"--trainer.accelerator={accelerator}"]
    done = subprocess.run(
        [sys.executable, "-m", "lightrl", "fit", *config, f"--trainer.default_root_dir={tmp_path}", *short],
        cwd=ROOT, capture_output=True, text=True, timeout=570, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [row for file in tmp_path.rglob("*.csv") for row in csv.DictReader(file.read_text().splitlines())]
    accuracies = [float(row[HELD_OUT_ACCURACY]) for row in rows if row.get(HELD_OUT_ACCURACY)]
    assert accuracies, done.stdout[-2000:]
    assert accelerator == "cpu" or max(accuracies) >= GOAL
