"""With `max_staleness` above 0 rollouts overlap the update and the bound holds. Shown by the order of events."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_run import BATCH_SIZE, GROUP_SIZE, NUM_PROMPTS, Digits, TinyGRPO, make_trainer

from lightrl import (
    Experience,
    FakeEngine,
    LocalEngine,
    RLCallback,
    Sampling,
    StalenessControl,
    WeightSync,
)
from lightrl.engines import Completion
from lightrl.trajectory import Group


class Overlap(RLCallback):
    """What the engine had begun, and was writing, when each update began; what was trained on."""

    def __init__(self) -> None:
        self.later_groups: list[set[int]] = []  # of each update: stream positions asked for, after its own
        self.was_writing: list[bool] = []
        self.mixed: list[float] = []
        self.staleness: list[int] = []

    def on_minibatch_start(self, trainer: Any, module: Any, minibatch: Experience, index: int, total: int) -> None:
        self.was_writing.append(trainer.engine.num_running > 0)
        trained = {position for batch in module.trained for position in batch}
        started = {int(request.session.partition(":")[0]) for request in list(trainer.engine.requests)}
        self.later_groups.append(started - trained)

    def on_experience_ready(self, trainer: Any, module: Any, experience: Experience) -> None:
        versions = experience.weight_versions
        for row, mask in zip(versions, experience.loss_mask, strict=True):
            self.mixed.append(float(len(set(row[mask].tolist())) > 1))
        self.staleness.append(trainer.weight_version - int(versions[experience.loss_mask].min()))


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_an_update_starts_while_later_groups_run(max_staleness: int, tmp_path: Path) -> None:
    overlap = Overlap()
    engine = FakeEngine(
        seconds_per_token=lambda prompt, sampling: 0.1 if prompt[0] % 2 else 0.001,
        script=lambda prompt, sampling, sample: [5] * 6,
    )
    callbacks = [StalenessControl(max_staleness), overlap]
    make_trainer(tmp_path, engine=engine, max_steps=6, callbacks=callbacks).fit(TinyGRPO(), datamodule=Digits())
    assert len(overlap.later_groups) == 6
    assert all(overlap.later_groups[:5])
    assert any(overlap.was_writing)
    assert max(overlap.staleness) == max_staleness


def test_on_policy_nothing_runs_during_an_update(tmp_path: Path) -> None:
    overlap = Overlap()
    make_trainer(tmp_path, engine=FakeEngine(), callbacks=[overlap]).fit(TinyGRPO(), datamodule=Digits())
    assert overlap.later_groups == [set()] * 3
    assert not any(overlap.was_writing)
    assert overlap.staleness == [0] * 3
    assert not any(overlap.mixed)


class InterruptedEngine(FakeEngine):
    """Writes half of a completion, then waits for the weights of the update before the completion's iteration."""

    async def generate(
        self, token_ids: list[int], sampling: Sampling, *, session: str, n: int = 1, **options: Any
    ) -> list[Completion]:
        begun = replace(sampling, max_new_tokens=sampling.max_new_tokens // 2)
        halves = await super().generate(token_ids, begun, session=session, n=n)
        while self.weight_version < int(session.partition(":")[0]) // BATCH_SIZE:
            await asyncio.sleep(0.001)
        whole = []
        for half in halves:
            whole += await super().generate(token_ids, sampling, session=session, written=half)
        return whole


def test_trajectories_that_a_sync_interrupted_are_trained_on_with_both_versions(tmp_path: Path) -> None:
    overlap = Overlap()
    logged: list[float] = []

    class Mixed(RLCallback):
        def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
            logged.append(float(trainer.callback_metrics["rollout/mixed_version_fraction"]))

    engine = InterruptedEngine()
    module = TinyGRPO(sampling=Sampling(max_new_tokens=12))
    callbacks = [StalenessControl(1), overlap, Mixed()]
    make_trainer(tmp_path, engine=engine, max_steps=6, callbacks=callbacks).fit(module, datamodule=Digits())
    num_rows = len(overlap.mixed) // 6
    assert overlap.mixed == [0.0] * num_rows + [1.0] * (5 * num_rows)
    assert logged == [0.0] + [1.0] * 5
    for experience in module.experiences:
        for row, mask in zip(experience.weight_versions, experience.loss_mask, strict=True):
            assert row[mask].tolist() == sorted(row[mask].tolist())


@pytest.mark.parametrize("max_staleness", [0, 2])
@pytest.mark.parametrize("redraw", [False, True], ids=["wait", "redraw"])
def test_every_trained_token_is_within_the_bound_with_a_straggler(
    max_staleness: int, redraw: bool, tmp_path: Path
) -> None:
    engine = FakeEngine(
        seconds_per_token=lambda prompt, sampling: 0.03 if prompt[0] == 4 else 0.001,
        script=lambda prompt, sampling, sample: [2 + (prompt[0] + sample) % 6] * 5,
    )
    module = TinyGRPO()
    control = StalenessControl(max_staleness, redraw_stragglers=redraw)
    trainer = make_trainer(tmp_path, engine=engine, max_steps=8, callbacks=[control])
    trainer.fit(module, datamodule=Digits())
    assert trainer.global_step == len(module.trained) == 8
    for version, experience in enumerate(module.experiences):
        tokens = experience.weight_versions[experience.loss_mask]
        assert version - max_staleness <= int(tokens.min()) <= int(tokens.max()) <= version
    positions = [position for batch in module.trained for position in batch]
    assert len(positions) == len(set(positions))


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_no_prompt_is_started_beyond_what_the_run_needs(max_staleness: int, tmp_path: Path) -> None:
    engine = FakeEngine()
    trainer = make_trainer(tmp_path, engine=engine, max_epochs=2, callbacks=[StalenessControl(max_staleness)])
    trainer.fit(TinyGRPO(), datamodule=Digits())
    assert trainer.global_step == 2 * NUM_PROMPTS // BATCH_SIZE
    sessions = [request.session for request in engine.requests]
    assert len(sessions) == len(set(sessions)) == 2 * NUM_PROMPTS * GROUP_SIZE


def test_groups_are_trained_on_in_stream_order_whatever_finishes_first(tmp_path: Path) -> None:
    engine = FakeEngine(seconds_per_token=lambda prompt, sampling: 0.02 if prompt[0] == 2 else 0.0)
    module = TinyGRPO()
    callbacks = [StalenessControl(2)]
    make_trainer(tmp_path, engine=engine, max_steps=3, callbacks=callbacks).fit(
        module, datamodule=Digits(shuffle=False)
    )
    assert module.trained == [[0, 1], [2, 3], [4, 5]]  # group 0 is slow and the trainer waits for it


def test_an_engine_that_dies_between_iterations_ends_the_run_with_its_error(tmp_path: Path) -> None:
    class Kill(RLCallback):
        def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
            trainer.engine.close()

    for max_staleness in (0, 1):
        trainer = make_trainer(tmp_path, engine=FakeEngine(), callbacks=[StalenessControl(max_staleness), Kill()])
        with pytest.raises(Exception, match="closed"):
            trainer.fit(TinyGRPO(), datamodule=Digits())
        assert trainer.global_step <= 1 + max_staleness


def test_a_sync_that_fails_ends_the_run_and_names_it(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, engine=FakeEngine(fail_loads=[2]))
    with pytest.raises(Exception, match="fails the load of version 2"):
        trainer.fit(TinyGRPO(), datamodule=Digits())


def test_a_request_that_never_answers_ends_the_run_at_its_deadline(tmp_path: Path) -> None:
    control = StalenessControl(rollout_timeout_s=1.0)
    trainer = make_trainer(tmp_path, engine=FakeEngine(hang_requests=[9]), callbacks=[control])
    with pytest.raises(Exception, match=r"at weight version 1 waited for .* no trajectory finished.*rollout_timeout"):
        trainer.fit(TinyGRPO(), datamodule=Digits())


def test_validation_does_not_stop_the_training_rollouts(tmp_path: Path) -> None:
    seen: list[bool] = []

    class Look(RLCallback):
        def on_validation_batch_end(self, trainer: Any, module: Any, outputs: list[Group], *args: Any) -> None:
            trained = {position for batch in module.trained for position in batch}
            started = {request.session for request in trainer.engine.requests if request.session[0].isdigit()}
            seen.append(len(started) > len(trained) * GROUP_SIZE)

    engine = FakeEngine(seconds_per_token=0.002)
    callbacks = [StalenessControl(1), Look()]
    flags: dict[str, Any] = {"limit_val_batches": 1.0, "val_check_interval": 1, "max_steps": 4}
    trainer = make_trainer(tmp_path, engine=engine, callbacks=callbacks, **flags)
    trainer.fit(TinyGRPO(), datamodule=Digits())
    assert seen == [True, True, True, False]


def test_engine_mismatch_and_policy_lag_are_told_apart(tmp_path: Path) -> None:
    """An engine whose logprobs are off by 0.25 nats, under a policy that does and one that does not move."""

    class Off(LocalEngine):
        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            completions = await super().generate(*args, **kwargs)
            return [replace(item, logprobs=[value - 0.25 for value in item.logprobs]) for item in completions]

    def metrics(lr: float, max_staleness: int) -> dict[str, float]:
        module = TinyGRPO(lr=lr)
        callbacks = [StalenessControl(max_staleness), WeightSync(max_probe_nats=1.0)]
        trainer = make_trainer(tmp_path, engine=Off(), max_steps=5, callbacks=callbacks)
        trainer.fit(module, datamodule=Digits())
        return {name: float(value) for name, value in trainer.callback_metrics.items()}

    still, moving, on_policy = metrics(0.0, 2), metrics(3e-2, 2), metrics(3e-2, 0)
    assert still["sync/mismatch_abs_dlogp_nats"] == pytest.approx(0.25, abs=1e-4)
    assert still["policy/lag_abs_dlogp_nats"] == still["policy/lag_k3_nats"] == 0.0
    assert moving["policy/lag_abs_dlogp_nats"] > 0.01
    assert still["policy/step_k3_nats"] == 0.0 < moving["policy/step_k3_nats"]
    assert moving["sync/max_mismatch_abs_dlogp_nats"] == pytest.approx(0.25, abs=1e-4)  # of tokens without lag
    assert on_policy["sync/mismatch_abs_dlogp_nats"] == pytest.approx(0.25, abs=1e-4)
    assert not {"policy/lag_abs_dlogp_nats", "policy/step_k3_nats"} & set(on_policy)
