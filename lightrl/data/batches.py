"""The loaders that Lightning iterates over: EpochLoader of sized data, PositionLoader of data that may have no end.

An epoch of the train loader has n // batch_size iterations for n prompts; the prompts left over come first in the next
epoch. If a source is streamed, n is unknown and the loader never ends: the Trainer's settings end the run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from lightrl.data.stream import PromptStream, RowPrompts
from lightrl.trajectory import JsonObject

if TYPE_CHECKING:
    import lightning as L

T = TypeVar("T")


class EpochLoader(Generic[T]):
    """A sized loader without state: batch k of epoch e follows from (e, k), and Lightning keeps the count.

    So it resumes at the right batch from anywhere: mid-epoch, after an error within a batch, at a limit. It does not
    use Lightning's epoch number, which is one too high in the checkpoint of a run that `max_steps` stopped mid-epoch.
    It is not a torch DataLoader because workers would have nothing to do.

    Args:
        num_batches: per epoch.
        batch_at: `batch_at(e, k)` returns batch k of epoch e.
        trainer: its fit loop uses this loader; None always starts at batch 0 of epoch 0, as in validation.
    """

    def __init__(
        self, num_batches: int | None, batch_at: Callable[..., T], *, trainer: L.Trainer | None = None
    ) -> None:
        self.num_batches = num_batches
        self.batch_at = batch_at
        self._trainer = trainer

    def __len__(self) -> int:
        if self.num_batches is None:
            raise TypeError("The number of batches of streamed data is unknown.")
        return self.num_batches

    def __iter__(self) -> Iterator[T]:
        first, num = 0, len(self)
        per_epoch = num
        if self._trainer is not None:
            # Read when the first batch is requested: Lightning creates the iterator before it sets its counters.
            first = self._trainer.fit_loop.epoch_loop.batch_progress.total.completed
            per_epoch = min(num, int(self._trainer.num_training_batches))
        for position in range(first, first + num):  # Lightning stops at the end of its epoch
            yield self.batch_at(*divmod(position, per_epoch))

    def state_dict(self) -> JsonObject:
        """Empty; Lightning resumes mid-epoch only with a loader that has this method."""
        return {}

    def load_state_dict(self, state_dict: JsonObject) -> None:
        """Does nothing: there is no state."""


class PositionLoader(EpochLoader[T]):
    """An EpochLoader whose batches are numbered over the whole run: an epoch continues where the last one ended.

    Without `num_batches` per epoch the loader has no length and never ends.
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
    """Raises ValueError if the train rows are streamed and nothing says how long an epoch is."""
    if stream.num_prompts is not None or trainer is None:
        return
    if trainer.max_steps == -1 and trainer.max_epochs != -1 and isinstance(trainer.limit_train_batches, float):
        raise ValueError(
            "The number of rows of streamed data is unknown, so the Trainer cannot know when an epoch ends. Set "
            "trainer.max_steps, or set trainer.limit_train_batches to the number of iterations of an epoch."
        )


class HostBatch(list[T]):
    """A list that stays on the host when Lightning moves a batch; `set_name` names one of several validation sets.

    Overriding `transfer_batch_to_device` would work too, but Lightning warns about that in a module with a data module.
    """

    def __init__(self, items: Iterable[T] = (), set_name: str | None = None) -> None:
        super().__init__(items)
        self.set_name = set_name

    def to(self, *args: object, **kwargs: object) -> HostBatch[T]:
        return self


def batches_in_order(
    prompts: RowPrompts, batch_size: int, collate: Callable[[list[Any], str | None], T]
) -> EpochLoader[T]:
    """Returns collated batches of consecutive prompts of one source each, named if there are several sources.

    The last batch of each source may be smaller.
    """
    has_sets = len(prompts.parts) > 1
    sizes = {part.source.label if has_sets else None: part.num_rows or 0 for part in prompts.parts}
    batches = [
        (slice(start, min(start + batch_size, end)), name)
        for (name, size), end in zip(sizes.items(), itertools.accumulate(sizes.values()), strict=True)
        for start in range(end - size, end, batch_size)
    ]

    def batch_at(epoch: int, index: int) -> T:
        chosen, name = batches[index]
        return collate([prompt for prompt in prompts[chosen] if prompt is not None], name)

    return EpochLoader(len(batches), batch_at)
