"""Runs on sources with tasks of their own: each prompt gets its source's workflow, reward, group size and limit."""

import json
import statistics
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from several_run import ROUNDS, Contest, Sourced, sources, tasks_result
from tiny_run import POLICY, are_equal, train, weights

import lightrl
from lightrl import DynamicSampling, LocalEngine, Prompt, PromptDataModule, SFTDataModule, StalenessControl, Trajectory
from lightrl.data import DataSource
from lightrl.data.tasks import Task
from lightrl.rewards import RewardPart
from lightrl.rollout import RolloutSettings
from lightrl.rollout.group_scheduler import GroupScheduler
from lightrl.trajectory import Group
from lightrl.workflows import MultiAgent


def won(trajectory: Trajectory) -> float:
    return trajectory.metrics["reward_left"]


class Seen(lightrl.RLCallback):
    """The groups of each iteration, and what was logged of them."""

    def __init__(self) -> None:
        self.groups: list[list[Group]] = []
        self.logged: list[dict[str, float]] = []

    def on_rewards_ready(self, trainer: Any, module: Any, groups: list[Group]) -> None:
        self.groups.append(groups)

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def fit(folder: Path, resume: Path | None = None, *, max_staleness: int = 0, **flags: Any) -> tuple[Sourced, Seen, Any]:
    module, seen = Sourced(), Seen()
    save = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    validation = [DataSource(str(folder / "turns.jsonl"), label="turns")]
    data = PromptDataModule(sources(folder), validation, batch_size=3, answer_column=None, seed=1)
    callbacks = [seen, StalenessControl(max_staleness), *([] if resume else [save])]
    trainer = train(
        folder, module, data, ckpt_path=resume, callbacks=callbacks, enable_checkpointing=True, max_steps=6,
        engine=LocalEngine(max_batch=1),  # a later turn joins no batch, so no rounding depends on when it comes
        **flags,
    )  # fmt: skip
    return module, seen, trainer


def test_each_source_runs_its_own_task(tmp_path: Path) -> None:
    _, seen, trainer = fit(tmp_path, limit_val_batches=1.0, check_val_every_n_epoch=None, val_check_interval=3)
    groups = [group for iteration in seen.groups for group in iteration]
    assert Counter(group.prompt.source for group in groups) == {"short": 6, "turns": 6, None: 6}
    for group in groups:
        items, source = group.trajectories, group.prompt.source
        assert len(items) == {"short": 2, "turns": 3, None: 4}[source]
        for item in items:
            assert all(turn.end - turn.start <= (3 if source == "short" else 6) for turn in item.turns)
            has_rounds = source == "turns" and not item.is_truncated
            assert len(item.turns) in ([ROUNDS] if has_rounds else range(1, ROUNDS + 1) if source == "turns" else [1])
            expected = {
                "short": -float(len(item.completion_ids)),
                "turns": sum(item.rewards or []),
                None: item.completion_ids.count(7) / len(item.completion_ids),
            }
            assert item.reward == pytest.approx(expected[source])
            assert ("turns" in item.metrics) == (source == "turns")  # of MultiTurn
    assert any(len(item.turns) > 1 for group in groups for item in group.trajectories)
    for iteration, logged in zip(seen.groups, seen.logged, strict=True):
        for source in ("short", "turns"):
            items = [item for group in iteration if group.prompt.source == source for item in group.trajectories]
            assert logged[f"rollout/reward/{source}"] == pytest.approx(statistics.fmean(item.reward for item in items))
            lengths = statistics.fmean(item.num_loss_tokens for item in items)
            assert logged[f"rollout/length_tokens/{source}"] == pytest.approx(lengths)
    assert trainer.callback_metrics["val/turns"] >= 1  # the validation source has the label's task


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_resume_continues_every_source_at_its_next_row(tmp_path: Path, max_staleness: int) -> None:
    whole, seen, _ = fit(tmp_path, max_staleness=max_staleness)
    ids = [[group.prompt.id for group in groups] for groups in seen.groups]
    for iteration in (1, 4):
        resumed, again, _ = fit(tmp_path, tmp_path / f"step={iteration}.ckpt", max_staleness=max_staleness)
        assert [[group.prompt.id for group in groups] for groups in again.groups] == ids[iteration:]
        if not max_staleness:
            assert are_equal(weights(resumed), weights(whole))


def test_two_ranks_train_groups_of_different_sizes_as_one_process_does(several_ranks: Any, tmp_path: Path) -> None:
    one = tasks_result(tmp_path)
    for rank in several_ranks:
        assert rank["tasks"]["sizes"] == one["sizes"]
        assert rank["tasks"]["metrics"] == pytest.approx(one["metrics"], rel=1e-5)
        for name, value in one["weights"].items():
            torch.testing.assert_close(
                rank["tasks"]["weights"][name], value, rtol=0, atol=1e-5 * float(value.abs().max())
            )
    assert {size for sizes in one["sizes"] for size in sizes} == {2, 3, 4}


def test_the_lines_say_what_applies_to_each_source(tmp_path: Path) -> None:
    data = PromptDataModule(sources(tmp_path), batch_size=3, answer_column=None)
    assert data.tasks.lines(Sourced()) == [
        "source short: the module's workflow, sources.<locals>.<lambda>, group_size 2, at most 3 new tokens",
        "source turns: multi_turn, sources.<locals>.<lambda>, group_size 3, at most 6 new tokens",
        "others: the module's workflow, the module's reward, group_size 4, at most 6 new tokens",
    ]


