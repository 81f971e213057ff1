"""RayWorker: a reward process on any host of a Ray cluster, supervised as one on this host.

    supervising thread ── Ray ──► actor ── pipes ──► guardian and worker (worker.py)

The actor is a `WorkerProcess` and nothing else: deadlines, blame and replacement stay with the supervising thread, on
rank 0's host. A host that is lost, or silent for `_SILENT_S`, is a worker that died.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightrl.rewards.judgment import Outcome
from lightrl.rewards.supervisor import WorkerDied

if TYPE_CHECKING:
    from lightrl.rewards.pool import WorkerProcess

_SILENT_S = 20.0


class RayWorker:
    """Has the methods of the process in its actor, which needs one CPU of the cluster.

    Args:
        kind: the class of the process; its arguments follow.

    Raises:
        ValueError: if there is no Ray, or no cluster.
    """

    def __init__(self, kind: type[WorkerProcess], settings: Mapping[str, Any], *, import_path: Sequence[str]) -> None:
        try:
            import ray

            if not ray.is_initialized():  # the first worker starts alone
                ray.init(address="auto", logging_level="ERROR")
        except (ImportError, ConnectionError) as error:
            raise ValueError(f"Reward workers as Ray actors need the cluster that started the run: {error}") from error
        self.runs_together = False
        actor = ray.remote(kind).options(num_cpus=1, scheduling_strategy="SPREAD")
        self._actor = actor.remote(settings, import_path=import_path)
        self._placed, self._is_placed = self._actor.__ray_ready__.remote(), False

    def is_ready(self, wait_s: float) -> bool:
        import ray

        def look(process: WorkerProcess) -> tuple[bool, bool]:
            return process.is_ready(wait_s), process.runs_together

        if not self._is_placed:
            self._is_placed = bool(ray.wait([self._placed], timeout=wait_s)[0])
            return False
        is_ready, self.runs_together = self._answer(self._actor.__ray_call__.remote(look))
        return bool(is_ready)

    def is_alive(self) -> bool:
        with contextlib.suppress(WorkerDied):
            return bool(self._answer(self._actor.is_alive.remote()))
        return False

    def send(self, requests: Sequence[bytes]) -> None:
        self._actor.send.remote(list(requests))  # `receive` comes after it, and says if it failed

    def receive(self, wait_s: float) -> list[tuple[int, Outcome]]:
        return list(self._answer(self._actor.receive.remote(wait_s)))

    def stack(self) -> str:
        if not self._is_placed:
            return "Ray, which has no host with a free CPU for it."
        with contextlib.suppress(WorkerDied):
            return str(self._answer(self._actor.stack.remote()))
        return ""

    def end(self) -> None:
        import ray

        if self._is_placed:
            with contextlib.suppress(WorkerDied):
                self._answer(self._actor.end.remote())
        ray.kill(self._actor)

    def _answer(self, reference: Any) -> Any:
        """What the actor answers, or raises."""
        import ray

        try:
            return ray.get(reference, timeout=_SILENT_S)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except ray.exceptions.GetTimeoutError:
            raise WorkerDied(f"its host did not answer within {_SILENT_S:g} s") from None
        except ray.exceptions.RayActorError as error:
            raise WorkerDied(f"its host or actor was lost: {error}") from None
