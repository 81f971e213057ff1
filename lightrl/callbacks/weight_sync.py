"""WeightSync: brings the trainer's weights to the engine, so that rollouts come from the policy that is trained."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, cast

from lightrl.callbacks.lag_probe import LagProbe
from lightrl.callbacks.probe import Probe
from lightrl.callbacks.rank_shares import RankShares
from lightrl.callbacks.rl_callback import RLCallback
from lightrl.checks.bounds import check_effect
from lightrl.errors import EngineTimeout, WeightSyncError, WeightSyncUndone
from lightrl.module import RLModule
from lightrl.rollout import Rollout
from lightrl.rollout.rl_trainer import RLTrainer
from lightrl.strategies import Ranks, ranks_of
from lightrl.weights import Bucket, HostCopy

if TYPE_CHECKING:
    import lightning as L

    from lightrl.trajectory import Group
from collections.abc import Sequence

import torch
from torch import Tensor

from lightrl.engines.abilities import SharesDevices

log = logging.getLogger(__name__)

# Engine and trainer on the same devices: each has the memory while it works.
#
#     rollouts      engine: weights, key-values         optimizer state in host memory
#     update        engine: nothing                     optimizer state on the device
#     sync          engine: weights, then key-values    optimizer state in host memory
#
# WeightSync calls this; without a colocated engine nothing happens.


def colocated_engine(trainer: RLTrainer) -> SharesDevices | None:
    """The engine, if it is in use and on the trainer's devices; every rank has the settings, rank 0 the processes."""
    engine: object = trainer.engine
    if trainer.rollout.is_recorded or not isinstance(engine, SharesDevices) or engine.placement == "separate":
        return None
    return engine


def to_trainer(trainer: RLTrainer) -> None:
    """Before the update: the engine releases its memory, then the optimizer's state comes to the device."""
    engine, ranks = colocated_engine(trainer), ranks_of(trainer.strategy)
    if engine is None:
        return
    with ranks.own_deadline():
        if ranks.is_main:
            engine.make_room()
        ranks.broadcast_json(None)  # no rank takes memory before the engine has released it
    move_optimizer_state(trainer.optimizers, trainer.strategy.root_device)


def to_engine(trainer: RLTrainer) -> None:
    """After the update, before the load: the optimizer's state goes to host memory."""
    if colocated_engine(trainer) is None:
        return
    device = trainer.strategy.root_device
    move_optimizer_state(trainer.optimizers, torch.device("cpu"))
    if device.type == "cuda":
        torch.cuda.empty_cache()


@torch.no_grad()
def move_optimizer_state(optimizers: Sequence[torch.optim.Optimizer], device: torch.device) -> int:
    """Moves the state that has a parameter's shape, in place, and returns its bytes. Step counters stay."""
    num_bytes = 0
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for value in state.values():
                if isinstance(value, Tensor) and value.shape == parameter.shape and value.dim() > 0:
                    local = value.to_local() if hasattr(value, "to_local") else value  # of this rank, sharded or whole
                    local.data = local.data.to(device)
                    num_bytes += local.numel() * local.element_size()
    return num_bytes


