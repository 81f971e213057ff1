"""A GPU out of memory, in words: in which phase, with which sizes, what was estimated, and what to set."""

from __future__ import annotations

from typing import Any

import torch

from lightrl.errors import TrainingError
from lightrl.loops.rollout_loop import RolloutLoop
from lightrl.rollout.rl_trainer import RLTrainer

_ENGINE = "trainer.engine's max_batch or prefill_tokens (SGLang: mem_fraction_static)"
_CHECKPOINTS = "set activation_checkpointing of trainer.strategy (FSDP2Strategy) to true"


def out_of_memory(error: torch.OutOfMemoryError, trainer: RLTrainer, loop: RolloutLoop, module: Any) -> TrainingError:
    """What to raise instead.

    Args:
        loop: knows phase and sizes.
        module: the run's.
    """
    phase, sizes = loop.phase, loop.sizes
    tokens = getattr(module, "microbatch_tokens", None)
    smaller = "data.batch_size" if tokens is None else f"model.microbatch_tokens (now {tokens})"
    advice = {
        "rollout": f"Lower {_ENGINE}, or model.microbatch_tokens, which leaves the engine more.",
        "sync": f"Lower {_ENGINE}, or bucket_mib of WeightSync.",
        "start": "Use more devices with trainer.strategy: FSDP2Strategy, or a smaller model.",
    }.get(phase, f"Lower {smaller}, or {_CHECKPOINTS}.")
    text = " ".join(str(error).split()).partition(" If reserved but")[0]
    return TrainingError(
        f"Rank {trainer.global_rank} ran out of GPU memory in {phase!r}{f', with {sizes}' if sizes else ''}. {advice} "
        f"{trainer.memory_estimate} Torch says: {text}"
    )
