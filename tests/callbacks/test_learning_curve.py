import csv
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities.exceptions import SIGTERMException
from scripted_run import ScriptedTrainer, ValidatedModule, batches

from lightrl.callbacks.learning_curve import LearningCurve, Points, draw_learning_curve
from lightrl.callbacks.rollout_metrics import RolloutMetrics
from lightrl.testing import make_groups
from lightrl.trajectory import Group

PNG = b"\x89PNG\r\n"


def one_group(iteration: int) -> list[Group]:
    return make_groups([[1.0, 0.0] if iteration % 2 else [0.0, 0.0]])


def fit(curve, folder, *callbacks, max_epochs=2, module=None, ckpt_path=None, **settings):
    flags = {"default_root_dir": folder, "enable_progress_bar": False, "max_epochs": max_epochs, **settings}
    trainer = ScriptedTrainer(callbacks=[RolloutMetrics(), curve, *callbacks], **flags)
    trainer.fit(module or ValidatedModule(one_group), batches(2), batches(1), ckpt_path=ckpt_path, weights_only=True)
    return trainer


def test_the_end_of_fit_leaves_an_image_and_its_numbers(tmp_path: Path) -> None:
    fit(LearningCurve(), tmp_path)
    assert (tmp_path / "learning_curve.png").read_bytes().startswith(PNG)
    assert list(csv.reader((tmp_path / "learning_curve.csv").read_text().splitlines())) == [
        ["iteration", "rollout/reward", "val/accuracy_fraction"],  # the reward gives no accuracy
        ["1", "0.0", ""],
        ["2", "0.5", "0.375"],  # measured after two iterations: 0.25 + 2 / 16
        ["3", "0.0", ""],
        ["4", "0.5", "0.5"],
    ]


def test_where_no_accuracy_is_measured_the_held_out_reward_is_the_curve(tmp_path: Path) -> None:
    class Graded(ValidatedModule):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val/reward", self.trainer.global_step / 8 - 3)

    fit(LearningCurve(), tmp_path, module=Graded(one_group))
    header, *rows = csv.reader((tmp_path / "learning_curve.csv").read_text().splitlines())
    assert header == ["iteration", "rollout/reward", "val/reward"]
    assert {row[0]: float(row[2]) for row in rows if row[2]} == {"2": -2.75, "4": -2.5}


def test_a_curve_of_a_long_run_has_the_means_of_equal_parts() -> None:
    points = Points()
    for iteration in range(10_000):
        points.add(iteration, float(iteration))
    values = points.values()
    assert points.stride == 16
    assert len(values) == 625
    assert list(values.items())[:2] == [(7.5, 7.5), (23.5, 23.5)]  # of iterations 0 to 15, and 16 to 31
    assert all(place == value for place, value in values.items())


def test_another_metric_of_validation_can_be_drawn(tmp_path: Path) -> None:
    class WithTokens(ValidatedModule):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val/token_accuracy_fraction", 0.5 + self.trainer.global_step / 16)

    curve = LearningCurve(held_out="val/token_accuracy_fraction")
    fit(curve, tmp_path, module=WithTokens(one_group))
    rows = list(csv.reader((tmp_path / "learning_curve.csv").read_text().splitlines()))
    assert [row[2] for row in rows[1:] if row[2]] == ["0.625", "0.75"]


def test_the_numbers_of_a_resumed_run_hold_all_of_it(tmp_path: Path) -> None:
    whole, before, after = LearningCurve(), LearningCurve(), LearningCurve()
    fit(whole, tmp_path / "whole", max_epochs=4)
    fit(before, tmp_path / "parts").save_checkpoint(tmp_path / "two.ckpt")
    fit(after, tmp_path / "parts", max_epochs=4, ckpt_path=tmp_path / "two.ckpt")
    assert repr(after.state_dict()) == repr(whole.state_dict())


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SIGTERMException], ids=["Ctrl-C", "SIGTERM"])
def test_an_interruption_leaves_the_image_of_what_was_done(interruption: type[BaseException], tmp_path: Path) -> None:
    def interrupt(iteration: int) -> list[Group]:
        if iteration == 3:
            raise interruption
        return one_group(iteration)

    with pytest.raises(SystemExit):
        fit(LearningCurve(), tmp_path, max_epochs=4, module=ValidatedModule(interrupt))
    assert (tmp_path / "learning_curve.png").exists()


def test_a_missing_matplotlib_is_reported_once_and_harms_nothing(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with caplog.at_level(logging.WARNING, logger="lightrl"):
        fit(LearningCurve(), tmp_path)
    assert [message for message in caplog.messages if "matplotlib" in message] == caplog.messages[:1]
    assert (tmp_path / "learning_curve.csv").exists()


def test_a_plain_module_has_no_image(tmp_path: Path) -> None:
    quiet = {"max_epochs": 1, "enable_progress_bar": False, "enable_checkpointing": False}
    data = batches(2).expand(2, 1, 32)
    ScriptedTrainer(callbacks=[LearningCurve()], default_root_dir=tmp_path, **quiet).fit(BoringModel(), data, data)
    assert not (tmp_path / "learning_curve.png").exists()


@pytest.mark.parametrize(
    "curves",
    [
        pytest.param({"rollout/reward": {0: -3.0}}, id="one point, reward only"),
        pytest.param({"val/reward": {0: -2.0, 50: 3.5}}, id="held-out reward only"),
        pytest.param(
            {
                "rollout/reward": {i: i / 9 - 1 for i in range(90)},
                "rollout/accuracy_fraction": {i: i / 90 for i in range(90)},
                "val/accuracy_fraction": {0: 0.1, 50: 1.0},
            },
            id="reward on a scale of its own",
        ),
    ],
)
def test_any_part_of_the_curves_can_be_drawn(tmp_path: Path, curves: dict[str, dict[int, float]]) -> None:
    draw_learning_curve(curves, tmp_path / "curve.png", title="GRPO", constant_baseline=0.34)
    assert (tmp_path / "curve.png").read_bytes().startswith(PNG)
    assert [path.name for path in tmp_path.iterdir()] == ["curve.png"]


def test_a_baseline_in_percent_is_refused() -> None:
    with pytest.raises(ValueError, match="constant_baseline must be between 0 and 1, got 34"):
        LearningCurve(constant_baseline=34)
