"""What models behind an SGLang server say of whole trajectories: ServedScores logprobs, ServedRewards one number each.

Shapes: B trajectories, T tokens, K likeliest tokens.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from lightrl.dataflow import ModelCall
from lightrl.engines.sglang.addresses import TOKEN_VARIABLE
from lightrl.engines.sglang.client import SGLangClient
from lightrl.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor

    from lightrl.experience import Experience

MAX_CONCURRENT = 64  # trajectories that the server has at a time
BATCH = 16  # of them in a request for rewards

# Logprobs of a trajectory's tokens; at each place but the first the (logprob, id) of the likeliest, if asked for.
_Scores = tuple[list[float], list[list[tuple[float, int]]]]
Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


def with_server(call: ModelCall, *, is_scalar: bool) -> ModelCall:
    """A call with a `url`, with the function that asks the server there.

    Args:
        is_scalar: whether the server's model has a scalar head.
    """
    assert call.url is not None
    run = ServedRewards(call.url, call.timeout_s) if is_scalar else ServedScores(call.url, call.timeout_s, call.topk)
    return replace(call, run=run)


@dataclass(frozen=True)
class ServedScores:
    """The `run` of a model call that a server answers; its token is that of LIGHTRL_SERVER_TOKEN.

    It has an event loop of its own, in the thread of the call, and waits until all trajectories are scored.
    """

    url: str
    timeout_s: float = 1800.0  # deadline of one trajectory
    topk: int = 0  # K; 0 asks for the tokens that were drawn alone

    def __call__(self, experience: Experience, trajectories: Sequence[Any]) -> Tensor | Mapping[str, Tensor]:
        """Logprobs of the loss tokens at temperature 1, [B, T], 0 elsewhere.

        With `topk` under the key `teacher_logprobs`, beside `teacher_topk_ids` and `teacher_topk_logprobs`, [B, T, K].

        Raises:
            EngineError: if the server does not answer, or knows other tokens.
        """
        import torch

        from lightrl.functional import neutralize

        shape = experience.token_ids.shape
        found = {"teacher_logprobs": torch.zeros(shape)}
        if self.topk:
            found["teacher_topk_ids"] = torch.zeros(*shape, self.topk, dtype=torch.int64)
            found["teacher_topk_logprobs"] = torch.zeros(*shape, self.topk)
        for index, (scores, likeliest) in enumerate(asyncio.run(self._score(_rows(experience)))):
            found["teacher_logprobs"][index, : len(scores)] = torch.tensor(scores)
            if likeliest:
                pairs = torch.tensor(likeliest, dtype=torch.float64)  # exact for ids
                found["teacher_topk_logprobs"][index, 1 : len(scores)] = pairs[..., 0].float()
                found["teacher_topk_ids"][index, 1 : len(scores)] = pairs[..., 1].long()
        found = dict(zip(found, neutralize(experience.loss_mask.cpu(), *found.values()), strict=True))
        found = {name: value.to(experience.token_ids.device) for name, value in found.items()}
        return found if self.topk else found["teacher_logprobs"]

    async def _score(self, rows: list[list[int]]) -> list[_Scores]:
        """Of each trajectory its tokens' logprobs, and (logprob, id) of the likeliest at each place but the first."""

        async def one(client: SGLangClient, token_ids: list[int]) -> _Scores:
            answer = await client.generate(
                {
                    "input_ids": token_ids,
                    "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
                    "return_logprob": True,
                    "logprob_start_len": 0,
                    "top_logprobs_num": self.topk,
                }
            )
            meta = answer["meta_info"]
            found = meta.get("input_token_logprobs") or []
            self._check_ids([entry[1] for entry in found], token_ids)
            likeliest = meta.get("input_top_logprobs", [])[1:] if self.topk else []
            if [len(place) for place in likeliest] != [self.topk] * (len(token_ids) - 1 if self.topk else 0):
                raise EngineError(
                    f"The server at {self.url} gave the likeliest tokens of {len(likeliest)} places, expected "
                    f"{self.topk} at each of {len(token_ids) - 1}. Lower teacher_topk to at most its vocabulary, or "
                    "use a server of SGLang 0.5.21 or later."
                )
            pairs = [[(float(entry[0]), int(entry[1])) for entry in place] for place in likeliest]
            return [0.0, *(float(entry[0]) for entry in found[1:])], pairs

        return await _all_asked(self.url, self.timeout_s, one, rows, MAX_CONCURRENT)

    def _check_ids(self, found: list[int], sent: list[int]) -> None:
        if len(found) != len(sent):
            raise EngineError(
                f"The server at {self.url} gave logprobs of {len(found)} tokens, expected those of the {len(sent)} that"
                " it was sent. Use a server of SGLang 0.5.21 or later."
            )
        for got, asked in zip(found, sent, strict=True):
            if got != asked:
                raise EngineError(
                    f"The server at {self.url} gave the logprob of token {got} in the place of token {asked}, expected "
                    f"that of {asked}. SGLang 0.5.23 does so for the last id of a vocabulary: give the model's path "
                    "instead of url, or a checkpoint whose vocabulary is larger than the tokenizer's."
                )


