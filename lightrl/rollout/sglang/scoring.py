"""ServedScores: logprobs of whole trajectories from a model behind an SGLang server, such as a teacher's.

Shapes: B trajectories, T tokens.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightrl.errors import EngineError
from lightrl.rollout.sglang.addresses import TOKEN_VARIABLE
from lightrl.rollout.sglang.client import SGLangClient

if TYPE_CHECKING:
    from torch import Tensor

    from lightrl.experience import Experience

MAX_CONCURRENT = 64  # trajectories that the server has at a time


@dataclass(frozen=True)
class ServedScores:
    """The `run` of a model call that a server answers; its token is that of LIGHTRL_SERVER_TOKEN.

    It has an event loop of its own, in the thread of the call, and waits until all trajectories are scored.
    """

    url: str
    timeout_s: float = 1800.0  # deadline of one trajectory

    def __call__(self, experience: Experience, trajectories: Sequence[Any]) -> Tensor:
        """Logprobs of the loss tokens at temperature 1, [B, T], 0 elsewhere.

        Raises:
            EngineError: if the server does not answer, or knows other tokens.
        """
        import torch

        lengths = experience.lengths.tolist()
        rows = [ids[:length] for ids, length in zip(experience.token_ids.tolist(), lengths, strict=True)]
        found = torch.zeros(experience.token_ids.shape)
        for index, scores in enumerate(asyncio.run(self._score(rows))):
            found[index, : len(scores)] = torch.tensor(scores)
        return torch.where(experience.loss_mask, found.to(experience.token_ids.device), 0.0)

    async def _score(self, rows: list[list[int]]) -> list[list[float]]:
        client = SGLangClient(self.url, token=os.environ.get(TOKEN_VARIABLE), generate_timeout_s=self.timeout_s)
        places = asyncio.Semaphore(MAX_CONCURRENT)

        async def one(token_ids: list[int]) -> list[float]:
            async with places:
                answer = await client.generate(
                    {
                        "input_ids": token_ids,
                        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
                        "return_logprob": True,
                        "logprob_start_len": 0,
                    }
                )
            found = answer["meta_info"].get("input_token_logprobs") or []
            if [entry[1] for entry in found] != token_ids:
                raise EngineError(
                    f"The server at {self.url} gave logprobs of {len(found)} tokens, expected those of the "
                    f"{len(token_ids)} that it was sent. Use a server of SGLang 0.5.21 or later."
                )
            return [0.0, *(float(entry[0]) for entry in found[1:])]

        tasks = [asyncio.ensure_future(one(row)) for row in rows]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await client.close()
