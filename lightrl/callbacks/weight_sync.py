"""WeightSync: loads the trainer's weights into the engine, so that rollouts come from the policy being trained."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, cast

import lightning as L
import torch

from lightrl.callbacks.answer_check import AnswerCheck
from lightrl.callbacks.lag_probe import LagProbe
from lightrl.callbacks.probe import MIN_MISMATCH_TOKENS, PROBE_SEQUENCES, Probe
from lightrl.callbacks.rl_callback import RLCallback
from lightrl.checks.bounds import check_bounds, check_choice
from lightrl.engines import RolloutEngine
from lightrl.errors import WeightSyncError, WeightSyncUndone
from lightrl.experience import Experience
from lightrl.models import ParallelModel
from lightrl.models.tuning import Part
from lightrl.module import RLModule
from lightrl.rollout.rl_trainer import RLTrainer
from lightrl.strategies import Ranks, ShardedExperience, ranks_of
from lightrl.strategies.offload import HOST, move_state
from lightrl.strategies.ranks.shared_folder import ranks_without
from lightrl.trajectory import Group
from lightrl.weights import Bucket, SharedFolder
from lightrl.weights.disk import ShareWriter, files_of

log = logging.getLogger(__name__)

BUCKET_BYTES = 2**28  # parameters are sent in buckets of this size

# If engine and trainer share devices: during the update, the engine holds no device memory and the optimizer's state is
# on the device. At all other times, that state is in host memory.


def colocated_engine(trainer: RLTrainer) -> RolloutEngine | None:
    """Returns the engine if it is in use and shares the trainer's devices; every rank gets the same result."""
    engine = trainer.engine
    return None if trainer.rollout.is_recorded or engine is None or not engine.is_colocated else engine


def check_no_overlap(max_staleness: int) -> None:
    """Raises ValueError if rollouts would continue during an update, when a colocated engine holds no memory."""
    if max_staleness > 0:
        raise ValueError(
            f"max_staleness must be 0 with a colocated engine, got {max_staleness}: the engine has no memory for "
            "rollouts during an update. Use StalenessControl(0), or placement: separate."
        )


def to_trainer(trainer: RLTrainer, engine: RolloutEngine) -> None:
    """Prepares the update: the engine releases its memory, then the optimizer's state moves to the device."""
    ranks = ranks_of(trainer.strategy)
    with ranks.own_deadline():
        if ranks.is_main:
            engine.release_memory()
        ranks.broadcast_json(None)  # no rank allocates memory before the engine has released it
    if not {"parameters", "optimizer"} & set(getattr(trainer.strategy, "offload_to_cpu", ())):  # offloaded state stays
        for optimizer in trainer.optimizers:
            move_state(optimizer, trainer.strategy.root_device)


def to_engine(trainer: RLTrainer) -> None:
    """Prepares the load: the optimizer's state moves to host memory."""
    for optimizer in trainer.optimizers:
        move_state(optimizer, HOST)
    if trainer.strategy.root_device.type == "cuda":
        torch.cuda.empty_cache()


