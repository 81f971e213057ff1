import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from scripted_run import ScriptedModule, ScriptedTrainer, ValidatedModule, batches

from lightrl import LearningCurve
from lightrl.callbacks import progress
from lightrl.callbacks.progress import ModelLines, RolloutProgressBar, num_batches_of_run
from lightrl.callbacks.rollout_metrics import RolloutMetrics
from lightrl.checks.printable import duration_text
from lightrl.testing import make_groups
from lightrl.trainer import Trainer
from lightrl.trajectory import Group


class Terminal(io.StringIO):
    """Keeps all that was written; says it is a terminal."""

    def isatty(self) -> bool:
        return True


def one_group(_: int) -> list[Group]:
    return make_groups([[1.0, 0.0]])


def fit(bar: RolloutProgressBar, *, num_batches: int = 4, validate: bool = False, **settings: Any) -> ScriptedTrainer:
    trainer = ScriptedTrainer(callbacks=[RolloutMetrics(), bar], **settings)
    module = ValidatedModule(one_group) if validate else ScriptedModule(one_group)
    trainer.fit(module, batches(num_batches), batches(1) if validate else None)
    return trainer


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setattr("lightrl.callbacks.progress._REPAINT_S", 0.0)
    return Terminal()


def test_two_lines_show_the_run_and_the_phase(terminal: Terminal) -> None:
    with redirect_stdout(terminal):
        fit(RolloutProgressBar(), max_steps=4)
    frames = terminal.getvalue()
    for part in ("Training: ", "4/4", "reward=0.500", "rollout: ", "update: ", "tokens/s=2", "sync_s=0.250"):
        assert part in frames


def test_the_phase_line_says_for_how_many_slow_groups_it_waits(terminal: Terminal) -> None:
    trainer = ScriptedTrainer(callbacks=[RolloutMetrics(), RolloutProgressBar()], max_steps=1)
    trainer.rollout.progress = lambda: {"skipped_prompts": 0, "stragglers": 2}
    with redirect_stdout(terminal):
        trainer.fit(ScriptedModule(one_group), batches(1))
    assert "rollout, waiting for 2 stragglers: " in terminal.getvalue()


def test_a_line_per_iteration_stays_above_the_bars_and_fits(terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("NO_COLOR", "1")
    with redirect_stdout(terminal):
        fit(RolloutProgressBar(print_every_n_iterations=1), max_steps=3)
    frames = terminal.getvalue().replace("\r", "\n").replace("\x1b[A", "")  # tqdm moves up with it
    lines = [line for line in frames.splitlines() if line.startswith("iteration ")]
    assert [line.split("  ")[0] for line in lines] == ["iteration 1/3", "iteration 2/3", "iteration 3/3"]
    assert all("reward=0.500" in line and len(line) <= 60 for line in lines)


def test_the_run_folder_starts_a_line_of_its_own_after_ctrl_c(terminal: Terminal, tmp_path: Path) -> None:
    def interrupt(iteration: int) -> list[Group]:
        if iteration == 2:
            raise KeyboardInterrupt
        return one_group(iteration)

    callbacks = [RolloutMetrics(), LearningCurve(), RolloutProgressBar()]
    trainer = ScriptedTrainer(callbacks=callbacks, max_steps=4, default_root_dir=tmp_path)
    with redirect_stdout(terminal), pytest.raises(SystemExit):
        trainer.fit(ScriptedModule(interrupt), batches(4))
    lines = terminal.getvalue().replace("\r", "\n").replace("\x1b[A", "").splitlines()
    assert [line for line in lines if "Run folder: " in line] == [f"Run folder: {tmp_path}"]


def test_color_is_for_terminals_that_want_it(terminal, capsys, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with redirect_stdout(terminal):
        fit(RolloutProgressBar(), max_steps=1)
    assert "\x1b[1miteration 1/1" in terminal.getvalue()
    fit(RolloutProgressBar(), max_steps=1)
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        pytest.param({"max_steps": 7}, 7, id="steps over several epochs"),
        pytest.param({"max_epochs": 3}, 12, id="epochs"),
        pytest.param({"max_steps": 7, "max_epochs": 1}, 4, id="whichever comes first"),
    ],
)
def test_the_run_ends_where_the_bar_says(settings: dict[str, int], expected: int) -> None:
    trainer = fit(RolloutProgressBar(), **settings)
    assert num_batches_of_run(trainer) == trainer.global_step == expected


