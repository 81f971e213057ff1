"""EvaluationCommand: a program that calls the policy's URL beside training, its results, and how it ends."""

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from tiny_run import Digits, TinyGRPO, make_trainer, train
from waits import comes_true

from lightrl import EvaluationCommand
from lightrl.callbacks import StalenessControl
from lightrl.callbacks.evaluation_command import EvaluationFailed, read_results

IDS = [2, 5, 3, 4, 7]
ASK = [sys.executable, str(Path(__file__).parent / "asks_policy.py"), *map(str, IDS)]


class Evaluated(Callback):
    """What was logged after each iteration, and the logprob of IDS under the trainer's policy then."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []
        self.expected: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        metrics = trainer.callback_metrics.items()
        self.logged.append({name: float(value) for name, value in metrics if name.startswith("eval/")})
        with torch.no_grad():
            logprobs = torch.log_softmax(module.policy(torch.tensor([IDS[:-1]])).logits[0].float(), -1)
        self.expected.append(float(logprobs.gather(1, torch.tensor(IDS[1:])[:, None]).sum()))


def shell(text: str, **settings: Any) -> EvaluationCommand:
    return EvaluationCommand(["sh", "-c", text], **{"every_n_iterations": 1, **settings})


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_command_measures_the_weights_after_its_iteration(tmp_path: Path, max_staleness: int) -> None:
    evaluated = Evaluated()
    callbacks = [StalenessControl(max_staleness), EvaluationCommand(ASK, every_n_iterations=2), evaluated]
    train(tmp_path, max_steps=4, callbacks=callbacks)
    assert evaluated.logged[0] == {}
    for iteration in (2, 4):
        logged = evaluated.logged[iteration - 1]
        assert logged["eval/digits/version"] == iteration
        assert logged["eval/digits/logprob"] == pytest.approx(evaluated.expected[iteration - 1], abs=1e-4)
    assert evaluated.expected[1] != pytest.approx(evaluated.expected[3], abs=1e-4)  # another version differs
    assert {path.name for path in (tmp_path / "evaluations").iterdir()} == {"2", "4"}


@pytest.mark.parametrize(
    ("command", "settings", "problem"),
    [
        ("echo no such task; exit 3", {}, "sh ended with exit code 3.*\n.*no such task"),
        ("kill -9 $$", {}, "sh ended with signal SIGKILL"),
        ("true", {}, "no results as JSON"),
        ("echo '{' > $LIGHTRL_RESULTS/a.json", {}, "a.json is not JSON"),
        ("sleep 600", {"timeout_s": 2}, "did not exit within timeout_s=2"),
    ],
    ids=["exit code", "signal", "nothing", "no JSON", "timeout"],
)
def test_a_command_that_fails_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, command: str, settings: dict[str, Any], problem: str
) -> None:
    trainer = train(tmp_path, max_steps=2, callbacks=[shell(command, every_n_iterations=2, **settings)])
    assert trainer.global_step == 2
    (warning,) = [record for record in caplog.records if "evaluation of weight version 2 failed" in record.message]
    assert re.search(problem, warning.message, re.DOTALL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_of_the_run_ends_the_command_and_its_children(tmp_path: Path, number: signal.Signals) -> None:
    command = shell(f"sleep 600 & echo $$ $! > {tmp_path}/pids; kill -{number.value} {os.getpid()}; wait")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            train(tmp_path, max_steps=3, callbacks=[command])
    finally:
        signal.signal(signal.SIGINT, before)
    pids = list(map(int, (tmp_path / "pids").read_text().split()))
    assert len(pids) == 2
    assert comes_true(lambda: not any(map(psutil.pid_exists, pids)))


def test_a_resumed_run_does_not_repeat_an_evaluation(tmp_path: Path) -> None:
    def command() -> EvaluationCommand:
        text = f"echo $LIGHTRL_RESULTS >> {tmp_path}/calls; echo '{{\"x/y\": 1}}' > $LIGHTRL_RESULTS/a.json"
        return shell(text, every_n_iterations=2)

    module, trainer = TinyGRPO(), make_trainer(tmp_path, max_steps=2, callbacks=[command()])
    trainer.fit(module, datamodule=Digits())
    trainer.save_checkpoint(tmp_path / "2.ckpt")
    train(tmp_path, max_steps=4, callbacks=[command()], ckpt_path=tmp_path / "2.ckpt")
    assert [Path(line).name for line in (tmp_path / "calls").read_text().split()] == ["2", "4"]


def test_a_checkpoint_may_monitor_a_result_that_the_first_iteration_does_not_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TinyGRPO, "__module__", "lightrl.as_if")  # names are checked only without a user's module
    command = shell("echo '{\"x/y\": 1}' > $LIGHTRL_RESULTS/a.json", every_n_iterations=2)
    saving = ModelCheckpoint(tmp_path / "best", monitor="eval/x/y", every_n_train_steps=2)
    train(tmp_path, max_steps=2, callbacks=[command, saving], enable_checkpointing=True)
    assert saving.best_model_score == 1


def test_results_are_those_of_lm_eval_or_plain_numbers(tmp_path: Path) -> None:
    metrics = {"alias": "sums", "sample_len": 9, "acc,none": 0.5, "acc_stderr,none": "N/A", "em,strict-match": 1}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "results_1.json").write_text(json.dumps({"results": {"sums": metrics}, "config": {}}))
    (tmp_path / "plain.json").write_text(json.dumps({"a/b": 2}))
    assert read_results(tmp_path) == {"sums/acc": 0.5, "sums/em_strict-match": 1.0, "a/b": 2.0}
    (tmp_path / "plain.json").write_text('{"a": NaN}')
    with pytest.raises(EvaluationFailed, match="finite numbers"):
        read_results(tmp_path)


def test_wrong_settings_are_named_before_a_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="command must be a list"):
        EvaluationCommand("lm-eval run", every_n_iterations=1)
    with pytest.raises(ValueError, match="'no-such-program' must be a program on PATH"):
        train(tmp_path, callbacks=[EvaluationCommand(["no-such-program"], every_n_iterations=1)])
