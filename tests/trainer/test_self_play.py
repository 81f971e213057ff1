"""Runs against older versions: who plays, what trains, and resumes to the bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from several_run import Duel, agents_result, duel
from tiny_run import Digits, TinyGRPO, are_equal, train, weights

from lightrl import FakeEngine, StalenessControl
from lightrl.callbacks.self_play import SelfPlay


class Watched(SelfPlay):
    """Keeps the version that plays in each iteration, and the weights that its engine has."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(every_n_iterations=2, pool_size=2, fraction=0.75, **settings)
        self.played: list[tuple[int, dict[str, torch.Tensor]]] = []

    def on_rollout_end(self, trainer: Any, module: Any, groups: Any) -> None:
        assert self._engine is not None
        self.played.append((self._engine.weight_version, self._engine.read_weights()))


def fit(folder: Path, resume: Path | None = None, steps: int = 6) -> tuple[Duel, Watched]:
    module, watched = duel(), Watched()
    save = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    flags: dict[str, Any] = {"callbacks": [watched, *([] if resume else [save])], "engine": FakeEngine()}
    train(folder, module, Digits(), ckpt_path=resume, enable_checkpointing=True, max_steps=steps, **flags)
    return module, watched


def test_older_versions_play_and_a_resume_repeats_the_run_bit_for_bit(tmp_path: Path) -> None:
    whole, watched = fit(tmp_path)
    assert sorted(watched.pool) == [4, 6]  # of 0, 2, 4 and 6
    assert {version for version, _ in watched.played} >= {0}
    for iteration, (version, parameters) in enumerate(watched.played):
        assert version % 2 == 0
        assert version <= iteration
        saved = torch.load(tmp_path / f"step={version}.ckpt", weights_only=True)["state_dict"] if version else None
        for name, value in parameters.items() if saved else ():
            assert torch.equal(saved[f"policy.{name}"], value), name
    for experience in whole.experiences:  # a trained token is the policy's, of this iteration's weights
        versions = experience.weight_versions[experience.loss_mask]
        assert (versions == versions.max()).all()
    share = sum(whole.with_opponent) / len(whole.with_opponent)
    assert 0.4 < share < 1
    resumed, again = fit(tmp_path, tmp_path / "step=3.ckpt")
    assert [version for version, _ in again.played] == [version for version, _ in watched.played][3:]
    assert are_equal(weights(resumed), weights(whole))


def test_two_ranks_train_agents_as_one_process_does(several_ranks: Any, tmp_path: Path) -> None:
    alone = agents_result(tmp_path)
    for rank in several_ranks:
        for name, value in alone["weights"].items():
            scale = float(value.abs().max())
            torch.testing.assert_close(rank["agents"]["weights"][name], value, rtol=0, atol=1e-5 * scale)


def test_self_play_without_agents_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="SelfPlay needs the workflow MultiAgent"):
        train(tmp_path, TinyGRPO(), callbacks=[SelfPlay()])
    with pytest.raises(ValueError, match="SelfPlay needs max_staleness=0, got 1"):
        train(tmp_path, duel(), callbacks=[SelfPlay(), StalenessControl(1)])
    with pytest.raises(ValueError, match="pool_size must be >= 1"):
        SelfPlay(pool_size=0)
