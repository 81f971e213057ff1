"""The loaders that Lightning iterates over: EpochLoader for sized data, PositionLoader for data that may be endless.

With n prompts, an epoch of the train loader has n // batch_size iterations; the remaining prompts come first in the
next epoch. If a source is streamed, n is unknown and the loader never ends, so the Trainer's settings end the run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

import lightning as L

from lightrl.data.stream import PromptStream, RowPrompts
from lightrl.trajectory import JsonObject

T = TypeVar("T")


class EpochLoader(Generic[T]):
    """A sized loader without state: batch k of epoch e depends only on (e, k), and Lightning counts the batches.

    It therefore resumes at the right batch: mid-epoch, after an error within a batch, or at a limit. It does not use
    Lightning's epoch number, which is one too high in the checkpoint of a run that `max_steps` stopped mid-epoch. It is
    not a torch DataLoader, because workers would have nothing to do.

    Args:
        num_batches: batches per epoch; None if unknown.
        batch_at: `batch_at(e, k)` returns batch k of epoch e.
        trainer: the trainer whose fit loop uses this loader; None always starts at batch 0 of epoch 0, for validation.
    """

    def __init__(
        self, num_batches: int | None, batch_at: Callable[..., T], *, trainer: L.Trainer | None = None
    ) -> None:
        self.num_batches = num_batches
        self.batch_at = batch_at
        self._trainer = trainer

    def __len__(self) -> int:
        if self.num_batches is None:
            raise TypeError("The number of batches in streamed data is unknown.")
        return self.num_batches

    def __iter__(self) -> Iterator[T]:
        first, num = 0, len(self)
        per_epoch = num
        if self._trainer is not None:
            # Read only at the first request, because Lightning makes the iterator before it sets its counters.
            first = self._trainer.fit_loop.epoch_loop.batch_progress.total.completed
            per_epoch = min(num, int(self._trainer.num_training_batches))
        for position in range(first, first + num):  # Lightning stops at the end of its epoch
            yield self.batch_at(*divmod(position, per_epoch))

    def state_dict(self) -> JsonObject:
        """Returns {}. Lightning resumes mid-epoch only with a loader that has this method."""
        return {}

    def load_state_dict(self, state_dict: JsonObject) -> None:
        """Does nothing, because the loader has no state."""


class PositionLoader(EpochLoader[T]):
    """An EpochLoader that numbers batches over the whole run, so an epoch continues where the last one ended.

    Without `num_batches` the loader has no length and never ends.
    """

    def __iter__(self) -> Iterator[T]:
        first = 0
        if self._trainer is not None:
            # Without a length, Lightning requests a batch before it sets `completed`, which EpochLoader reads.
            counters: Any = self._trainer.fit_loop.epoch_loop.batch_progress.total
            first = counters.processed
        is_endless = self.num_batches is None
        for number in itertools.count(first) if is_endless else range(first, first + len(self)):
            yield self.batch_at(number)


def check_run_length(stream: PromptStream, trainer: L.Trainer | None) -> None:
    """Raises ValueError if the train rows are streamed and no setting of the Trainer ends an epoch or the run."""
    if stream.num_prompts is not None or trainer is None:
        return
    if trainer.max_steps == -1 and trainer.max_epochs != -1 and isinstance(trainer.limit_train_batches, float):
        raise ValueError(
            "The number of rows in streamed data is unknown, so the Trainer cannot know when an epoch ends. Set "
            "trainer.max_steps, or set trainer.limit_train_batches to the number of iterations in an epoch."
        )


class HostBatch(list[T]):
    """A list that stays on the host when Lightning moves a batch; `set_name` names one of several validation sets.

    Overriding `transfer_batch_to_device` would also work, but Lightning warns if a module with a data module does that.
    """

    def __init__(self, items: Iterable[T] = (), set_name: str | None = None) -> None:
        super().__init__(items)
        self.set_name = set_name

    def to(self, *args: object, **kwargs: object) -> HostBatch[T]:
        return self


def batches_in_order(
    prompts: RowPrompts, batch_size: int, collate: Callable[[list[Any], str | None], T]
) -> EpochLoader[T]:
    """Batches consecutive prompts of the same source; the last batch of a source may be smaller.

    If there are several sources, `collate` gets the name of the batch's source.
    """
    has_sets = len(prompts.parts) > 1
    sizes = {part.source.label if has_sets else None: part.num_rows or 0 for part in prompts.parts}
    batches = [
        (slice(start, min(start + batch_size, end)), name)
        for (name, size), end in zip(sizes.items(), itertools.accumulate(sizes.values()), strict=True)
        for start in range(end - size, end, batch_size)
    ]

    def batch_at(epoch: int, index: int) -> T:
        rows, name = batches[index]
        return collate([prompt for prompt in prompts[rows] if prompt is not None], name)

    return EpochLoader(len(batches), batch_at)
