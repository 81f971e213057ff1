"""RunCost: the device hours that a run has used, and their price, in total and per million trained tokens."""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING

from lightrl.callbacks.rl_callback import RLCallback
from lightrl.checks.bounds import check_bounds

if TYPE_CHECKING:
    import lightning as L

    from lightrl.experience import Experience
    from lightrl.module import RLModule
    from lightrl.rollout.rl_trainer import RLTrainer
    from lightrl.trajectory import JsonMapping, JsonObject

log = logging.getLogger(__name__)


class RunCost(RLCallback):
    """Logs the device hours and the price of a run so far, and prints them at the end of `fit`.

    `cost/device_hours` is the time since `fit` began × the number of devices. `cost/trained_tokens` counts each loss
    token in each iteration once, however many update epochs read it. With a price, it also logs
    `cost/price` and `cost/price_per_million_tokens` (trained tokens), in the price's currency. A resumed run continues
    from the checkpoint's figures, without the interrupted run's later hours and tokens.

    Args:
        price_per_device_hour: price of one device, in any currency; None logs only hours and tokens.
        num_devices: number of devices to pay for. By default the GPUs of the trainer's ranks or, on CPUs, this
            machine's cores × `num_nodes`. Set it if rollout servers have their own devices.
    """

    def __init__(self, price_per_device_hour: float | None = None, *, num_devices: int | None = None) -> None:
        check_bounds(0, price_per_device_hour=price_per_device_hour)
        check_bounds(1, num_devices=num_devices)
        self.price_per_device_hour = price_per_device_hour
        self.num_devices = num_devices
        self._hours_before = 0.0  # device hours of the fits that this one continues
        self._num_tokens = 0
        self._started_s: float | None = None  # monotonic clock
        self._num_paid = 1

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        from lightning.pytorch.accelerators import CPUAccelerator

        is_cpu = isinstance(trainer.accelerator, CPUAccelerator)
        counted = (os.cpu_count() or 1) * trainer.num_nodes if is_cpu else trainer.world_size
        self._num_paid, self._started_s = self.num_devices or counted, time.monotonic()

    def on_experience_ready(self, trainer: RLTrainer, module: RLModule, experience: Experience) -> None:
        self._num_tokens += experience.num_loss_tokens

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        for name, value in self.values().items():
            pl_module.log(name, value, on_step=True, on_epoch=False)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._stop()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._stop()
        values = self.values()
        if trainer.is_global_zero:
            price = f", price {values['cost/price']:.2f}" if "cost/price" in values else ""
            hours, num = values["cost/device_hours"], values["cost/trained_tokens"]
            log.info("The run used %.3g device hours for %.3g trained tokens%s.", hours, num, price)

    def values(self) -> dict[str, float]:
        hours = self._hours_before
        if self._started_s is not None:
            hours += (time.monotonic() - self._started_s) / 3600 * self._num_paid
        costs = {"cost/device_hours": hours, "cost/trained_tokens": float(self._num_tokens)}
        if self.price_per_device_hour is not None:
            costs["cost/price"] = hours * self.price_per_device_hour
            if self._num_tokens:
                costs["cost/price_per_million_tokens"] = costs["cost/price"] / self._num_tokens * 1e6
        return costs

    def _stop(self) -> None:
        """Stops the clock; a later `fit` adds its own time."""
        self._hours_before, self._started_s = self.values()["cost/device_hours"], None

    def state_dict(self) -> JsonObject:
        return {"device_hours": self.values()["cost/device_hours"], "trained_tokens": self._num_tokens}

    def load_state_dict(self, state_dict: JsonMapping) -> None:
        self._hours_before, self._num_tokens = state_dict["device_hours"], state_dict["trained_tokens"]
