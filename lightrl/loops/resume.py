"""Resume: what a resumed run, or the next fit, continues from, and when it would be wrong to save that.

`check_resume` is what fast_dev_run does in place of a checkpoint.
"""

from __future__ import annotations

import io
import logging
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

from lightrl.errors import LightRLError
from lightrl.loops.update import GradientGuard
from lightrl.rollout.rl_trainer import RLTrainer
from lightrl.strategies import is_on_all_ranks, mark_as_on_all_ranks, ranks_of

log = logging.getLogger(__name__)


class Resume:
    """The rollout's state and the counters that Lightning does not keep.

    Args:
        trainer: its rollout is open between `restore_rollout` and `keep_rollout`.
        guard: counts the skipped updates.
    """

    def __init__(self, trainer: RLTrainer, guard: GradientGuard) -> None:
        self.trainer = trainer
        self.guard = guard
        self.why_no_checkpoint: str | None = None  # what makes a checkpoint wrong at this moment
        self._rollout_state: dict[str, Any] | None = None  # of the last fit or checkpoint, for the next rollout
        self._is_restored = False  # the open rollout has taken the state over

    def begin(self) -> None:
        """A stage begins: forgets what an earlier one, which may have failed, left behind."""
        self.why_no_checkpoint = None
        self._is_restored = False

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint; empty if nothing was rolled out."""
        state = (self.trainer.rollout.state_dict() if self._is_restored else None) or self._rollout_state
        if state is None:
            return {}
        return {
            "rollout": state,
            "num_skipped": self.guard.num_skipped,
            "num_skipped_in_a_row": self.guard.num_in_a_row,
            "torch_rng": torch.get_rng_state(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._rollout_state = state_dict.get("rollout")
        if self._rollout_state is None:
            return
        self.guard.num_skipped = int(state_dict["num_skipped"])
        self.guard.num_in_a_row = int(state_dict["num_skipped_in_a_row"])
        torch.set_rng_state(state_dict["torch_rng"])

    def restore_rollout(self) -> None:
        """Loads the state of the checkpoint or of the previous fit, if there is one, into the newly opened rollout."""
        if self._rollout_state is not None:
            seed = self._rollout_state["run_seed"]
            if seed != self.trainer.run_seed:
                log.warning(
                    "The checkpoint was made with seed %d, this run has seed %d: prompts come in another order, some "
                    "of them twice. Set seed_everything to %d.", seed, self.trainer.run_seed, seed,
                )  # fmt: skip
            self.trainer.rollout.load_state_dict(self._rollout_state)
        self._is_restored = True

    def keep_rollout(self) -> None:
        """Before the rollout closes: keeps its state for checkpoints and later fits."""
        if not self._is_restored:
            return
        self._is_restored = False
        reason, self.why_no_checkpoint = self.why_no_checkpoint, "the rollout's state could not be read"
        try:
            self._rollout_state = self.trainer.rollout.state_dict() or None  # recorded groups need none
            self.why_no_checkpoint = reason
        except LightRLError as error:
            log.warning("The rollout's state could not be read for a checkpoint: %s", error)

    def note_failure(self, error: BaseException) -> None:
        """A rank that fails alone cannot save what is spread over all of them."""
        ranks = ranks_of(self.trainer.strategy)
        if ranks.size > 1 and not is_on_all_ranks(error):
            self.why_no_checkpoint = f"rank {ranks.rank} failed and the others did not"
            ranks.fail(error)  # now: what callbacks do on an exception may wait for other ranks


def check_resume(trainer: RLTrainer) -> None:
    """Saves all of a checkpoint but weights and optimizers in memory, loads and compares it; called on all ranks.

    Raises:
        LightRLError: if a part cannot be loaded, or is another one then.
    """
    checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    state = {name: part for name, part in checkpoint.items() if name not in ("state_dict", "optimizer_states")}
    problem = ranks_of(trainer.strategy).broadcast_json(_first_problem(state))
    if problem is not None:
        raise mark_as_on_all_ranks(LightRLError(problem))
    log.info("fast_dev_run: the state of loops, callbacks, module and data module is the same after a checkpoint.")


def _first_problem(state: dict[str, Any]) -> str | None:
    """Why a checkpoint would not keep this state; None if it does."""
    leaves, structure = tree_flatten_with_path(state)
    try:
        loaded, loaded_structure = tree_flatten_with_path(_saved_and_loaded(state))
    except Exception as error:  # noqa: BLE001  # whatever the classes of a user's state raise when they are pickled
        name = next((keystr(path) for path, value in leaves if not _can_be_loaded(value)), "")
        return (
            f"The checkpoint cannot be loaded with weights_only=True, because of checkpoint{name}: {error} The state "
            "of callbacks, module and data module must be tensors and plain Python. Convert it there."
        )
    pairs = zip(leaves, loaded, strict=False)
    different = [keystr(path) for (path, left), (_, right) in pairs if not _are_equal(left, right)]
    if not different and structure == loaded_structure:
        return None
    name = different[0] if different else ""
    return f"checkpoint{name} differs after it was saved and loaded. Save tensors and plain Python there."


def _saved_and_loaded(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def _can_be_loaded(value: Any) -> bool:
    try:
        _saved_and_loaded(value)
    except Exception:  # noqa: BLE001  # as above; the caller names the value
        return False
    return True


def _are_equal(left: Any, right: Any) -> bool:
    """NaN equals NaN here."""
    if not isinstance(left, torch.Tensor):
        return bool(left == right or (left != left and right != right))
    if not isinstance(right, torch.Tensor) or left.shape != right.shape:
        return False
    return bool(((left == right) | ((left != left) & (right != right))).all())
