"""SharedRollout: gives every rank the groups, drops, progress and errors from rank 0's rollout controller.

Texts stay on rank 0. Other ranks get a summary of each trajectory and, from sharing.py, the tokens they work on.

Rank 0 runs the rollout. Other ranks wait on the CPU group for its messages, which report progress once a second. So no
device collective is pending during the rollout, and an error or Ctrl-C on rank 0 quickly reaches every rank, as the
same exception from the same call.
"""

from __future__ import annotations

import collections
import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightrl import errors
from lightrl.engines.engine import RolloutEngine
from lightrl.errors import LightRLError, RolloutError
from lightrl.rollout import RolloutController, RolloutSettings
from lightrl.rollout.group_scheduler import Drop
from lightrl.rollout.prompts import State
from lightrl.rollout.protocol import OnWait
from lightrl.strategies import Message, Ranks, ShardedExperience, mark_as_on_all_ranks
from lightrl.trajectory import FinishReason, Group, JsonObject, Prompt, Sampling, Trajectory
from lightrl.weights import Bucket

_Summaries = list[list[Any]]  # for each group: group id, prompt id and source, trajectories
HEARTBEAT_S = 1.0  # seconds between rank 0's messages while it waits

_Groups = TypeVar("_Groups", bound=Sequence[Group])


