"""Training on the device: FSDP2 on one GPU as one process, memory handed over, resume, the quickstart."""

from __future__ import annotations

import csv
import functools
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from several_ranks_run import Recorded
from tiny_run import CONFIG, POLICY, Digits, TinyGRPO, are_equal, make_trainer, weights
from torch import Tensor

from lightrl import FSDP2Strategy, LocalEngine
from lightrl.callbacks.learning_curve import HELD_OUT_ACCURACY
from lightrl.strategies.layouts.packed_attention import KERNELS
from lightrl.strategies.offload import HOST, move_state

ROOT = Path(__file__).parents[2]
GOAL = 0.92  # the worst of five seeds had 93.3 % on a CPU


POLICY_OF_FLASH = replace(POLICY, config=CONFIG | {"head_dim": 16})  # the smallest that both kernels for GPUs take


def first_update(folder: Path, accelerator: str, precision: str | None, **flags: Any) -> dict[str, float]:
    """The first update's metrics, of a run of two iterations with two updates each."""
    module = Recorded(policy=POLICY_OF_FLASH, num_minibatches=2, microbatch_tokens=20)
    engine = LocalEngine(dtype="float32")
    flags |= {"accelerator": accelerator, "devices": 1, "precision": precision, "max_steps": 2}
    trainer = make_trainer(folder, engine=engine, **flags)
    trainer.fit(module, datamodule=Digits())
    assert engine.device.type == trainer.strategy.root_device.type
    assert trainer.precision == (precision or ("bf16-mixed" if accelerator == "gpu" else "32-true"))
    assert len(module.updates) == 4
    assert all(math.isfinite(update[name]) for update in module.updates for name in ("grad_norm", "loss"))
    return module.updates[0]


def record_kernels(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The kernels of packed rows that compute gradients from now on."""
    names: set[str] = set()

    def run(name: str, kernel: Any, *inputs: Any) -> Tensor:
        if torch.is_grad_enabled() and inputs[3].longest < 100:  # a kernel's trial has longer rows
            names.add(name)
        return kernel(*inputs)  # type: ignore[no-any-return]

    for name, kernel in KERNELS.items():
        monkeypatch.setitem(KERNELS, name, functools.partial(run, name, kernel))
    return names


@pytest.mark.parametrize(
    ("precision", "settings"),
    [
        *[("32-true", {}), (None, {}), (None, {"activation_checkpointing": True})],
        *[(None, {"offload_to_cpu": ["parameters"]}), (None, {"offload_to_cpu": ["optimizer", "activations"]})],
        *[(None, {"compile_layers": True}), ("bf16-true", {})],
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore")
def test_fsdp2_on_one_device_updates_as_one_process_does(
    precision: str | None, settings: dict[str, Any], accelerator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates = []
    for flags in ({}, {"strategy": FSDP2Strategy(**settings)}):
        with monkeypatch.context() as patch:
            kernels = {"flash"} if "compile_layers" in settings else record_kernels(patch)
            updates.append(first_update(tmp_path, accelerator, precision, **flags))
        assert kernels == {"flash"} or accelerator == "cpu" or precision == "32-true"
    one, sharded = updates
    bound = 1e-3 if precision == "32-true" else 2**-6
    assert sharded["grad_norm"] == pytest.approx(one["grad_norm"], rel=bound)
    assert sharded["loss"] == pytest.approx(one["loss"], abs=bound)
    assert sharded["behavior_abs_dlogp_nats"] == pytest.approx(one["behavior_abs_dlogp_nats"], abs=bound)


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_resumed_run_has_the_weights_of_an_uninterrupted_one(
    accelerator: str, tmp_path: Path, not_pretended: None
) -> None:
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


def test_optimizer_state_leaves_the_device_and_comes_back(device: torch.device, not_pretended: None) -> None:
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
def test_the_quickstart_learns_its_task(accelerator: str, tmp_path: Path, not_pretended: None) -> None:
    short = [] if accelerator == "gpu" else ["--trainer.max_steps=2", "--trainer.val_check_interval=2"]
    config = ["--config", "examples/quickstart/grpo.yaml", f"--trainer.accelerator={accelerator}"]
    done = subprocess.run(
        [sys.executable, "-m", "lightrl", "fit", *config, f"--trainer.default_root_dir={tmp_path}", *short],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [row for file in tmp_path.rglob("*.csv") for row in csv.DictReader(file.read_text().splitlines())]
    accuracies = [float(row[HELD_OUT_ACCURACY]) for row in rows if row.get(HELD_OUT_ACCURACY)]
    assert accuracies, done.stdout[-2000:]
    assert accelerator == "cpu" or max(accuracies) >= GOAL