class WeightSync(RLCallback):
    """Exports the policy after an iteration and loads it into the engine, under the next weight version.

    The engine samples, the trainer learns; each has weights of its own. A weight version numbers what the engine holds:
    version k is the policy after k iterations, and every token carries the version that sampled it. The present version
    is loaded before the first request, also after a resume and before sanity check, validate, test and predict.

    The engine checks names, shapes and values, and keeps the old weights if something is wrong. After each sync trainer
    and engine score a probe, a few fixed sequences of random tokens. `sync/probe_abs_dlogp_nats`, their mean difference
    (the largest of all replicas), has a bound; see probe.py. One wrong replica of several is dropped and gets the
    weights again, otherwise the run stops. LocalEngine, to which weights are copied in memory, is probed after every
    tenth sync. `sync/verified_fraction` is the share of replicas whose digests are the trainer's; an engine without
    digests does not log it. The first sync logs which checks there are. A sync that fails is tried once more if the
    engine serves the version before.

    Two things keep behavior and present logprobs apart, and `policy/kl_behavior_nats` measures both together. The
    engine's numbers: `sync/mismatch_*` compares the trained tokens of the present version, with the logprobs that the
    engine gave when it sampled, in an iteration's first minibatch; without such tokens, as when each group waits its η
    versions, the probe remains. `sync/mismatch_present_abs_dlogp_nats` is over trajectories of the present version
    alone and has a bound too, and the largest difference another: they show stale caches, and restarts between syncs.
    The policy's lag: `policy/lag_*`, by the trainer's numbers alone; see lag_probe.py.

    An engine with `placement: colocated` releases its memory before each update, and the optimizer's state is in host
    memory while the engine generates.

    Args:
        every_n_iterations: above 1 the engine lags behind on purpose; `StalenessControl.max_staleness` must be at least
            `every_n_iterations - 1`.
        bucket_mib: size of the parts in which parameters travel, in MiB.
        blocking: False copies the parameters to host memory (one more model there) and lets the trainer continue while
            the engine loads them. The next sync waits for this one; an error ends the run at the next wait or sync.
        probe: how many sequences are scored after each sync, 0 for none.
        probe_tokens: length of each.
        max_probe_nats: allowed mean difference; None is about 3e-5 in float32 and 0.2 in bfloat16; see probe.py.
        sync_timeout_s: how long the next sync, or the end of the run, waits for one that does not block.
    """

    def __init__(
        self,
        every_n_iterations: int = 1,
        bucket_mib: int = 256,
        blocking: bool = True,
        probe: int = 2,
        probe_tokens: int = 32,
        max_probe_nats: float | None = None,
        sync_timeout_s: float = 1800.0,
    ) -> None:
        for name, value in (("every_n_iterations", every_n_iterations), ("bucket_mib", bucket_mib)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        if not 0 <= probe <= 4:
            raise ValueError(f"probe must be 0 to 4 sequences, got {probe}.")
        if probe_tokens < 2:
            raise ValueError(f"probe_tokens must be at least 2, got {probe_tokens}: the first token has no logprob.")
        if max_probe_nats is not None and max_probe_nats <= 0:
            raise ValueError(f"max_probe_nats must be above 0 or None, got {max_probe_nats}.")
        if probe == 0:
            check_effect("with probe=0", max_probe_nats=(max_probe_nats, None), probe_tokens=(probe_tokens, 32))
        if blocking:
            check_effect("with blocking=True", sync_timeout_s=(sync_timeout_s, 1800.0))
        self.blocking = blocking
        self.sync_timeout_s = sync_timeout_s
        self._copy = HostCopy()
        self._shares = RankShares()
        self._load: _BackgroundLoad | None = None
        self._acknowledged_version = -1
        self._probe = Probe(probe, probe_tokens, max_probe_nats)
        self._lag = LagProbe()
        self._metrics: dict[str, float] = {}  # of the last sync, until they are logged
        self.every_n_iterations = every_n_iterations
        self.bucket_bytes = bucket_mib * 2**20
        self.last_sync_s = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._ensure(trainer, pl_module)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._ensure(trainer, pl_module)

    on_sanity_check_start = on_test_start = on_predict_start = on_validation_start

    def on_policy_updated(self, trainer: RLTrainer, module: RLModule, weight_version: int) -> None:
        to_engine(trainer)
        module.log_dict(self._lag.measure(trainer, module, weight_version))
        if weight_version % self.every_n_iterations == 0:
            self._sync(trainer, module, weight_version)
            module.log_dict(self._metrics)
            self._metrics = {}

    def on_rollout_start(self, trainer: RLTrainer, module: RLModule) -> None:
        """Waits for a load in the background if the staleness bound requires it; the same on every rank."""
        if self._load is None:
            return
        if trainer.weight_version - self._acknowledged_version > trainer.rollout.settings.max_staleness:
            self._finish(trainer, module)

    def on_rollout_end(self, trainer: RLTrainer, module: RLModule, groups: list[Group]) -> None:
        to_trainer(trainer)
        self._lag.offer(trainer, groups)

    def on_rollout_progress(self, trainer: RLTrainer, module: RLModule, done: int, total: int) -> None:
        if self._load is not None and self._load.error is not None:
            raise self._load.error

    def on_minibatch_end(
        self, trainer: RLTrainer, module: RLModule, metrics: dict[str, float], index: int, total: int
    ) -> None:
        if index == 0:
            self._probe.check_mismatch(metrics)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._finish(cast("RLTrainer", trainer), cast("RLModule", pl_module))

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._load = None  # a thread that still loads ends with the engine
        self._probe.reset()
        self._lag = LagProbe()

    def _ensure(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Loads the present version unless the engine has it: validation measures the policy as it is now."""
        if not isinstance(module, RLModule):
            return
        rl_trainer = cast("RLTrainer", trainer)
        self._finish(rl_trainer, module)
        if rl_trainer.rollout.engine.weight_version != rl_trainer.weight_version:
            self._sync(rl_trainer, module, rl_trainer.weight_version)
            self._finish(rl_trainer, module)

    def _sync(self, trainer: RLTrainer, module: RLModule, weight_version: int) -> None:
        self._finish(trainer, module)
        start = time.perf_counter()
        scores = self._probe.trainer_side(trainer, module, weight_version)
        ranks = ranks_of(trainer.strategy)

        def buckets() -> Iterator[Bucket]:
            shares = self._shares.buckets(trainer, module, self.bucket_bytes, is_blocking=self.blocking)
            return _gathered(shares, ranks)

        if self.blocking:
            with ranks.own_deadline():  # the engine's
                _load(trainer.rollout, buckets, weight_version)
                self._acknowledge(trainer, module, weight_version, scores)
        else:
            self._load = _BackgroundLoad(weight_version, scores)
            self._load.start(trainer.rollout.local if ranks.is_main else None, self._copy, buckets())
        self.last_sync_s = time.perf_counter() - start

    def _finish(self, trainer: RLTrainer, module: RLModule) -> None:
        """Waits for the load in the background, if there is one; every rank raises its error here."""
        load, self._load = self._load, None
        if load is None:
            return
        ranks = ranks_of(trainer.strategy)
        with ranks.own_deadline():
            error = load.wait(self.sync_timeout_s)
            message = ranks.broadcast_json(None if error is None else str(error))
        if error is not None:
            raise error
        if message is not None:
            raise WeightSyncError(f"Rank 0 raised: {message}")
        self._acknowledge(trainer, module, load.weight_version, load.scores)

    def _acknowledge(
        self, trainer: RLTrainer, module: RLModule, weight_version: int, scores: list[list[float]] | None
    ) -> None:
        """The engine has the version: probes it and calls the hook."""
        self._acknowledged_version = weight_version
        self._metrics = self._probe.compare(trainer, module, scores)
        trainer.call_rl_hook("on_weights_synced", weight_version)


def _load(rollout: Rollout, buckets: Callable[[], Iterable[Bucket]], weight_version: int) -> None:
    """Loads a version; once more if the engine failed and serves the one before: one lost answer ends no run."""
    try:
        rollout.load_weights(buckets(), weight_version=weight_version)
    except WeightSyncUndone as error:
        log.warning("Trying the same weight sync once more: %s", error)
        rollout.load_weights(buckets(), weight_version=weight_version)


def _gathered(buckets: Iterable[Bucket], ranks: Ranks) -> Iterator[Bucket]:
    """The buckets; the ranks watch each other while they gather one, not while the engine takes it."""
    iterator = iter(buckets)
    while True:
        with ranks.own_deadline(False):
            bucket = next(iterator, None)
        if bucket is None:
            return
        yield bucket
        del bucket  # else it stays alive while the next is gathered


class _BackgroundLoad:
    """A version on its way to the engine while the trainer continues."""

    def __init__(self, weight_version: int, scores: list[list[float]] | None) -> None:
        self.weight_version = weight_version
        self.scores = scores  # the trainer's side of the probe, under these weights
        self.error: BaseException | None = None  # that the load has raised
        self._thread: threading.Thread | None = None

    def start(self, rollout: Rollout | None, copy: HostCopy, buckets: Iterable[Bucket]) -> None:
        """Copies the parameters, on all ranks together; then the one with the rollout starts to load the copy."""
        if rollout is None:
            for _ in buckets:
                pass
            return
        copies = copy.take(buckets, self.weight_version)

        def load() -> None:
            try:
                _load(rollout, lambda: copies, self.weight_version)
            except BaseException as error:  # noqa: BLE001  # nobody is above it in this thread; `wait` hands it over
                self.error = error

        self._thread = threading.Thread(target=load, name="lightrl-weight-load", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> BaseException | None:
        """Returns when the engine has acknowledged: the error of the load, if it has one."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return EngineTimeout(
                    f"The engine did not acknowledge weight version {self.weight_version} within sync_timeout_s="
                    f"{timeout_s:g}. Check its servers, or increase WeightSync.sync_timeout_s."
                )
        return self.error
