"""StalenessControl: how far the policy may have moved on while a trajectory waits to be trained on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightrl.callbacks.rl_callback import RLCallback

if TYPE_CHECKING:
    import lightning as L

    from lightrl.experience import Experience


class StalenessControl(RLCallback):
    """Bounds the staleness of every trained token: weight version now − version that sampled it, in versions.

    With 0 the loop is on-policy: it collects an iteration, learns, syncs, collects the next. With η > 0 rollouts go on
    while the policy is updated, up to (η + 1)·P groups ahead; a generation that a weight sync interrupts continues
    under the new weights. It is one loop in both cases: rollout/group_book.py decides what starts and what is taken.

    Args:
        max_staleness: η, in versions.
        max_concurrent: bound on groups in flight; None for no bound but the staleness.
        redraw_stragglers: start a group again instead of waiting for it when only it holds a batch back. Faster with a
            heavy tail of lengths, but then short completions are drawn too often.
        rollout_timeout_s: the run ends if for so long no trajectory finishes while a batch is waited for.
        loop_timeout_s: the run ends if a workflow or an async reward blocks the rollouts' event loop for so long.
    """

    def __init__(
        self,
        max_staleness: int = 0,
        *,
        max_concurrent: int | None = None,
        redraw_stragglers: bool = False,
        rollout_timeout_s: float = 1800.0,
        loop_timeout_s: float = 60.0,
    ) -> None:
        if max_staleness < 0:
            raise ValueError(f"max_staleness={max_staleness}, expected 0 (on-policy) or more. Raise it.")
        if max_concurrent is not None and max_concurrent < 1:
            raise ValueError(f"max_concurrent={max_concurrent}, expected at least 1 or None. Raise it.")
        for name, seconds in (("rollout_timeout_s", rollout_timeout_s), ("loop_timeout_s", loop_timeout_s)):
            if seconds <= 0:
                raise ValueError(f"{name}={seconds}, expected seconds above 0. Raise it.")
        self.max_staleness = max_staleness
        self.max_concurrent = max_concurrent
        self.redraw_stragglers = redraw_stragglers
        self.rollout_timeout_s = rollout_timeout_s
        self.loop_timeout_s = loop_timeout_s

    def on_experience_ready(self, trainer: L.Trainer, module: L.LightningModule, experience: Experience) -> None:
        """Checks the bound on what is about to be trained on."""
        rl_trainer: Any = trainer
        if getattr(getattr(rl_trainer, "rollout", None), "is_recorded", False):
            return  # their versions are those of the run that wrote them
        versions = experience.weight_versions[experience.loss_mask]
        oldest = int(versions.min()) if versions.numel() else rl_trainer.weight_version
        staleness = rl_trainer.weight_version - oldest
        if staleness > self.max_staleness or (versions < 0).any():
            raise AssertionError(f"A token has staleness {staleness}, above the bound of {self.max_staleness}.")
