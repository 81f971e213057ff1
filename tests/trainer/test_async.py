"""With `max_staleness` above 0 rollouts overlap the update and the bound holds. Shown by the order of events."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_scripts import ROUNDING, left_by, run_once
from tiny_run import Digits, TinyGRPO, make_trainer, train

from lightrl import Experience, FakeEngine, LocalEngine, RLCallback, StalenessControl, WeightSync


class Overlap(RLCallback):
    """Requests that the engine had started, and those in flight, at the start of each update; what was trained on."""

    def __init__(self) -> None:
        self.later_groups: list[set[int]] = []  # of each update: stream positions asked for, after its own
        self.was_writing: list[bool] = []
        self.staleness: list[int] = []

    def on_minibatch_start(self, trainer: Any, module: Any, minibatch: Experience, index: int, total: int) -> None:
        self.was_writing.append(trainer.engine.num_running > 0)
        trained = {position for batch in module.trained for position in batch}
        started = {int(request.session.partition(":")[0]) for request in list(trainer.engine.requests)}
        self.later_groups.append(started - trained)

    def on_experience_ready(self, trainer: Any, module: Any, experience: Experience) -> None:
        oldest = int(experience.weight_versions[experience.loss_mask].min())
        self.staleness.append(trainer.weight_version - oldest)


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


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_every_trained_token_is_within_the_bound_with_a_straggler(max_staleness, tmp_path):
    engine = FakeEngine(
        seconds_per_token=lambda prompt, sampling: 0.03 if prompt[0] == 4 else 0.001,
        script=lambda prompt, sampling, sample: [2 + (prompt[0] + sample) % 6] * 5,
    )

    module = TinyGRPO()
    trainer = train(tmp_path, module, engine=engine, max_steps=8, callbacks=[StalenessControl(max_staleness)])
    assert trainer.global_step == len(module.trained) == 8
    for version, experience in enumerate(module.experiences):
        tokens = experience.weight_versions[experience.loss_mask]
        assert version - max_staleness <= int(tokens.min()) <= int(tokens.max()) <= version
    positions = [position for batch in module.trained for position in batch]
    assert len(positions) == len(set(positions))


def test_an_engine_that_dies_between_iterations_ends_the_run_with_its_error(tmp_path: Path) -> None:
    class Kill(RLCallback):
        def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
            trainer.engine.close()

    for max_staleness in (0, 1):
        trainer = make_trainer(tmp_path, engine=FakeEngine(), callbacks=[StalenessControl(max_staleness), Kill()])
        with pytest.raises(Exception, match="closed"):
            trainer.fit(TinyGRPO(), datamodule=Digits())
        assert trainer.global_step <= 1 + max_staleness


def test_engine_mismatch_and_policy_lag_are_measured_apart(tmp_path: Path) -> None:
    """An engine whose logprobs are off by 0.25 nats, under a policy that does and one that does not move."""

    class Off(LocalEngine):
        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            completions = await super().generate(*args, **kwargs)
            return [replace(item, logprobs=[value - 0.25 for value in item.logprobs]) for item in completions]

    def metrics(lr: float, max_staleness: int) -> dict[str, float]:
        module = TinyGRPO(lr=lr)
        callbacks = [StalenessControl(max_staleness), WeightSync(verify=False)]
        trainer = train(tmp_path, module, engine=Off(), max_steps=5, callbacks=callbacks)
        return {name: float(value) for name, value in trainer.callback_metrics.items()}

    still, moving, on_policy = metrics(0.0, 2), metrics(3e-2, 2), metrics(3e-2, 0)
    assert still["sync/mismatch_abs_dlogp_nats"] == pytest.approx(0.25, abs=1e-4)
    assert still["policy/lag_abs_dlogp_nats"] == still["policy/lag_k3_nats"] == 0.0
    assert moving["policy/lag_abs_dlogp_nats"] > 0.01
    assert still["policy/step_k3_nats"] == 0.0 < moving["policy/step_k3_nats"]
    assert moving["sync/max_mismatch_abs_dlogp_nats"] == pytest.approx(0.25, abs=1e-4)  # of tokens without lag
    assert on_policy["sync/mismatch_abs_dlogp_nats"] == pytest.approx(0.25, abs=1e-4)
    assert not {"policy/lag_abs_dlogp_nats", "policy/step_k3_nats"} & set(on_policy)


SCRIPT = Path(__file__).with_name("async_ranks_run.py")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """Results of rank 0 of each run, by the number of its ranks, with the weights that the others hold."""
    folder = run_once(SCRIPT, tmp_path_factory)
    left = {size: left_by(size, folder / f"ranks-{size}") for size in (1, 2, 4)}
    for ranks in left.values():
        for other in ranks[1:]:
            ranks[0]["weights"] |= other["weights"]
    return {size: ranks[0] for size, ranks in left.items()}


@pytest.mark.parametrize("size", [2, 4], ids=["FSDP2 on 2", "3D on 4"])
def test_ranks_train_on_the_tokens_of_one_process(size: int, runs: Any) -> None:
    one, several = runs[1], runs[size]
    for run in (one, several):
        lags = [version - int(rows[rows >= 0].min()) for version, rows in enumerate(run["versions"])]
        assert max(lags) == 2
    assert several["trained"] == one["trained"]
    assert all(torch.equal(left, right) for left, right in zip(several["token_ids"], one["token_ids"], strict=True))
    assert several["losses"] == pytest.approx(one["losses"], rel=ROUNDING, abs=ROUNDING)
    for name, weight in one["weights"].items():
        assert (several["weights"][name] - weight).abs().max() <= ROUNDING * weight.abs().max(), name


@pytest.mark.parametrize("size", [2, 4], ids=["FSDP2 on 2", "3D on 4"])
def test_ranks_end_together_before_they_train_on_wrong_logprobs(size: int, runs: Any, tmp_path_factory: Any) -> None:
    steps = left_by(size, run_once(SCRIPT, tmp_path_factory) / f"lies-{size}")
    assert 3 <= steps[0] <= 5  # at iteration 5 all tokens are of version 3 or later
    assert len(set(steps)) == 1
