"""The `routes` column: the experts that the engine chose for each token (models/routes.py)."""

from __future__ import annotations

from dataclasses import dataclass

from lightrl.columns.column import Column, TokenArray, Values
from lightrl.errors import EngineError

NATIVE = 255  # the value of every byte of a token's routes if its experts are unknown


@dataclass(frozen=True)
class _Routes(Column):
    """A completion's routes include its prompt's, but not its last token's, because no model has read that token."""

    def extended(self, before: Values | None, num_before: int, new: Values | None, num_new: int) -> Values | None:
        """Extends the routes. If the engine has recomputed tokens of the prompt, their new routes replace the old ones.

        Raises:
            EngineError: if the number of routes does not match the number of tokens.
        """
        if new is None:
            return super().extended(before, num_before, None, num_new)
        import numpy as np

        num_rows = num_before + num_new - 1
        if num_rows < 1 or len(new) % num_rows:
            raise EngineError(
                f"The engine returned {len(new)} bytes of routes for a prompt of {num_before} tokens and a "
                f"completion of {num_new}. Each token except the last needs the same number of bytes."
            )
        rows = new.numpy().reshape(num_rows, -1)
        rows = np.concatenate([rows, np.full_like(rows[:1], NATIVE)])  # the last token's routes are unknown
        if before is not None:
            old = before.numpy().reshape(num_before, -1)
            is_known = (rows[:num_before] != NATIVE).any(1, keepdims=True)
            rows[:num_before] = np.where(is_known, rows[:num_before], old)
        return TokenArray.of_stored(rows.tobytes(), b"", self.code)

    def of_completion(self, values: Values, num_prompt: int, num_tokens: int) -> Values:
        return self.cut(values, num_tokens, [(0, num_tokens - 1)])


ROUTES = _Routes(
    "routes", "B", fill=NATIVE, width=None, is_hidden=True, is_model_input=True, is_of_sampler=True
)  # fmt: skip