class _OnOtherRanks:
    """Base class for prompts and trajectories on ranks other than 0; explains why an attribute is missing there."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying looks these up before the fields are set
            raise AttributeError(name)
        raise AttributeError(
            f"Only rank 0 has {name!r} of {self!r}. Tokens and texts stay on rank 0; other ranks have only reward, "
            "metrics and versions. Read it if trainer.is_global_zero, or read tensors of experience.local in "
            "on_experience_ready."
        )


@dataclass(repr=False)
class RemotePrompt(_OnOtherRanks):
    id: str
    source: str | None

    def __repr__(self) -> str:
        return f"prompt {self.id!r}"


@dataclass(repr=False)
class RemoteTrajectory(_OnOtherRanks):
    prompt: RemotePrompt
    group_id: int
    sample: int
    finish_reason: FinishReason
    is_truncated: bool
    oldest_version: int
    newest_version: int
    reward: float | None
    metrics: dict[str, float]
    rewards: None = None
    call_outputs: JsonObject = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"a trajectory of {self.prompt!r}"


def summaries_of(groups: Sequence[Group]) -> _Summaries:
    """Summarizes groups as JSON, from which `groups_of` makes groups on the other ranks."""
    names = ("sample", "finish_reason", "is_truncated", "oldest_version", "newest_version", "reward")

    def summary(item: Trajectory) -> dict[str, object]:
        metrics = {name: float(value) for name, value in item.metrics.items()}
        return {**{name: getattr(item, name) for name in names}, "metrics": metrics}

    return [
        [group.id, [group.prompt.id, group.prompt.source], [summary(item) for item in group.trajectories]]
        for group in groups
    ]


def groups_of(summaries: _Summaries) -> list[Group]:
    """Makes groups of RemotePrompts and RemoteTrajectories."""
    groups = []
    for group_id, prompt_fields, records in summaries:
        prompt: Any = RemotePrompt(*prompt_fields)
        items: list[Any] = [RemoteTrajectory(prompt, group_id, **record) for record in records]
        groups.append(Group(group_id, prompt, items))
    return groups


def set_remote_rewards(groups: Sequence[Group], summaries: _Summaries) -> None:
    """Sets the rewards from later summaries of the same groups; removes trajectories without a reward."""
    for group, later in zip(groups, groups_of(summaries), strict=True):
        items = {item.sample: item for item in group.trajectories}
        group.trajectories = [items[item.sample] for item in later.trajectories]
        for item, rewarded in zip(group.trajectories, later.trajectories, strict=True):
            item.reward, item.metrics = rewarded.reward, rewarded.metrics


class SharedRollout:
    """Offers the controller's methods. All ranks must call them together, except methods documented as "Local".

    Args:
        start: makes the controller; called only on rank 0. The other ranks wait for it and raise its errors.
        run_seed, settings: the controller's run seed and settings.
    """

    is_recorded = False

    def __init__(
        self, start: Callable[[], RolloutController], ranks: Ranks, *, run_seed: int, settings: RolloutSettings
    ) -> None:
        self.controller: RolloutController | None = None
        self.ranks = ranks
        self.run_seed = run_seed
        self.settings = settings
        self._remote_version = -1  # weight version of rank 0's engine, on other ranks
        self._drops: list[Drop] = []
        self._group_drops: collections.Counter[str] = collections.Counter()
        self._progress: dict[str, float] = collections.defaultdict(int)
        self._taken: ShardedExperience | None = None
        ranks.step()  # the report of a hang shows which ranks got this far
        if ranks.is_main:
            with self._errors_to_all(), ranks.own_deadline():  # the engine enforces it
                self.controller = start()
            ranks.send(Message("data", done=self.controller.weight_version))
        else:
            message = ranks.receive()
            self._raise_if_error(message)
            self._remote_version = message.done
        self.workflow = None if self.controller is None else self.controller.workflow

    @property
    def engine(self) -> RolloutEngine | None:
        return None if self.controller is None else self.controller.engine

    @property
    def weight_version(self) -> int:
        return self._remote_version if self.controller is None else self.controller.weight_version

    def take(self, weight_version: int, *, on_wait: OnWait | None = None) -> list[Group]:
        """Takes groups as RolloutController does; on ranks other than 0, the groups have no tokens or texts."""
        controller = self.controller
        if controller is None:
            summaries, dtypes = self._follow(on_wait)
            if dtypes is not None:
                self._taken = ShardedExperience.elsewhere(self.ranks.broadcast_tensors({}), dtypes)
            return groups_of(summaries)
        groups = self._lead(lambda notify: controller.take(weight_version, on_wait=notify), self._keep_taken, on_wait)
        if self._taken is not None:
            self.ranks.broadcast_tensors(self._taken.table)
        return groups

    def pop_experience(self) -> ShardedExperience:
        """Local: returns the last `take` as an Experience, with tokens on rank 0. Raises ValueError if it is empty."""
        taken, self._taken = self._taken, None
        if taken is None:
            raise mark_as_on_all_ranks(ValueError("This iteration has no trajectories: every group was dropped."))
        return taken

    def wait_for_rewards(self, groups: Sequence[Group], *, on_wait: OnWait | None = None) -> None:
        """Waits as RolloutController does, and sets the same rewards in each rank's groups."""
        controller = self.controller
        if controller is None:
            set_remote_rewards(groups, self._follow(on_wait))
            return

        def wait(notify: OnWait) -> Sequence[Group]:
            controller.wait_for_rewards(groups, on_wait=notify)
            return groups

        self._lead(wait, summaries_of, on_wait)

    def evaluate(
        self, prompts: Sequence[Prompt], *, sampling: Sampling, num_samples: int = 1, on_wait: OnWait | None = None
    ) -> list[Group]:
        """Evaluates rank 0's prompts as RolloutController does, and returns the same groups on each rank."""
        controller = self.controller
        if controller is None:
            return [Group.from_state(state) for state in self._follow(on_wait)]
        return self._lead(
            lambda notify: controller.evaluate(prompts, sampling=sampling, num_samples=num_samples, on_wait=notify),
            lambda groups: [group.state_dict() for group in groups],
            on_wait,
        )

    def load_weights(self, buckets: Iterable[Bucket], *, weight_version: int) -> None:
        """Loads weights as RolloutController does: all ranks make the buckets together, and rank 0 loads them.

        If the engine raises an error on rank 0, every rank raises it.
        """
        if self.controller is None:
            for _ in buckets:
                pass
            self._raise_if_error(self.ranks.receive())
        else:
            rest = iter(buckets)
            with self._errors_to_all():
                try:
                    self.controller.load_weights(rest, weight_version=weight_version)
                finally:  # the other ranks are still making buckets
                    for _ in rest:
                        pass
            self.ranks.send(Message("data"))
        self._remote_version = weight_version

    def commit(self) -> None:
        """Local: forgets the groups from the last `take`, which have been trained on."""
        if self.controller is not None:
            self.controller.commit()

    def drain_drops(self) -> list[Drop]:
        """Local: returns and clears the drops recorded up to the last `take` or `evaluate`."""
        drops, self._drops = self._drops, []
        return drops

    def drain_group_drops(self) -> dict[str, int]:
        """Local: returns and clears RolloutController's counts of dropped groups, up to the last `take`."""
        drops = dict(self._group_drops)
        self._group_drops.clear()
        return drops

    def progress(self) -> dict[str, float]:
        """Local: returns current queue depths on rank 0, elsewhere the depths at the last `take` or `evaluate`."""
        return dict(self._progress) if self.controller is None else self.controller.progress()

    def state_dict(self) -> State:
        """Local: returns the controller's state on rank 0, which writes checkpoints, and {} on the other ranks."""
        return {} if self.controller is None else self.controller.state_dict()

    def load_state_dict(self, state: State) -> None:
        """Local: restores the controller's state on rank 0; other ranks ignore it."""
        if self.controller is not None:
            self.controller.load_state_dict(state)

    def close(self) -> None:
        """Local: closes the controller on rank 0."""
        if self.controller is not None:
            self.controller.close()

    def _keep_taken(self, groups: Sequence[Group]) -> list[object]:
        items = [item for group in groups for item in group.trajectories]
        has_rewards = not self.settings.defers_rewards
        self._taken = ShardedExperience.from_trajectories(items, has_rewards=has_rewards) if items else None
        return [summaries_of(groups), None if self._taken is None else self._taken.token_dtypes]

    def _lead(
        self, work: Callable[[OnWait], _Groups], to_json: Callable[[_Groups], object], on_wait: OnWait | None
    ) -> _Groups:
        """Runs `work` on rank 0, and sends progress and result to the other ranks, which wait in `_follow`."""
        sent_s = time.monotonic()

        def notify(done: int, total: int) -> None:
            nonlocal sent_s
            if on_wait is not None:
                on_wait(done, total)
            if time.monotonic() - sent_s > HEARTBEAT_S:
                sent_s = time.monotonic()
                self.ranks.send(Message("waiting", done, total))

        assert self.controller is not None
        with self._errors_to_all():
            if on_wait is not None:
                on_wait(0, 0)  # raises KeyboardInterrupt if Ctrl-C arrived before this call
            groups = work(notify)
            drops = self.controller.drain_drops()
            report: State = {
                "drops": [[drop.reason, drop.message, drop.prompt_id] for drop in drops],
                "group_drops": self.controller.drain_group_drops(),
                "progress": self.controller.progress(),
            }
            payload = json.dumps({**report, "result": to_json(groups)}).encode()
        self.ranks.send(Message("data", payload=payload))
        self._drops += drops
        self._group_drops.update(report["group_drops"])
        return groups

    def _follow(self, on_wait: OnWait | None) -> Any:
        """Waits on the other ranks for the result of `_lead` on rank 0, and returns it as parsed JSON."""
        while True:
            message = self.ranks.receive()
            self._raise_if_error(message)
            if message.kind == "data":
                break
            if on_wait is not None:
                on_wait(message.done, message.total)
        report = json.loads(message.payload)
        self._drops += [Drop(*drop) for drop in report["drops"]]
        self._group_drops.update(report["group_drops"])
        self._progress = report["progress"]
        return report["result"]

    @contextlib.contextmanager
    def _errors_to_all(self) -> Iterator[None]:
        """If rank 0 raises an error inside the context, sends it to the other ranks, so that they also raise it."""
        try:
            yield
        except BaseException as error:  # the other ranks also raise it
            names = [kind.__name__ for kind in type(error).__mro__ if hasattr(errors, kind.__name__)]
            text = json.dumps([(names or [type(error).__name__])[0], str(error)]).encode()
            is_stop = isinstance(error, KeyboardInterrupt | SIGTERMException)
            self.ranks.send(Message("stop" if is_stop else "error", payload=text))
            mark_as_on_all_ranks(error)
            raise

    def _raise_if_error(self, message: Message) -> None:
        if message.kind not in ("error", "stop"):
            return
        name, text = json.loads(message.payload)
        error: BaseException
        if message.kind == "stop":
            error = SIGTERMException() if name == "SIGTERMException" else KeyboardInterrupt()
        else:
            kind = getattr(errors, name, None)
            if not (isinstance(kind, type) and issubclass(kind, LightRLError)):
                kind = RolloutError
            error = kind(f"Rank 0 raised {name}: {text}")
        raise mark_as_on_all_ranks(error)
