"""WeightSync: brings the trainer's weights to the engine, so that rollouts come from the policy that is trained."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from lightrl.callbacks.rl_callback import RLCallback

if TYPE_CHECKING:
    import lightning as L


class WeightSync(RLCallback):
    """Exports the policy and loads it into the engine after an iteration, under the next weight version.

    The engine samples, the trainer learns; each has weights of its own. A weight version numbers what the engine holds:
    version k is the policy after k iterations, and every token carries the version that sampled it. The present version
    is loaded before the first request, also after a resume and before sanity check, validate, test and predict.

    The engine checks names, shapes and values and keeps the old weights if something is wrong. That it then says the
    same logprobs as the trainer is not probed at each sync; `policy/kl_behavior_nats` on-policy would show it.

    Args:
        every_n_iterations: above 1 the engine lags behind on purpose; `StalenessControl.max_staleness` must be at least
            `every_n_iterations - 1`.
        bucket_mib: size of the parts in which parameters travel, in MiB.
    """

    def __init__(self, every_n_iterations: int = 1, bucket_mib: int = 256) -> None:
        for name, value in (("every_n_iterations", every_n_iterations), ("bucket_mib", bucket_mib)):
            if value < 1:
                raise ValueError(f"{name}={value}, expected at least 1. Raise it.")
        self.every_n_iterations = every_n_iterations
        self.bucket_bytes = bucket_mib * 2**20
        self.last_sync_s = 0.0

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._ensure(trainer, pl_module)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._ensure(trainer, pl_module)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._ensure(trainer, pl_module)

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._ensure(trainer, pl_module)

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._ensure(trainer, pl_module)

    def on_policy_updated(self, trainer: L.Trainer, module: L.LightningModule, weight_version: int) -> None:
        if weight_version % self.every_n_iterations == 0:
            self._sync(trainer, module, weight_version)

    def _ensure(self, trainer: Any, module: Any) -> None:
        """Loads the present version unless the engine has it: validation measures the policy as it is now."""
        rollout = getattr(trainer, "rollout", None)
        if rollout is not None and rollout.engine.weight_version != trainer.weight_version:
            self._sync(trainer, module, trainer.weight_version)

    def _sync(self, trainer: Any, module: Any, weight_version: int) -> None:
        start = time.perf_counter()
        buckets = module.parallel_models["policy"].full_parameters(self.bucket_bytes)
        trainer.rollout.load_weights(buckets, weight_version=weight_version)
        self.last_sync_s = time.perf_counter() - start
        trainer.call_rl_hook("on_weights_synced", weight_version)
