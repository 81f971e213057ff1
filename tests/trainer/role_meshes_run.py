"""What test_role_meshes.py runs: PPO whose roles live on ranks of their own, on two, four ranks and one."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from ppo_ranks_run import TinyPPO, found_by
from rank_scripts import fork_runs, leave
from second_device import second_device
from tiny_run import CONFIG, Digits, make_trainer

from lightrl import AdaptiveKL, Experience, FSDP2Strategy, ModelSpec, Parallel3DStrategy, Role, RoleMesh, Trajectory

MODEL = ModelSpec(
    config={**CONFIG, "num_hidden_layers": 3, "num_key_value_heads": 2}, tokenizer="tiny_run.tokenizer", seed=3
)
# Name -> number of ranks, strategy, mesh of each role that has one.
CASES: dict[str, tuple[int, Callable[[], Any], dict[str, RoleMesh]]] = {
    "sharded: critic and reference on one rank each": (
        2,
        FSDP2Strategy,
        {"critic": RoleMesh(1, 1), "reference": RoleMesh(0, 1)},
    ),
    "sharded: each rank has a role": (
        2,
        FSDP2Strategy,
        {"policy": RoleMesh(0, 1), "critic": RoleMesh(1), "reference": RoleMesh(0, 1)},
    ),
    "split: a pipeline beside tensor slices": (
        4,
        lambda: Parallel3DStrategy(tp=2),
        {"policy": RoleMesh(0, 2, pp=2), "critic": RoleMesh(2, 2, tp=2)},
    ),
    "split: the same ranks in another way": (
        4,
        lambda: Parallel3DStrategy(pp=2, tp=2),
        {"critic": RoleMesh(), "reference": RoleMesh(pp=2)},
    ),
}
RESUMED = "sharded: each rank has a role"
AT_ONCE = "calls wait for each other"
ON_BODY = "a critic on the policy's body, a reference that waits in CPU memory"


class Meshed(TinyPPO):
    """PPO with a critic and a reference of its own, which may have meshes."""

    def __init__(self, meshes: dict[str, RoleMesh], **kwargs: Any) -> None:
        policy, critic = (Role(MODEL, mesh=meshes.get(name)) for name in ("policy", "critic"))
        reference = AdaptiveKL(0.1, Role(replace(MODEL, seed=4), mesh=meshes.get("reference")))
        settings = {"num_minibatches": 2, "value_normalization": "running", **kwargs}
        super().__init__(policy, critic=critic, reference=reference, **settings)


class AtOnce(Meshed):
    """The judge, the reference and the critic each end only when all three have begun, and so do the two updates."""

    def __init__(self, folder: Path, meshes: dict[str, RoleMesh]) -> None:
        super().__init__(meshes, num_minibatches=1)
        self.folder = folder

    def style(self, experience: Experience, trajectories: Sequence[Trajectory]) -> torch.Tensor:
        self.meet("judge", ["judge", "reference", "critic"])
        return super().style(experience, trajectories)

    def on_rollout_end(self, groups: Any) -> None:
        models: Any = self.parallel_models
        for role, method, others in (
            ("reference", "forward", ["judge", "reference", "critic"]),
            ("critic", "forward", ["judge", "reference", "critic"]),
            ("policy", "forward_backward", ["policy", "critic update"]),
            ("critic", "forward_backward", ["policy", "critic update"]),
        ):
            name = "critic update" if (role, method) == ("critic", "forward_backward") else role
            if self.trainer.strategy.ranks.of_role(role).is_here:  # type: ignore[attr-defined]
                self.wrap(models[role], method, name, others)

    def wrap(self, model: Any, method: str, name: str, others: list[str]) -> None:
        plain = getattr(model, method)

        def meeting(*args: Any, **kwargs: Any) -> Any:
            self.meet(name, others)
            return plain(*args, **kwargs)

        setattr(model, method, meeting)

    def meet(self, name: str, names: list[str]) -> None:
        (self.folder / name).touch()
        deadline = time.monotonic() + 60
        while not all((self.folder / other).exists() for other in names):
            assert time.monotonic() < deadline, f"{name} waits for {names} in vain"
            time.sleep(0.01)


def play(name: str, folder: Path, *, devices: int) -> dict[str, Any]:
    """Trains the case; gives what is compared."""
    _, strategy, meshes = CASES[name]
    module = Meshed(meshes if devices > 1 else {})
    spread = {"devices": devices, "strategy": strategy()} if devices > 1 else {}
    trainer = make_trainer(folder, gradient_clip_val=0.5, **spread)
    trainer.fit(module, datamodule=Digits())
    return found_by(module, trainer)


def play_on_body(folder: Path, *, devices: int) -> dict[str, Any]:
    meshes = {"policy": RoleMesh(0, 2, pp=2), "reference": RoleMesh(2, 2, tp=2)} if devices > 1 else {}
    reference = Role(replace(MODEL, seed=4), offload=True, mesh=meshes.get("reference"))
    settings: dict[str, Any] = {"critic": "shared", "reference": AdaptiveKL(0.1, reference), "num_minibatches": 2}
    module = TinyPPO(Role(MODEL, mesh=meshes.get("policy")), **settings)
    spread = {"devices": devices, "strategy": Parallel3DStrategy(tp=2)} if devices > 1 else {}
    trainer = make_trainer(folder, gradient_clip_val=0.5, **spread)
    with second_device():
        trainer.fit(module, datamodule=Digits())
    return found_by(module, trainer)


def play_resumed(folder: Path) -> dict[str, Any]:
    """Two iterations on meshes, a checkpoint, and the third one elsewhere."""
    path = folder / "checkpoint"
    first = make_trainer(folder, gradient_clip_val=0.5, max_steps=2, devices=2, strategy=FSDP2Strategy())
    first.fit(Meshed(CASES[RESUMED][2]), datamodule=Digits())
    first.save_checkpoint(path)
    module = Meshed({"policy": RoleMesh(0, 1), "critic": RoleMesh(0, 1), "reference": RoleMesh(1, 1)})
    second = make_trainer(folder, gradient_clip_val=0.5, devices=2, strategy=FSDP2Strategy())
    second.fit(module, datamodule=Digits(), ckpt_path=path)
    return found_by(module, second)


def play_at_once(folder: Path) -> dict[str, Any]:
    module = AtOnce(folder, CASES[RESUMED][2])
    trainer = make_trainer(folder, max_steps=1, devices=2, strategy=FSDP2Strategy())
    trainer.fit(module, datamodule=Digits())
    return found_by(module, trainer)


def main() -> int:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])

    def play_all(devices: int) -> None:
        """All cases of so many ranks in one process; one process stands for all of them."""
        names = [name for name, (size, *_) in CASES.items() if devices == size]
        found = {name: play(name, folder, devices=devices) for name in (names or [RESUMED])}
        if devices == 2:
            found["resumed"] = play_resumed(folder)
            found[AT_ONCE] = play_at_once(folder)
        else:
            found[ON_BODY] = play_on_body(folder, devices=devices)
        leave(found, folder / str(devices))

    return fork_runs((2, 4, 1), play_all)


if __name__ == "__main__":
    sys.exit(main())
