"""What docs/write-a-callback.md shows: a callback that configures the rollout, and metrics of one's own."""

import re
from pathlib import Path
from typing import Any

import pytest
from tiny_run import BATCH_SIZE, GROUP_SIZE, Digits, TinyGRPO, make_trainer, train

from lightrl import FakeEngine, RLCallback, RolloutMetrics
from lightrl.rollout import RolloutSettings
from lightrl.trajectory import Group

DOCS = Path(__file__).parents[2] / "docs" / "write-a-callback.md"


def shown(name: str) -> dict[str, Any]:
    """The names that the code block of the docs defines."""
    block = re.search(rf"<!-- test: {name} -->\n```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert len(block.group(1).strip().splitlines()) <= 15
    names: dict[str, Any] = {"__name__": "my_callbacks"}
    exec(compile(block.group(1), str(DOCS), "exec"), names)
    return names


def engine() -> FakeEngine:
    """Prompts whose first token is even have equal completions, the others random ones."""
    return FakeEngine(script=lambda prompt, sampling, sample: [2 + (sampling.seed or 0) * (prompt[0] % 2) % 6, 1])


def test_the_callback_of_the_docs_drops_groups_by_its_own_rule(tmp_path: Path) -> None:
    module = TinyGRPO()
    trainer = train(tmp_path, module, engine=engine(), callbacks=[shown("callback")["DropRepeats"]()])
    for experience in module.experiences:
        assert len(experience) == BATCH_SIZE * GROUP_SIZE
        assert all(int(ids[0]) % 2 == 1 for ids in experience.token_ids)
    assert "rollout/dropped_trajectories_repeats" in trainer.callback_metrics


class Distinct(TinyGRPO):
    fractions: list[float]

    def on_rewards_ready(self, groups: list[Group]) -> None:
        nums = [len({tuple(item.completion_ids) for item in group.trajectories}) for group in groups]
        self.fractions = [*getattr(self, "fractions", []), sum(nums) / (GROUP_SIZE * len(groups))]


def test_the_metric_of_the_docs_is_logged_in_training_and_validation(tmp_path: Path) -> None:
    metric = shown("metric")["DistinctFraction"]
    module = Distinct()
    module.validation_metrics["distinct_fraction"] = metric()
    trainer = make_trainer(
        tmp_path,
        engine=engine(),
        callbacks=[RolloutMetrics(metrics={"rollout/distinct_fraction": metric()})],
        max_epochs=1,
        limit_val_batches=1.0,
    )
    trainer.fit(module, datamodule=Digits())
    assert float(trainer.callback_metrics["rollout/distinct_fraction"]) == pytest.approx(module.fractions[-1])
    assert float(trainer.callback_metrics["val/distinct_fraction"]) == 1.0  # one completion per prompt


@pytest.mark.parametrize("answer", [None, {"max_staleness": 1}], ids=["nothing", "a dict"])
def test_an_answer_that_is_no_settings_is_refused(answer: Any, tmp_path: Path) -> None:
    class Wrong(RLCallback):
        def configure_rollout(self, trainer: Any, module: Any, settings: RolloutSettings) -> Any:
            return answer

    with pytest.raises(TypeError, match=r"configure_rollout must return RolloutSettings, got (NoneType|dict)"):
        make_trainer(tmp_path, callbacks=[Wrong()]).fit(TinyGRPO(), datamodule=Digits())
