"""WeightSync: brings the trainer's weights to the engine, so that rollouts come from the policy that is trained."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from lightrl.callbacks import colocation, probe
from lightrl.callbacks.rl_callback import RLCallback
from lightrl.errors import EngineTimeout, WeightSyncError
from lightrl.strategies import ranks_of
from lightrl.weights import HostCopy

if TYPE_CHECKING:
    import lightning as L

    from lightrl.trajectory import Group

log = logging.getLogger(__name__)
MISMATCH = {  # metrics of the first minibatch, on-policy: the same weights in trainer and engine
    "kl_behavior_nats": "sync/mismatch_k3_nats",
    "behavior_abs_dlogp_nats": "sync/mismatch_abs_dlogp_nats",
    "max_behavior_abs_dlogp_nats": "sync/mismatch_max_abs_dlogp_nats",
}


class WeightSync(RLCallback):
    """Exports the policy and loads it into the engine after an iteration, under the next weight version.

    The engine samples, the trainer learns; each has weights of its own. A weight version numbers what the engine holds:
    version k is the policy after k iterations, and every token carries the version that sampled it. The present version
    is loaded before the first request, also after a resume and before sanity check, validate, test and predict.

    The engine checks names, shapes and values and keeps the old weights if something is wrong. After each sync a probe,
    a few fixed sequences of random tokens, is scored by trainer and engine: `sync/probe_abs_dlogp_nats`, their mean
    difference, and beyond `max_probe_nats` the run stops. LocalEngine, to which weights are copied in memory, is probed
    after each tenth; an engine without `score` is not, which is said once. On the trained tokens themselves
    `sync/mismatch_*` shows the difference to what the engine said when it sampled, of an iteration's first minibatch;
    with older tokens among them it holds the policy's change as well.

    An engine with `placement: colocated` gives its memory back before each update, and the optimizer's state lies in
    host memory while it generates; see colocation.py.

    Args:
        every_n_iterations: above 1 the engine lags behind on purpose; `StalenessControl.max_staleness` must be at least
            `every_n_iterations - 1`.
        bucket_mib: size of the parts in which parameters travel, in MiB.
        blocking: False copies the parameters to host memory (one more model there) and lets the trainer go on while the
            engine loads them. The next sync waits for this one; an error ends the run at the next wait or sync.
        probe: how many sequences are scored after each sync, 0 for none.
        probe_tokens: of each.
        max_probe_nats: mean difference that is allowed; None is 1e-3 for float32 on both sides, 0.2 otherwise.
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
                raise ValueError(f"{name}={value}, expected at least 1. Raise it.")
        if not 0 <= probe <= 4:
            raise ValueError(f"probe={probe}, expected 0 to 4 sequences. Lower it.")
        if probe_tokens < 2:
            raise ValueError(f"probe_tokens={probe_tokens}, expected at least 2: the first has no logprob. Raise it.")
        if max_probe_nats is not None and max_probe_nats <= 0:
            raise ValueError(f"max_probe_nats={max_probe_nats}, expected more than 0, or None. Raise it.")
        self.blocking = blocking
        self.num_probes = probe
        self.probe_tokens = probe_tokens
        self.max_probe_nats = max_probe_nats
        self.sync_timeout_s = sync_timeout_s
        self._copy = HostCopy()
        self._load: _BackgroundLoad | None = None
        self._acknowledged_version = -1
        self._has_said_unprobed = False
        self.last_probe_nats: float | None = None
        self.every_n_iterations = every_n_iterations
        self.bucket_bytes = bucket_mib * 2**20
        self.last_sync_s = 0.0

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._ensure(trainer, pl_module)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if hasattr(getattr(trainer, "rollout", None), "engine"):
            colocation.check(trainer)
        self._ensure(trainer, pl_module)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._ensure(trainer, pl_module)

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._ensure(trainer, pl_module)

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._ensure(trainer, pl_module)

    def on_policy_updated(self, trainer: L.Trainer, module: L.LightningModule, weight_version: int) -> None:
        colocation.to_engine(trainer)
        if weight_version % self.every_n_iterations == 0:
            self._sync(trainer, module, weight_version)
            if self.last_probe_nats is not None:
                module.log("sync/probe_abs_dlogp_nats", self.last_probe_nats)
                self.last_probe_nats = None

    def on_rollout_start(self, trainer: Any, module: L.LightningModule) -> None:
        """Waits for a load in the background where the staleness bound wants it; the same on every rank."""
        if self._load is None:
            return
        if trainer.weight_version - self._acknowledged_version > trainer.rollout.settings.max_staleness:
            self._finish(trainer, module)

    def on_rollout_end(self, trainer: L.Trainer, module: L.LightningModule, groups: list[Group]) -> None:
        colocation.to_trainer(trainer)

    def on_rollout_progress(self, trainer: L.Trainer, module: L.LightningModule, done: int, total: int) -> None:
        if self._load is not None and self._load.has_failed:
            self._load.wait(self.sync_timeout_s)

    def on_minibatch_end(
        self, trainer: L.Trainer, module: L.LightningModule, metrics: dict[str, float], index: int, total: int
    ) -> None:
        if index == 0:
            module.log_dict({name: metrics[key] for key, name in MISMATCH.items() if key in metrics})

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._finish(trainer, pl_module)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._load = None  # a thread that still loads ends with the engine

    def _ensure(self, trainer: Any, module: Any) -> None:
        """Loads the present version unless the engine has it: validation measures the policy as it is now."""
        rollout: Any = getattr(trainer, "rollout", None)
        if not hasattr(rollout, "engine"):
            return
        self._finish(trainer, module)
        if rollout.engine.weight_version != trainer.weight_version:
            self._sync(trainer, module, trainer.weight_version)
            self._finish(trainer, module)

    def _sync(self, trainer: Any, module: Any, weight_version: int) -> None:
        self._finish(trainer, module)
        start = time.perf_counter()
        scores = self._score(trainer, module, weight_version)
        buckets = module.parallel_models["policy"].full_parameters(self.bucket_bytes)
        if self.blocking:
            trainer.rollout.load_weights(buckets, weight_version=weight_version)
            self._acknowledge(trainer, module, weight_version, scores)
        else:
            load = _BackgroundLoad(trainer.rollout, self._copy, weight_version, scores)
            load.export(buckets, is_main=ranks_of(trainer.strategy).is_main)
            self._load = load
        self.last_sync_s = time.perf_counter() - start

    def _finish(self, trainer: Any, module: Any) -> None:
        """Waits for the load in the background, if there is one; its error is raised here, on every rank."""
        load, self._load = self._load, None
        if load is None:
            return
        problem: BaseException | None = None
        try:
            load.wait(self.sync_timeout_s)
        except Exception as error:  # noqa: BLE001  # raised again below, after the other ranks know
            problem = error
        text = ranks_of(trainer.strategy).broadcast_json(None if problem is None else str(problem))
        if problem is not None:
            raise problem
        if text is not None:
            raise WeightSyncError(f"Rank 0 raised: {text}")
        self._acknowledge(trainer, module, load.weight_version, load.scores)

    def _acknowledge(self, trainer: Any, module: Any, weight_version: int, scores: list[list[float]] | None) -> None:
        """The engine has the version: probes it, and tells everybody."""
        self._acknowledged_version = weight_version
        if scores is not None:
            self._probe(trainer, module, scores)
        trainer.call_rl_hook("on_weights_synced", weight_version)

    def _score(self, trainer: Any, module: Any, weight_version: int) -> list[list[float]] | None:
        """The trainer's side of the probe; None where the engine has no other side, the same on every rank."""
        if self.num_probes == 0:
            return None
        ranks = ranks_of(trainer.strategy)
        every = 0  # loads to a probe
        if ranks.is_main and hasattr(trainer.rollout.engine, "score"):
            every = getattr(trainer.rollout.engine, "probe_every_n_loads", 1)
        every = ranks.broadcast_json(every)
        if every == 0:
            self._say_unprobed(ranks.is_main, trainer)
        if every == 0 or weight_version % every:
            return None
        return probe.trainer_scores(trainer, module, self._sequences(module))

    def _sequences(self, module: Any) -> list[list[int]]:
        config = module.policy_config.get_text_config()
        longest = (getattr(config, "max_position_embeddings", None) or 2**31) - 1
        return probe.probe_sequences(config.vocab_size, num=self.num_probes, num_tokens=min(self.probe_tokens, longest))

    def _probe(self, trainer: Any, module: Any, scores: list[list[float]]) -> None:
        ranks = ranks_of(trainer.strategy)
        found: dict[str, Any] | None = None
        if ranks.is_main:
            engine = trainer.rollout.engine
            bound = self.max_probe_nats
            found = {"scores": None, "problem": None, "bound": bound}  # the others do not know the engine
            if bound is None:
                found["bound"] = probe.default_bound_nats(trainer, module)
            try:
                found["scores"] = [engine.score(token_ids) for token_ids in self._sequences(module)]
            except Exception as error:  # noqa: BLE001  # raised on every rank below
                found["problem"] = f"the engine could not score the probe: {error}"
        found = ranks.broadcast_json(found)
        assert found is not None
        if found["problem"] is not None:
            raise WeightSyncError(found["problem"])
        engine_side: list[list[float]] = found["scores"]
        if not all(engine_side):
            self._say_unprobed(ranks.is_main, trainer)
            return
        self.last_probe_nats = probe.compare(scores, engine_side)
        probe.check(self.last_probe_nats, found["bound"], scores, engine_side)

    def _say_unprobed(self, is_main: bool, trainer: Any) -> None:
        if not self._has_said_unprobed and is_main:
            log.info("%s scores no sequences: weight syncs are not probed.", type(trainer.rollout.engine).__name__)
        self._has_said_unprobed = True