@dataclass(frozen=True)
class ServedRewards:
    """As ServedScores, of a server with a reward model, started with `--is-embedding`.

    SGLang's Qwen2 and Qwen3 heads have a bias; of a checkpoint without one, which is what transformers writes, it is a
    random number, by which all rewards of this server are off. docs/model-calls.md says how to give it a 0.
    """

    url: str
    timeout_s: float = 1800.0  # deadline of one request of BATCH trajectories

    def __call__(self, experience: Experience, trajectories: Sequence[Any]) -> Tensor:
        """The reward model's number after each trajectory's last token, [B].

        Raises:
            EngineError: if the server does not answer, or its model gives something else than one number.
        """
        import torch

        rows = _rows(experience)
        batches = [rows[start : start + BATCH] for start in range(0, len(rows), BATCH)]
        found = [reward for batch in asyncio.run(self._reward(batches)) for reward in batch]
        return torch.tensor(found, dtype=torch.float32, device=experience.token_ids.device)

    async def _reward(self, batches: list[list[list[int]]]) -> list[list[float]]:
        async def one(client: SGLangClient, batch: list[list[int]]) -> list[float]:
            answer = await client.classify(batch, timeout_s=self.timeout_s)
            sizes = [len(numbers) for numbers in answer]
            if sizes != [1] * len(batch):
                raise EngineError(
                    f"The server at {self.url} gave {len(sizes)} trajectories {max(sizes, default=0)} numbers each, "
                    f"expected 1 for each of {len(batch)}. Start it with the export of a RewardModel, whose config "
                    "has one label."
                )
            return [float(numbers[0]) for numbers in answer]

        return await _all_asked(self.url, self.timeout_s, one, batches, MAX_CONCURRENT // BATCH)


def _rows(experience: Experience) -> list[list[int]]:
    """The token ids of each trajectory without padding."""
    lengths = experience.lengths.tolist()
    return [ids[:length] for ids, length in zip(experience.token_ids.tolist(), lengths, strict=True)]


async def _all_asked(
    url: str,
    timeout_s: float,
    ask: Callable[[SGLangClient, Asked], Awaitable[Answer]],
    items: Sequence[Asked],
    max_concurrent: int,
) -> list[Answer]:
    """The answers in the order of `items`; the first that fails, or a cancellation, cancels the others."""
    client = SGLangClient(url, token=os.environ.get(TOKEN_VARIABLE), generate_timeout_s=timeout_s)
    places = asyncio.Semaphore(max_concurrent)

    async def one(item: Asked) -> Answer:
        async with places:
            return await ask(client, item)

    tasks = [asyncio.ensure_future(one(item)) for item in items]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await client.close()
