import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from lightrl.callbacks.progress import ModelLines
from lightrl.trainer import Trainer


def test_each_model_has_a_line_and_the_trained_share_one(caplog: pytest.LogCaptureFixture) -> None:
    module = BoringModel()
    module.frozen = torch.nn.Linear(10, 100).requires_grad_(False)
    trainer = Trainer(accelerator="cpu", logger=False)
    (lines,) = [callback for callback in trainer.callbacks if isinstance(callback, ModelLines)]
    with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
        lines.on_fit_start(trainer, module)
    assert caplog.messages[-1].splitlines() == [
        "layer: Linear, 66 parameters",
        "frozen: Linear, 1.1 K parameters",
        "66 of 1.2 K parameters are trained, 0.0 MB",
    ]


def test_a_stage_is_not_called_the_policy_nor_fsdp_a_model(caplog: pytest.LogCaptureFixture) -> None:
    module = BoringModel()
    module.layer = type("FSDPLinear", (torch.nn.Linear,), {})(32, 2)
    trainer = Trainer(accelerator="cpu", logger=False)
    trainer.strategy.pp = 2
    with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
        ModelLines().on_fit_start(trainer, module)
    assert caplog.messages[-1].splitlines() == [
        "layer: Linear, 66 parameters in rank 0's pipeline stage (one of 2)",
        "66 of 66 parameters in rank 0's pipeline stage (one of 2) are trained, 0.0 MB",
    ]


def test_a_summary_that_a_user_passes_or_turns_off_is_left_alone() -> None:
    assert not [
        callback
        for callback in Trainer(accelerator="cpu", logger=False, enable_model_summary=False).callbacks
        if isinstance(callback, ModelLines)
    ]