class _BackgroundLoad:
    """A version on its way to the engine while the trainer goes on."""

    def __init__(self, rollout: Any, copy: HostCopy, weight_version: int, scores: list[list[float]] | None) -> None:
        self.weight_version = weight_version
        self.scores = scores  # the trainer's side of the probe, under these weights
        self._controller = getattr(rollout, "controller", rollout)  # of several ranks, rank 0's own
        self._copy = copy
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def export(self, buckets: Any, *, is_main: bool) -> None:
        """Copies the parameters, on all ranks together; then rank 0 starts to load the copy."""
        if not is_main:
            for _ in buckets:
                pass
            return
        copies = self._copy.take(buckets, self.weight_version)

        def load() -> None:
            try:
                self._controller.load_weights(copies, weight_version=self.weight_version)
            except BaseException as error:  # noqa: BLE001  # nobody is above it in this thread; `wait` raises it
                self._error = error

        self._thread = threading.Thread(target=load, name="lightrl-weight-load", daemon=True)
        self._thread.start()

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    def wait(self, timeout_s: float) -> None:
        """Returns when the engine has acknowledged; raises what its load raised."""
        if self._thread is None:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise EngineTimeout(
                f"Weight version {self.weight_version} was not loaded within sync_timeout_s={timeout_s:g}, expected "
                "the engine to acknowledge it. Look at its servers, or raise WeightSync.sync_timeout_s."
            )
        if self._error is not None:
            raise self._error
