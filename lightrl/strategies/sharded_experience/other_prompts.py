"""OtherPrompts: the rows that one model reads, and the prompts that it reads instead of the policy's.

    policy          prompt p p p | answer a a | observation o | answer a
    other model     hint h h h h h | a a o a     the same tokens after the prompt, at other positions

Outputs are moved back to the policy's positions, and are 0 on the prompt, which has no loss tokens.

Shapes: B trajectories, T tokens; b trajectories that the model reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from lightrl.columns import TokenArray, column_of
from lightrl.strategies.ranks.processes import Ranks
from lightrl.strategies.sharded_experience.experience import ShardedExperience, TokenRows
from lightrl.trajectory import Trajectory

SAME: list[int] = []  # stands for the policy's own prompt


@dataclass(frozen=True)
class OtherPrompts:
    """The rows that a model reads, and their prompts.

    Args:
        prompts: for each row, the token ids to read instead of all tokens before the policy's first one; SAME for no
            change; None if the model does not read the row.
        starts: for each row, the index of the policy's first token.
    """

    prompts: Sequence[list[int] | None]
    starts: Sequence[int]

    @classmethod
    def share(cls, make: Any, trajectories: Sequence[Trajectory], ranks: Ranks) -> OtherPrompts:
        """Makes OtherPrompts from rank 0's trajectories, and sends them to all ranks. Collective.

        Raises:
            ValueError: if a trajectory with images or several conversations (so no single prompt) gets another prompt.
        """
        values = None
        if ranks.is_main:
            prompts = list(make(trajectories))
            for item, prompt in zip(trajectories, prompts, strict=True):
                if prompt and item.first_branch < len(item.token_ids):
                    raise ValueError(
                        f"The trajectory for prompt {item.prompt.id!r} has several conversations, so no other prompt "
                        "can replace its own. Leave teacher_prompt out, or use a workflow with one conversation."
                    )
                if prompt and (item.prompt.images or item.images):
                    raise ValueError(
                        f"The trajectory for prompt {item.prompt.id!r} has images, which another prompt's token ids do "
                        "not contain. Leave teacher_prompt out, or return None for rows with images."
                    )
            values = [prompts, [*map(cls.start_of, trajectories)]]
        return cls(*ranks.broadcast_json(values))

    @staticmethod
    def start_of(trajectory: Trajectory) -> int:
        start = 0
        for version, length in TokenArray[int](trajectory.weight_versions, "i").runs():
            if version >= 0:
                break
            start += length
        return start

    @property
    def rows(self) -> list[int]:
        """The rows that the model reads."""
        return [row for row, prompt in enumerate(self.prompts) if prompt is not None]

    def read(self, experience: ShardedExperience) -> ShardedExperience:
        """Returns these b rows with the other prompts' tokens; only fields that models read.

        A new prompt's tokens get each column's fill value. Routes, recorded with the policy's prompt, are left out.
        """
        rows = self.rows
        has_new = any(self.prompts[row] for row in rows)
        part = experience.rollout_part(is_sampler=not has_new).select(rows)
        if not has_new:
            return part
        lengths = part.lengths.tolist()
        tokens = {}
        for name, values in part.tokens.items():
            changed = [
                None if old is None else self._replaced(name, old, row, length)
                for old, row, length in zip(values.rows, rows, lengths, strict=True)
            ]
            tokens[name] = TokenRows(changed, values.empty)
        longer = [len(self.prompts[row] or ()) - self.starts[row] if self.prompts[row] else 0 for row in rows]
        new_lengths = torch.tensor([length + more for length, more in zip(lengths, longer, strict=True)])
        return replace(part, rows={**part.rows, "lengths": new_lengths}, tokens=tokens)

    def completed(
        self, outputs: Mapping[str, Any], experience: ShardedExperience, names: Sequence[str], topk: int
    ) -> dict[str, TokenRows]:
        """Returns the outputs of `read` for all rows, B, at the policy's positions.

        Rows that the model did not read keep the outputs of an earlier call, or 0.
        """
        return {name: self._aligned(name, outputs.get(name), experience, topk) for name in names}

    def _aligned(self, name: str, output: TokenRows | None, experience: ShardedExperience, topk: int) -> TokenRows:
        if output is None:  # the model read no row
            is_topk = name.endswith(("_topk_ids", "_topk_logprobs"))
            empty = np.zeros((0, topk) if is_topk else 0, np.int64 if name.endswith("_ids") else np.float32)
        else:
            empty = output.empty
        earlier, places = experience.tokens.get(name), {row: place for place, row in enumerate(self.rows)}
        rows: list[Any] = []
        for row, token_ids in enumerate(experience.tokens["token_ids"].rows):
            values = None if output is None or row not in places else output.rows[places[row]]
            prompt, start = self.prompts[row], self.starts[row]
            if values is not None and prompt:
                values = np.concatenate([np.zeros((start, *empty.shape[1:]), empty.dtype), values[len(prompt) :]])
            if values is None and earlier is not None:
                values = earlier.rows[row]
            if values is None and token_ids is not None and row not in places:
                values = np.zeros((len(token_ids), *empty.shape[1:]), empty.dtype)
            rows.append(values)
        return TokenRows(rows, empty)

    def _replaced(self, field: str, values: Any, row: int, length: int) -> Any:
        """Returns a row's values in `field`, with the new prompt's values instead of the old prompt's."""
        prompt, start, column = self.prompts[row], self.starts[row], column_of(field)
        if not prompt:
            return values
        assert column is not None
        if column.is_coded:
            rest = column.cut(TokenArray.of_stored(values.tobytes(), b"", column.code), length, [(start, length)])
            joined = column.joined([(None, len(prompt)), (rest, length - start)])
            assert joined is not None
            return joined.numpy()
        new = np.full((len(prompt), *values.shape[1:]), column.fill, values.dtype)
        if field == "token_ids":
            new[:] = prompt
        return np.concatenate([new, values[start:]])
