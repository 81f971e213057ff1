"""Runs of several agents: each one's gradient, and older versions as opponents, which resume to the bit."""

import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from several_run import Duel, agents_result, duel
from tiny_run import POLICY, Digits, TinyGRPO, are_equal, train, weights

from lightrl import FakeEngine, RLCallback, StalenessControl
from lightrl.callbacks.self_play import SelfPlay


class Watched(SelfPlay):
    """Keeps the version that plays in each iteration, and the weights that its engine has."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(every_n_iterations=2, pool_size=2, fraction=0.75, **settings)
        self.played: list[tuple[int, dict[str, torch.Tensor]]] = []

    def on_rollout_end(self, trainer: Any, module: Any, groups: Any) -> None:
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


class Kept(RLCallback):
    def on_rewards_ready(self, trainer: Any, module: Any, groups: Any) -> None:
        self.groups = groups


def test_an_update_follows_each_agents_own_advantage_at_its_own_tokens_alone(tmp_path: Path) -> None:
    """The gradient, from plain forwards of each agent's conversation and a loop over roles."""
    kept, module = Kept(), duel(num_minibatches=1)
    train(tmp_path, module, Digits(batch_size=6), callbacks=[kept, SelfPlay(1, fraction=0.5)], max_steps=1)
    model = POLICY.load_model()
    losses: list[torch.Tensor] = []
    signs = set()
    for group in kept.groups:
        earned: list[dict[int, float]] = [defaultdict(float) for _ in group.trajectories]
        for item, total in zip(group.trajectories, earned, strict=True):
            for agent, reward in zip(item.columns["agents"], item.rewards, strict=True):
                total[agent] += reward
        for item, total in zip(group.trajectories, earned, strict=True):
            for spans in item.rows:
                indices = [index for start, end in spans for index in range(start, end)]
                logprobs = model(torch.tensor([[item.token_ids[index] for index in indices]])).logits[0].log_softmax(-1)
                for before, index in enumerate(indices[1:]):
                    if (agent := item.columns["agents"][index]) < 0:
                        continue
                    peers = [other[agent] for other in earned if agent in other]
                    spread = statistics.stdev(peers) if len(peers) > 1 else 0.0
                    advantage = (total[agent] - statistics.fmean(peers)) / (spread + 1e-5) if spread else 0.0
                    losses.append(-advantage * logprobs[before, item.token_ids[index]])
                    signs.add((agent, advantage > 0))
    assert len(signs) == 4  # both agents won and lost
    assert {item.metrics["opponent_fraction"] for group in kept.groups for item in group.trajectories} == {0.0, 1.0}
    torch.stack(losses).mean().backward()
    largest = max(float(parameter.grad.abs().max()) for parameter in model.parameters())
    for name, parameter in model.named_parameters():
        moved = (parameter.detach() - weights(module)[name]) / module.lr
        torch.testing.assert_close(moved, parameter.grad, rtol=0, atol=1e-4 * largest)
    assert largest > 0.01


class Rounding(FakeEngine):
    def dtypes(self) -> set[str]:
        return {"bfloat16", "float8_e4m3fn"}


def test_the_opponent_rounds_as_the_policys_engine_does(tmp_path: Path) -> None:
    watched = Watched()
    train(tmp_path, duel(), Digits(), callbacks=[watched], engine=Rounding(), max_steps=1)
    assert {value.dtype for value in watched.played[0][1].values()} == {torch.bfloat16}


@pytest.mark.extra
def test_two_ranks_train_agents_as_one_process_does(several_ranks: Any, tmp_path: Path) -> None:
    alone = agents_result(tmp_path)
    for rank in several_ranks:
        for name, value in alone["weights"].items():
            scale = float(value.abs().max())
            torch.testing.assert_close(rank["agents"]["weights"][name], value, rtol=0, atol=1e-5 * scale)


def test_self_play_without_agents_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="SelfPlay plays an agent in the MultiAgent workflow"):
        train(tmp_path, TinyGRPO(), callbacks=[SelfPlay()])
    with pytest.raises(ValueError, match="SelfPlay needs max_staleness=0, got 1"):
        train(tmp_path, duel(), callbacks=[SelfPlay(), StalenessControl(1)])
    with pytest.raises(ValueError, match="pool_size must be >= 1"):
        SelfPlay(pool_size=0)
