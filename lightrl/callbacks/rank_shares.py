"""The policy's parameters on their way to the engine when several ranks hold them.

If the engine loads files from a folder that every rank sees, each rank writes its share there; otherwise rank 0
gathers all of them and hands them to the engine.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from pathlib import Path

from lightrl.engines import SGLangEngine
from lightrl.errors import WeightSyncError
from lightrl.models import ParallelModel
from lightrl.models.lora import Part
from lightrl.module import RLModule
from lightrl.rollout.rl_trainer import RLTrainer
from lightrl.strategies import Ranks, ranks_of
from lightrl.strategies.shared_folder import ranks_without
from lightrl.weights import Bucket, SharedFolder
from lightrl.weights.disk import ShareWriter, files_of

log = logging.getLogger(__name__)


class RankShares:
    """Makes the buckets of each sync; decides at the first one who writes, the same on every rank."""

    def __init__(self) -> None:
        self._folder: SharedFolder | None = None
        self._rollout: object = None  # `_folder` was decided for it

    def buckets(self, trainer: RLTrainer, module: RLModule, bucket_bytes: int) -> Iterator[Bucket]:
        """Yields buckets for `rollout.load_weights`; collective, each rank must read them to the end.

        An engine that serves adapters gets these, and after them the base if it needs that.
        """
        model = module.parallel_models["policy"]
        holders = ranks_of(trainer.strategy).of_role("policy")
        if not holders.is_here:
            return model.full_parameters(bucket_bytes)
        engine: object = trainer.rollout.engine
        needs_base: bool | None = None
        if isinstance(engine, SGLangEngine) and engine.adapters == "served":
            needs_base = engine.needs_base()
        needs_base = holders.broadcast_json(needs_base)  # None: the adapters are merged
        if needs_base is None:
            return self._whole(trainer, model, bucket_bytes, "merged", holders)
        adapters = model.full_parameters(bucket_bytes, part="adapters")
        if not needs_base:
            return adapters
        base = self._whole(trainer, model, bucket_bytes, "base", holders)
        return itertools.chain(adapters, base)

    def _whole(
        self, trainer: RLTrainer, model: ParallelModel, bucket_bytes: int, part: Part, holders: Ranks
    ) -> Iterator[Bucket]:
        """All parameters, from every rank or from rank 0."""
        if holders.size == 1:
            return model.full_parameters(bucket_bytes, part=part)
        if self._rollout is not trainer.rollout:  # new on every rank whenever it is opened
            self._rollout, self._folder = trainer.rollout, _shared_folder(trainer.rollout.engine, holders)
        if self._folder is None:
            return model.full_parameters(bucket_bytes, part=part)
        return shared(model.full_parameters(bucket_bytes, part=part, is_spread=True), self._folder, holders)


def shared(buckets: Iterator[Bucket], folder: SharedFolder, holders: Ranks) -> Iterator[Bucket]:
    """Yields on rank 0 its own share and then the files of the others, which write theirs meanwhile.

    Raises:
        WeightSyncError: on rank 0 if a rank could not write its share, or has not within `folder.timeout_s`.
    """
    if not holders.is_main:
        writer = ShareWriter(folder, holders.rank)
        for bucket in buckets:
            writer.add(bucket)
        _gathered(writer.record(), folder, holders)
        yield Bucket({}, is_last=True)
        return
    for bucket in buckets:
        if not bucket.is_last:
            yield bucket
            continue
        records = _gathered({"problem": None, "files": []}, folder, holders)
        yield Bucket(bucket.tensors, is_last=True, written=files_of(records))


def _gathered(record: dict[str, object], folder: SharedFolder, holders: Ranks) -> list[dict[str, object]]:
    try:
        return holders.gather_json(record, timeout_s=folder.timeout_s)
    except RuntimeError as error:
        raise WeightSyncError(
            f"Not every rank has written its share of the weights to {folder.root!r} within engine.timeouts.sync_s="
            f"{folder.timeout_s:g}: {str(error).splitlines()[0]}"
        ) from error


def _shared_folder(engine: object, holders: Ranks) -> SharedFolder | None:
    """Rank 0's folder if every rank sees it and can write there; else None, which is logged."""
    folder = engine.shared_folder() if isinstance(engine, SGLangEngine) else None
    fields = holders.broadcast_json(None if folder is None else vars(folder))
    if fields is None:
        return None
    folder = SharedFolder(**fields)
    missing = ranks_without(Path(folder.root), holders)
    if not missing:
        return folder
    if holders.is_main:
        log.warning(
            "weight_folder=%s is not visible and writable for %s, so rank 0 gathers and writes all weights. Set "
            "engine.weight_folder to a folder that all hosts of the trainer share.",
            folder.root,
            ", ".join(f"rank {rank} on {host}" for rank, host in missing),
        )
    return None
