"""Runs on data that is read while it is used: to the bit as from the start of the run, wherever they resume."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny_run import POLICY, TinyGRPO, are_equal, make_trainer, train, weights

import lightrl
from lightrl import FakeEngine, PromptDataModule, SFTDataModule, StalenessControl
from lightrl.data import DataSource


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Three shards of five rows."""
    (tmp_path / "rows").mkdir()
    for shard in range(3):
        rows = [{"question": f"{shard} {place}", "answer": f"{place}"} for place in range(5)]
        (tmp_path / f"rows/{shard}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / "rows/*.jsonl")


def data(path: str, kind: type = PromptDataModule, *, streaming: bool = True, **settings: Any) -> Any:
    source = DataSource(path, streaming=True, shuffle_buffer=4) if streaming else path
    return kind(source, **({"batch_size": 2, "seed": 1} | settings))


def fit(folder: Path, module: Any, rows: Any, resume: Path | None = None, **flags: Any) -> Any:
    save = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    flags["callbacks"] = [*flags.get("callbacks", []), *([] if resume else [save])]
    train(folder, module, rows, ckpt_path=resume, enable_checkpointing=True, **flags)
    return module


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_resumed_run_continues_at_the_next_row(folder: str, tmp_path: Path, max_staleness: int) -> None:
    def run(resume: Path | None = None) -> Any:
        flags: dict[str, Any] = {"engine": FakeEngine(), "callbacks": [StalenessControl(max_staleness)]}
        return fit(tmp_path, TinyGRPO(), data(folder), resume, max_steps=9, **flags)

    whole = run()
    for iteration in (1, 4, 8):
        resumed = run(tmp_path / f"step={iteration}.ckpt")
        assert resumed.trained == whole.trained[iteration:]
        state = torch.load(tmp_path / f"step={iteration}.ckpt", weights_only=True)
        rollout = state["loops"]["fit_loop"]["epoch_loop.automatic_optimization.state_dict"]["rollout"]
        lowest = min([rollout["next_position"], *rollout["in_flight"]])
        assert lowest - 4 < rollout["stream"]["0"]["number"] <= lowest
        if not max_staleness:
            assert are_equal(weights(resumed), weights(whole))


@pytest.mark.parametrize("streaming", [True, False])
def test_sft_resumes_at_the_next_row_too(folder, tmp_path, streaming, monkeypatch):
    monkeypatch.setattr("lightrl.data.prompts.MAX_CHECKED", 3)
    monkeypatch.setattr("lightrl.data.completions.BATCHES", 3)
    source = folder if streaming else folder.replace("*", "0")

    def run(resume: Path | None = None) -> Any:
        module = lightrl.SFT(POLICY, lr=0.05, lr_decay="constant")
        return fit(tmp_path, module, data(source, SFTDataModule, streaming=streaming), resume, max_steps=11)

    whole = run()
    for iteration in (2, 3, 7):
        assert are_equal(weights(run(tmp_path / f"step={iteration}.ckpt")), weights(whole))


def test_a_run_without_an_end_is_refused(folder: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"The number of rows in streamed data is unknown.*Set trainer.max_steps, or"):
        make_trainer(tmp_path, max_epochs=1).fit(TinyGRPO(), datamodule=data(folder))


def test_limits_of_the_trainer_make_epochs(folder: str, tmp_path: Path) -> None:
    module = fit(tmp_path, TinyGRPO(), data(folder), max_epochs=2, limit_train_batches=4, engine=FakeEngine())
    assert module.trained == [[2 * iteration, 2 * iteration + 1] for iteration in range(8)]


def test_a_bad_row_ends_the_run_with_its_name(tmp_path: Path) -> None:
    rows = [{"question": "1 2", "answer": "1"}] * 300
    rows[290] = {"question": " ", "answer": "1"}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = str(tmp_path / "rows.jsonl")
    with pytest.raises(
        lightrl.errors.RolloutError, match=r"Prompt 290 .*Line 291 of .* has an empty column 'question'"
    ):
        fit(tmp_path, TinyGRPO(), data(source, shuffle=False, batch_size=50), max_steps=6, engine=FakeEngine())
