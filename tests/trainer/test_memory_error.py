"""A device out of memory says in which phase, with which sizes, and which settings to change."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import Digits, TinyGRPO, make_trainer

from lightrl import LocalEngine
from lightrl.errors import EngineError, TrainingError

TORCH = "CUDA out of memory. Tried to allocate 18.55 GiB. GPU 0 has 2.10 GiB free. If reserved but unallocated, see ..."


def run_out(*args: Any, **kwargs: Any) -> Any:
    raise torch.OutOfMemoryError(TORCH)


@pytest.mark.parametrize(
    ("hook", "phase", "settings"),
    [
        (
            "loss",
            "update",
            r"model\.microbatch_tokens \(now \d+\), or set activation_checkpointing in trainer\.strategy",
        ),
        ("advantages", "score", r"model\.microbatch_tokens \(now \d+\), or set activation_checkpointing"),
    ],
)
def test_a_phase_out_of_memory_is_named_with_its_sizes_and_settings(
    hook: str, phase: str, settings: str, tmp_path: Path
) -> None:
    module, trainer = TinyGRPO(), make_trainer(tmp_path)
    trainer.memory_estimate = "Estimated memory per rank: 61.0 GB."
    setattr(module, hook, run_out)
    with pytest.raises(TrainingError) as caught:
        trainer.fit(module, datamodule=Digits())
    text = str(caught.value)
    assert f"Rank 0 ran out of GPU memory in '{phase}', with 8 trajectories of at most" in text
    assert re.search(settings, text)
    assert "Estimated memory per rank: 61.0 GB" in text
    assert text.endswith("Tried to allocate 18.55 GiB. GPU 0 has 2.10 GiB free.")


def test_models_that_do_not_fit_ask_for_more_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = TinyGRPO()
    monkeypatch.setattr(module, "configure_model", run_out)
    with pytest.raises(TrainingError, match=r"in 'start'\. Use more devices with trainer\.strategy: FSDP2Strategy"):
        make_trainer(tmp_path).fit(module, datamodule=Digits())


def test_an_engine_out_of_memory_names_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightrl.engines.local.running_batch.sample_tokens", run_out)
    with pytest.raises(EngineError, match=r"18\.55 GiB.*Lower LocalEngine.s max_batch or prefill_tokens"):
        make_trainer(tmp_path, engine=LocalEngine()).fit(TinyGRPO(), datamodule=Digits())