def scheduler_of(max_staleness: int, **settings: Any) -> GroupScheduler:
    sizes = {"one": 1, "three": 3}
    return GroupScheduler(RolloutSettings(2, sizes, groups_per_iteration=3, max_staleness=max_staleness, **settings))


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_groups_of_any_size_are_complete_in_time_and_resume(max_staleness: int) -> None:
    """Plays iterations by hand: the sizes change neither which groups start, nor the bound on their staleness."""
    scheduler, labels, position = scheduler_of(max_staleness), ("one", "three", None, "three"), 0
    running: list[Any] = []
    for version in range(5):
        scheduler.begin_take(version)
        num_new = scheduler.plan(version)
        assert num_new == (3 * (max_staleness + 1) if version == 0 else 3)
        for new in range(position, position + num_new):
            scheduler.queue(new)
            prompt = Prompt(f"p{new}", token_ids=[new], source=labels[new % 4])
            running.append(scheduler.start(new, prompt, version))
        position += num_new
        for item in running:
            size = {"one": 1, "three": 3, None: 2}[item.group.prompt.source]
            fields = [0, 1], [False, True], [0.0] * 2, [-1, version], [1], "", "stop", False, 1.0
            made = [Trajectory(item.group.prompt, item.group.id, sample, *fields) for sample in range(size)]
            done = [scheduler.record(item, sample, trajectory) for sample, trajectory in enumerate(made)]
            assert done == [False] * (size - 1) + [True]
            scheduler.settle(item.group)
        running = []
        resumed = scheduler_of(max_staleness)
        resumed.load_state_dict(json.loads(json.dumps(scheduler.state_dict())))
        batches = [each.take(version).group_ids for each in (scheduler, resumed)]
        assert batches[0] == batches[1] == [3 * version, 3 * version + 1, 3 * version + 2]
        for group in scheduler.taken:
            assert version - group.oldest_version <= max_staleness
        scheduler.commit()


def test_failures_are_compared_with_the_trajectories_of_the_groups_in_flight() -> None:
    scheduler = scheduler_of(0, max_failed_fraction=0.5)
    for position, label in enumerate(["one", "one", "three"]):
        scheduler.queue(position)
        scheduler.start(position, Prompt(f"p{position}", token_ids=[1], source=label), 0)
    assert scheduler.num_expected == 5
    for sample in range(2):
        scheduler.record(scheduler.running[2], sample, None)
    with pytest.raises(lightrl.errors.RolloutError, match="3 of 5 trajectories failed"):
        scheduler.record(scheduler.running[2], 2, None)


@pytest.mark.parametrize(
    ("task", "module", "message"),
    [
        pytest.param(
            {"workflow": partial(MultiAgent, environment=Contest)},
            {"reward_model": POLICY},
            "A reward model scores a trajectory, not an agent",
            id="agents",
        ),
        pytest.param(
            {"workflow": partial(MultiAgent, environment=Contest), "reward": "lightrl.rewards.math_answer"},
            {},
            "MultiAgent needs rewards per agent, but reward='lightrl.rewards.math_answer' returns one number",
            id="one number",
        ),
        pytest.param(
            {"reward": [RewardPart("lightrl.rewards.environment_reward"), RewardPart("lightrl.rewards.LLMJudge")]},
            {"workflow": partial(MultiAgent, environment=Contest), "reward": won},
            "MultiAgent needs rewards per agent, but reward='won' returns one number",
            id="one number of the module",
        ),
        pytest.param({"group_size": 1}, {}, "group_size of source 'a' must be at least 2", id="group of one"),
        pytest.param({"max_new_tokens": 7}, {}, "max_new_tokens of source 'a' must be from .* to .*=6", id="limit"),
        pytest.param(
            {"max_new_tokens": 3}, {"overlong_penalty": lightrl.OverlongPenalty(2)}, "overlong_penalty", id="penalty"
        ),
    ],
)
def test_a_task_that_does_not_fit_the_module_is_refused_before_a_model_is_built(task, module, message, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "1"}\n' * 4)
    data = PromptDataModule(
        DataSource(str(tmp_path / "rows.jsonl"), label="a", task=Task(**task)), batch_size=1, answer_column=None
    )
    made = Sourced(**module)
    with pytest.raises(ValueError, match=message):
        train(tmp_path, made, data)
    assert not hasattr(made, "policy")


def test_tasks_are_checked_where_they_are_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="group_size must be >= 1, got 0"):
        Task(group_size=0)
    with pytest.raises(ValueError, match="has a task, so it needs a label"):
        DataSource("rows.jsonl", task=Task())
    with pytest.raises(ValueError, match=r"needs a label, .* must not be a number, got '0'"):
        DataSource("rows.jsonl", label="0", task=Task())
    same = [DataSource("rows.jsonl", label="a", task=Task(group_size=size)) for size in (2, 3)]
    with pytest.raises(ValueError, match="labeled 'a' have different tasks"):
        PromptDataModule(same[0], same[1], batch_size=1)
    with pytest.raises(ValueError, match=r"task=.*'a'.* has no effect on data without rollouts"):
        SFTDataModule(same[0], batch_size=1)
    (tmp_path / "rows.jsonl").write_text('{"question": "1"}\n' * 4)
    one = DataSource(str(tmp_path / "rows.jsonl"), label="a", task=Task(group_size=1))
    module = Sourced(advantage_mean="batch", advantage_std="batch")
    with pytest.raises(ValueError, match=r"With group_size=1, .* drops every group"):
        train(tmp_path, module, PromptDataModule(one, batch_size=1, answer_column=None), callbacks=[DynamicSampling()])
