"""ModelLines: what is trained, in a line for each model; Lightning's table has columns that say nothing here."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.model_summary.model_summary import get_human_readable_count


class ModelLines(ModelSummary):
    """Takes the place of Lightning's default summary, whose FLOPs are 0 and whose modes are those that we set.

    policy: Qwen3ForCausalLM, 789 K parameters
    789 K of 789 K parameters are trained, 3.2 MB
    """

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pp = getattr(trainer.strategy, "pp", 1)
        self._summarize_kwargs["of"] = f" in rank 0's of {pp} pipeline stages" if pp > 1 else ""
        super().on_fit_start(trainer, pl_module)

    @staticmethod
    def summarize(
        summary_data: list[tuple[str, list[str]]],
        total_parameters: int,
        trainable_parameters: int,
        model_size: float,
        *_: Any,
        of: str = "",
        **__: Any,
    ) -> None:
        columns = dict(summary_data)
        rows = zip(columns["Name"], columns["Type"], columns["Params"], strict=True)
        # FSDP2 gives a model a class of its own
        lines = [f"{name}: {kind.removeprefix('FSDP')}, {num.strip()} parameters{of}" for name, kind, num in rows]
        trained, total = (
            " ".join(get_human_readable_count(num).split()) for num in (trainable_parameters, total_parameters)
        )
        rank_zero_info("\n".join([*lines, f"{trained} of {total} parameters{of} are trained, {model_size:.1f} MB"]))
