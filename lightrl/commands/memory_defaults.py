"""Settings that a GPU's memory decides where the user has not: `lightrl fit` takes them from the one cost model.

Activation checkpointing, `microbatch_tokens`, the key-values of a LocalEngine on the trainer's GPU, and SGLang's
`mem_fraction_static` on GPUs that it shares with the trainer. Each is printed at the start.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from lightrl.commands.plan_run import planned
from lightrl.engines import LocalEngine, SGLangEngine
from lightrl.launch.memory import key_value_room, memory_line, served_fraction, suited
from lightrl.strategies import FSDP2Strategy
from lightrl.trainer import Trainer

log = logging.getLogger(__name__)


def use_estimate(module: Any, trainer: Trainer, data: Any, device_bytes: float, given: Collection[str]) -> None:
    """Sets what the user left open, before anything is on a device.

    Args:
        device_bytes: of a GPU.
        given: the paths of what the user wrote, such as `model.init_args.lr`.
    """
    strategy, engine = trainer.strategy, trainer.engine
    names = {path.rpartition(".")[2] for path in given}
    may_checkpoint = isinstance(strategy, FSDP2Strategy) and "activation_checkpointing" not in names
    may_cut = hasattr(module, "microbatch_tokens") and "microbatch_tokens" not in names
    try:
        run = planned(module, trainer, data)
    except ValueError as error:  # a model whose sizes are not known
        log.info("%s", error)
        return
    if run is None:
        return
    run = suited(run, device_bytes, may_checkpoint=may_checkpoint, may_cut=may_cut)
    trainer.memory_estimate = memory_line(run)
    chosen = {}
    if isinstance(strategy, FSDP2Strategy) and run.checkpoint_activations != strategy.activation_checkpointing:
        strategy.activation_checkpointing = run.checkpoint_activations
        chosen["trainer.strategy's activation_checkpointing"] = "true"
    if may_cut and run.microbatch_tokens != module.microbatch_tokens:
        module.microbatch_tokens = run.microbatch_tokens
        chosen["model.microbatch_tokens"] = str(run.microbatch_tokens)
    if run.engine is not None and run.engine.place == "rank 0":
        if engine is None:
            engine = trainer.engine = LocalEngine()
        if isinstance(engine, LocalEngine):
            engine.key_value_bytes = key_value_room(run, device_bytes)
    if isinstance(engine, SGLangEngine) and engine.num_servers and engine.placement == "colocated":
        fraction = served_fraction(run, device_bytes)
        if engine.server_args.setdefault("mem_fraction_static", fraction) == fraction:
            chosen["trainer.engine's mem_fraction_static"] = f"{fraction:.2f}"
    settings = "".join(f" {name} is {value}, as nothing else is set." for name, value in chosen.items())
    log.info("%s%s", trainer.memory_estimate, settings)