class WeightSync(RLCallback):
    """Exports the policy after an iteration and loads it into the engine as the next weight version.

    Trainer and engine each have their own copy of the weights. A weight version numbers the engine's copy: version k is
    the policy after k iterations, and every token carries the version that sampled it. The current version is loaded
    before the first request, including after a resume and in sanity check, validate, test and predict.

    The engine checks names, shapes and values, and keeps the old weights if a check fails. After each sync, trainer and
    engine compute the logprobs of a probe, a few fixed sequences of random tokens. Their mean difference,
    `sync/probe_abs_dlogp_nats` (the largest over all replicas), is bounded; see probe.py. If only some replicas exceed
    the bound, they are dropped and get the weights again; otherwise the run stops. `sync/verified_fraction` is the
    share of replicas whose digests equal the trainer's. A failed sync is retried once if the old version still serves.

    Bounds on `sync/mismatch_present_abs_dlogp_nats` and on the largest difference detect stale caches and restarts
    between syncs. `policy/lag_*` measures only the policy's lag; see lag_probe.py and docs/reference/metrics.md.

    An engine with `placement: colocated` releases its memory before each update, and the optimizer's state is in host
    memory while the engine generates.

    Args:
        every_n_iterations: iterations between two syncs. `StalenessControl.max_staleness` must be at least one less.
        verify: False trusts the engine: no probe, no digests, no bound on the mismatch and, with `max_staleness`, no
            copies of η + 1 versions of the trained parameters in host memory (see answer_check.py). `all` compares all
            trajectories, not only a few, with the trainer's logprobs, which takes an extra forward pass.
    """

    def __init__(self, every_n_iterations: int = 1, verify: bool | Literal["all"] = True) -> None:
        check_bounds(1, every_n_iterations=every_n_iterations)
        check_choice((True, False, "all"), verify=verify)
        self.verify = verify
        self._shares = RankShares()
        self._probe = Probe(PROBE_SEQUENCES if verify else 0)
        self._lag = LagProbe()
        self._answer_check = AnswerCheck(verify == "all")
        self.every_n_iterations = every_n_iterations

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._answer_check = AnswerCheck(self.verify == "all")  # a failed run does not call `teardown`
        engine: RolloutEngine | None = getattr(trainer, "engine", None)
        if engine is not None:
            engine.should_verify = bool(self.verify)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if isinstance(pl_module, RLModule) and colocated_engine(rl_trainer := cast("RLTrainer", trainer)) is not None:
            check_no_overlap(rl_trainer.rollout.settings.max_staleness)
        self._load_if_missing(trainer, pl_module)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._load_if_missing(trainer, pl_module)

    on_sanity_check_start = on_test_start = on_predict_start = on_validation_start

    def on_weight_sync(self, trainer: RLTrainer, module: RLModule, weight_version: int) -> None:
        if colocated_engine(trainer) is not None:
            to_engine(trainer)
        if trainer.rollout.settings.max_staleness > 0:
            module.log_dict(self._lag.measure(trainer, module, weight_version))
        if weight_version % self.every_n_iterations == 0:
            module.log_dict(self._sync(trainer, module, weight_version))

    def on_rollout_end(self, trainer: RLTrainer, module: RLModule, groups: list[Group]) -> None:
        if (engine := colocated_engine(trainer)) is not None:
            to_trainer(trainer, engine)
        if trainer.rollout.settings.max_staleness > 0:
            self._lag.offer(trainer, groups)
        self._answer_check.offer(trainer, groups)

    def on_minibatch_start(
        self, trainer: RLTrainer, module: RLModule, minibatch: Experience, index: int, total: int
    ) -> None:
        """Checks sampled tokens against the weights that sampled them, before an update changes the weights."""
        checks_all, is_async = self.verify == "all", trainer.rollout.settings.max_staleness > 0
        num_checked = module.num_minibatches if checks_all else 1  # checks each row once, in the first update epoch
        rounding, interval = self._probe.rounding, 1 if checks_all or is_async else self._probe.interval
        if rounding is not None and index < num_checked and trainer.weight_version % interval == 0:
            self._answer_check.check(trainer, module, cast("ShardedExperience", minibatch), rounding)

    def on_minibatch_end(
        self, trainer: RLTrainer, module: RLModule, metrics: dict[str, float], index: int, total: int
    ) -> None:
        if index == 0:  # afterwards the trainer no longer has the weights that sampled the tokens
            least_tokens = 1 if self._answer_check.has_sampled(trainer.weight_version) else MIN_MISMATCH_TOKENS
            self._probe.check_mismatch(metrics, least_tokens)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._probe.reset()
        self._lag, self._answer_check = LagProbe(), AnswerCheck(self.verify == "all")  # frees the copies of weights

    def _load_if_missing(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Loads the current version unless the engine has it, so that validation measures the current policy."""
        if not isinstance(module, RLModule):
            return
        rl_trainer = cast("RLTrainer", trainer)
        if rl_trainer.rollout.weight_version != rl_trainer.weight_version:
            with rl_trainer.ended_by_sigterm():  # dead servers can delay a load or probe; stopping it loses nothing
                self._sync(rl_trainer, module, rl_trainer.weight_version)

    def _sync(self, trainer: RLTrainer, module: RLModule, weight_version: int) -> dict[str, float]:
        logprobs = self._probe.logprobs_if_due(trainer, module, weight_version)
        ranks = ranks_of(trainer.strategy)

        def load() -> None:
            buckets = _gathered(self._shares.buckets(trainer, module, BUCKET_BYTES), ranks)
            trainer.rollout.load_weights(buckets, weight_version=weight_version)

        with ranks.own_deadline():  # the engine enforces the deadline
            try:
                load()
            except WeightSyncUndone as error:  # the previous version still serves
                log.warning("Retrying the weight sync: %s", error)
                load()
            metrics = self._probe.compare(trainer, module, logprobs)
            if self._probe.rounding is not None:
                self._answer_check.save_version(trainer, module, weight_version, self._probe.rounding)
            trainer.call_rl_hook("on_weights_synced", weight_version)
        return metrics


def _gathered(buckets: Iterable[Bucket], ranks: Ranks) -> Iterator[Bucket]:
    """Yields the buckets. The ranks watch each other while they gather a bucket, but not while the engine loads it."""
    iterator = iter(buckets)
    while True:
        with ranks.own_deadline(False):
            bucket = next(iterator, None)
        if bucket is None:
            return
        yield bucket


# If the engine loads files from a folder that every rank can access, each rank writes its share there; otherwise rank 0
# gathers all shares and passes them to the engine.


class RankShares:
    """Makes the buckets for each sync. The first sync decides which ranks write; all ranks make the same decision."""

    def __init__(self) -> None:
        self._folder: SharedFolder | None = None
        self._rollout: object = None  # the rollout for which `_folder` was chosen

    def buckets(self, trainer: RLTrainer, module: RLModule, bucket_bytes: int) -> Iterator[Bucket]:
        """Returns the buckets of every part that the engine loads. Collective; each rank must read all buckets."""
        model = module.parallel_models["policy"]
        holders = ranks_of(trainer.strategy).of_role("policy")
        if not holders.is_here:
            return model.full_parameters(bucket_bytes)
        engine = trainer.rollout.engine
        engine_parts: list[Part] = ["whole"] if engine is None else engine.parts_to_load()
        parts: list[Part] = holders.broadcast_json(engine_parts)
        return itertools.chain(*(self._part_buckets(trainer, model, bucket_bytes, part, holders) for part in parts))

    def _part_buckets(
        self, trainer: RLTrainer, model: ParallelModel, bucket_bytes: int, part: Part, holders: Ranks
    ) -> Iterator[Bucket]:
        """Returns buckets of a part's parameters: each rank's share, or all on rank 0 for `added`, which is small."""
        names = "module" if trainer.engine is None else trainer.engine.parameter_names  # every rank has this setting
        make = functools.partial(model.full_parameters, part=part, names=names)
        if holders.size == 1 or part == "added":
            return make(bucket_bytes)
        if self._rollout is not trainer.rollout:  # each stage opens a new rollout, on every rank
            self._rollout, self._folder = trainer.rollout, _shared_folder(trainer.rollout.engine, holders)
        if self._folder is None:
            return make(bucket_bytes)
        return shared(make(bucket_bytes, is_spread=True), self._folder, holders)


def shared(buckets: Iterator[Bucket], folder: SharedFolder, holders: Ranks) -> Iterator[Bucket]:
    """Yields rank 0's share, then the files from the other ranks, each of which writes its share to the folder.

    Raises WeightSyncError on rank 0 if a rank could not write its share within `folder.timeout_s`.
    """
    if not holders.is_main:
        writer = ShareWriter(folder, holders.rank)
        for bucket in buckets:
            writer.add(bucket)
        _gather_records(writer.record(), folder, holders)
        yield Bucket({}, is_last=True)
        return
    for bucket in buckets:
        if not bucket.is_last:
            yield bucket
            continue
        records = _gather_records({"problem": None, "files": []}, folder, holders)
        yield Bucket(bucket.tensors, is_last=True, files=files_of(records))


def _gather_records(record: dict[str, object], folder: SharedFolder, holders: Ranks) -> list[dict[str, object]]:
    try:
        return holders.gather_json(record, timeout_s=folder.timeout_s)
    except RuntimeError as error:
        raise WeightSyncError(
            f"Not every rank wrote its share of the weights to {folder.root!r} within engine.timeouts.sync_s="
            f"{folder.timeout_s:g}: {str(error).splitlines()[0]}"
        ) from error


def _shared_folder(engine: RolloutEngine | None, holders: Ranks) -> SharedFolder | None:
    """Returns rank 0's folder if every rank can write to it; otherwise logs the reason and returns None."""
    folder = None if engine is None else engine.shared_folder()
    fields = holders.broadcast_json(None if folder is None else vars(folder))
    if fields is None:
        return None
    folder = SharedFolder(**fields)
    missing = ranks_without(Path(folder.root), holders)
    if not missing:
        return folder
    if holders.is_main:
        log.warning(
            "weight_folder=%s cannot be read and written by %s, so rank 0 gathers and writes all weights. Set "
            "engine.weight_folder to a folder that all trainer hosts share.",
            folder.root,
            ", ".join(f"rank {rank} on {host}" for rank, host in missing),
        )
    return None