def test_held_out_accuracy_is_shown_once_it_is_known(terminal: Terminal) -> None:
    with redirect_stdout(terminal):
        fit(RolloutProgressBar(), max_steps=8, validate=True, num_sanity_val_steps=0)
    before, after = terminal.getvalue().split("Validation", 1)
    assert "held-out" not in before
    assert "held-out=0.500" in after  # 0.25 + 4 / 16


def test_no_terminal_gives_one_plain_line_every_n_iterations(capsys: pytest.CaptureFixture[str]) -> None:
    fit(RolloutProgressBar(print_every_n_iterations=2), max_steps=6)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0].split(", ")[0] for line in lines] == ["iteration 2/6", "iteration 4/6", "iteration 6/6"]
    assert [" left  reward=" in line for line in lines] == [True, True, False]
    assert "reward=0.500  tokens/s=2.000  " in lines[0]
    assert "\r" not in "".join(lines)


def test_no_terminal_gives_a_line_after_a_minute_of_silence(capsys, monkeypatch):
    monkeypatch.setattr(progress, "_SILENT_S", 0.0)
    fit(RolloutProgressBar(print_every_n_iterations=100), max_steps=3)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0].split(", ")[0] for line in lines] == ["iteration 1/3", "iteration 2/3", "iteration 3/3"]


def test_no_terminal_gives_a_line_of_the_phase_in_which_a_long_iteration_is(capsys, monkeypatch):
    monkeypatch.setattr(progress, "_SILENT_PHASE_S", 0.0)
    fit(RolloutProgressBar(), max_steps=2)
    lines = capsys.readouterr().out.splitlines()
    first = lines[: lines.index(next(line for line in lines if line.startswith("in iteration 2")))]
    assert first == [
        *["in iteration 1, rollout", "in iteration 1, rollout: 1/2", "in iteration 1, rollout: 2/2"],
        *["in iteration 1, scores", "in iteration 1, update: 0/2", "in iteration 1, update: 1/2"],
        *["in iteration 1, update: 1/2", "in iteration 1, update: 2/2", "in iteration 1, weight sync"],
    ]


@pytest.mark.parametrize(("seconds", "text"), [(59.4, "59 s"), (600, "10 min"), (9000, "2.5 h")])
def test_the_time_left_has_the_unit_that_fits(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_no_terminal_gives_one_plain_line_after_each_validation(capsys: pytest.CaptureFixture[str]) -> None:
    fit(RolloutProgressBar(print_every_n_iterations=100), max_steps=4, validate=True, num_sanity_val_steps=1)
    assert "validation after iteration 4  accuracy_fraction=0.500" in capsys.readouterr().out.splitlines()


def test_a_refresh_rate_of_zero_is_silent(capsys: pytest.CaptureFixture[str], terminal: Terminal) -> None:
    with redirect_stdout(terminal):
        fit(RolloutProgressBar(refresh_rate=0), max_steps=2)
    assert terminal.getvalue() == ""
    assert capsys.readouterr().out == ""


def test_a_resumed_run_counts_on_from_where_it_stopped(terminal: Terminal, tmp_path: Path) -> None:
    with redirect_stdout(terminal):
        first = fit(RolloutProgressBar(), max_steps=2)
    first.save_checkpoint(tmp_path / "two.ckpt")
    terminal.truncate(0)
    resumed = ScriptedTrainer(callbacks=[RolloutMetrics(), RolloutProgressBar()], max_epochs=2)
    with redirect_stdout(terminal):
        resumed.fit(ScriptedModule(one_group), batches(2), ckpt_path=tmp_path / "two.ckpt")
    assert "2/4" in terminal.getvalue()
    assert "4/4" in terminal.getvalue()
    assert "1/4" not in terminal.getvalue()


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
