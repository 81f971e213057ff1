"""Settings that a run reads once: setting one while a trainer runs would reach only a part of the run."""

from __future__ import annotations

from typing import Any


class FixedSettings:
    """The base of modules that refuse new values of `fixed_settings` while a trainer fits them."""

    fixed_settings: frozenset[str] = frozenset()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.fixed_settings and self._is_fitted():
            raise ValueError(
                f"{type(self).__name__}.{name} cannot be set during a run, which has read it: its parts would have "
                "different values. Resume its checkpoint with the new value; for a learning rate, set the optimizer's."
            )
        super().__setattr__(name, value)

    def _is_fitted(self) -> bool:
        try:
            trainer: Any = self.trainer  # type: ignore[attr-defined]
            return bool(trainer.state.status == "running" and trainer.optimizers)
        except (AttributeError, RuntimeError):  # in the constructor, or not attached
            return False
