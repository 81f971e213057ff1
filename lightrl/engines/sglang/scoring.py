"""Model calls to an SGLang server: ServedScores gets trajectories' logprobs, and ServedRewards gets their rewards.

Shapes: B trajectories, T tokens, K most likely tokens.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from lightrl.checks.bounds import finite_number
from lightrl.dataflow import ModelCall
from lightrl.engines.servers.addresses import TOKEN_VARIABLE
from lightrl.engines.servers.request import check_numbers
from lightrl.engines.sglang.client import SGLangClient
from lightrl.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor

    from lightrl.experience import Experience
    from lightrl.functional import BranchRows

MAX_CONCURRENT = 64  # trajectories that the server processes at the same time
BATCH = 16  # trajectories per request for rewards

# Logprobs of a trajectory's tokens; with `topk`, (logprob, id) of the top tokens at each position but the first.
_Scores = tuple[list[float], list[list[tuple[float, int]]]]
Item = TypeVar("Item")
Answer = TypeVar("Answer")


def with_server(call: ModelCall, module: Any) -> ModelCall:
    """Returns a copy of an RLModule's call, with a `run` that uses the server at its `url`."""
    assert call.url is not None
    assert call.role is not None
    if module.models()[call.role].spec.head == "scalar":
        return replace(call, run=ServedRewards(call.url, call.timeout_s))
    vocab_size = module.policy_config.get_text_config().vocab_size
    return replace(call, run=ServedScores(call.url, call.timeout_s, call.topk, vocab_size))


@dataclass(frozen=True)
class ServedScores:
    """The `run` of a model call to a server. The LIGHTRL_SERVER_TOKEN environment variable contains the server's token.

    Runs an event loop in the calling thread until the server has answered for all trajectories.
    """

    url: str
    timeout_s: float = 1800.0  # deadline for one trajectory
    topk: int = 0  # K; 0 gets only the logprobs of the trajectories' tokens
    vocab_size: int = 2**31  # the policy's vocabulary size

    def __call__(self, experience: Experience, trajectories: Sequence[Any]) -> Tensor | Mapping[str, Tensor]:
        """Returns the logprobs [B, T] of tokens in the loss mask, at temperature 1, and 0 for other tokens.

        With `topk`, returns a mapping with `teacher_logprobs`, `teacher_topk_ids` and `teacher_topk_logprobs`; the last
        two are [B, T, K].
        """
        import torch

        from lightrl.functional import neutralize

        token_ids, tree = _rows(experience)
        shape = experience.token_ids.shape if tree is None else tree.columns.shape
        tensors = {"teacher_logprobs": torch.zeros(shape)}
        if self.topk:
            tensors["teacher_topk_ids"] = torch.zeros(*shape, self.topk, dtype=torch.int64)
            tensors["teacher_topk_logprobs"] = torch.zeros(*shape, self.topk)
        for index, (scores, top) in enumerate(asyncio.run(self._score(token_ids))):
            tensors["teacher_logprobs"][index, : len(scores)] = torch.tensor(scores)
            if top:
                pairs = torch.tensor(top, dtype=torch.float64)  # from the second token on; ids are exact in float64
                tensors["teacher_topk_logprobs"][index, 1 : len(scores)] = pairs[..., 0].float()
                tensors["teacher_topk_ids"][index, 1 : len(scores)] = pairs[..., 1].long()
        if tree is not None:
            tensors = {name: tree.join(value) for name, value in tensors.items()}  # from one row per conversation
        tensors = dict(zip(tensors, neutralize(experience.loss_mask.cpu(), *tensors.values()), strict=True))
        numbers: dict[str, Any] = {name: value.numpy().ravel() for name, value in tensors.items()}
        ids = numbers.pop("teacher_topk_ids", ())
        try:
            for logprobs in numbers.values():
                check_numbers(ids, logprobs, self.vocab_size)
        except ValueError as error:
            raise EngineError(
                f"The server at {self.url} returned {error}, which no loss can use. Check that its model has the "
                "policy's vocabulary, and its dtype: float16 overflows."
            ) from error
        tensors = {name: value.to(experience.token_ids.device) for name, value in tensors.items()}
        return tensors if self.topk else tensors["teacher_logprobs"]

    async def _score(self, rows: list[list[int]]) -> list[_Scores]:
        async def ask(client: SGLangClient, token_ids: list[int]) -> _Scores:
            answer = await client.ask(
                {
                    "input_ids": token_ids,
                    "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
                    "return_logprob": True,
                    "logprob_start_len": 0,
                    "top_logprobs_num": self.topk,
                },
                timeout_s=self.timeout_s,
            )
            with client.reading(client.generate_path):
                meta = answer["meta_info"]
                scores = meta.get("input_token_logprobs") or []
                self._check_ids([entry[1] for entry in scores], token_ids)
                top = meta.get("input_top_logprobs", [])[1:] if self.topk else []
                if [len(entries) for entries in top] != [self.topk] * (len(token_ids) - 1 if self.topk else 0):
                    raise EngineError(
                        f"The server at {self.url} returned top tokens at {len(top)} positions instead of "
                        f"{self.topk} at each of {len(token_ids) - 1}. Lower teacher_topk to at most the "
                        "server's vocabulary, or use SGLang 0.5.21 or later."
                    )
                pairs = [[(float(entry[0]), int(entry[1])) for entry in entries] for entries in top]
                logprobs = [0.0, *(float(entry[0]) for entry in scores[1:])]
            return logprobs, pairs

        return await _all_answers(self.url, ask, rows, MAX_CONCURRENT)

    def _check_ids(self, scored: list[int], sent: list[int]) -> None:
        if len(scored) != len(sent):
            raise EngineError(
                f"The server at {self.url} returned logprobs for {len(scored)} of {len(sent)} tokens. Use SGLang "
                "0.5.21 or later."
            )
        for actual, expected in zip(scored, sent, strict=True):
            if actual != expected:
                raise EngineError(
                    f"The server at {self.url} returned the logprob of token {actual} instead of token {expected}. "
                    "SGLang 0.5.23 does this for the last id of a vocabulary. Set the model's path instead of url, or "
                    "use a checkpoint with a larger vocabulary than the tokenizer."
                )


@dataclass(frozen=True)
class ServedRewards:
    """Gets rewards from a reward model on a server started with `--is-embedding`; works like ServedScores.

    In SGLang, Qwen2's and Qwen3's heads have a bias. transformers checkpoints have none, so SGLang initializes it at
    random, which shifts all rewards; docs/model-calls.md shows how to set it to 0.
    """

    url: str
    timeout_s: float = 1800.0  # deadline for a request with BATCH trajectories

    def __call__(self, experience: Experience, trajectories: Sequence[Any]) -> Tensor:
        """Returns the reward model's output at the last token of each trajectory, [B]."""
        import torch

        rows, tree = _rows(experience)
        if tree is not None:  # keeps each trajectory's last conversation
            rows = list(dict(zip(tree.trees.tolist(), rows, strict=True)).values())
        batches = [rows[start : start + BATCH] for start in range(0, len(rows), BATCH)]
        rewards = [reward for batch in asyncio.run(self._reward(batches)) for reward in batch]
        return torch.tensor(rewards, dtype=torch.float32, device=experience.token_ids.device)

    async def _reward(self, batches: list[list[list[int]]]) -> list[list[float]]:
        async def ask(client: SGLangClient, batch: list[list[int]]) -> list[float]:
            answer = await client.classify(batch, timeout_s=self.timeout_s)
            sizes = [len(numbers) for numbers in answer]
            if sizes != [1] * len(batch):
                raise EngineError(
                    f"The server at {self.url} returned {max(sizes, default=0)} numbers instead of 1 for {len(sizes)} "
                    f"of {len(batch)} trajectories. Start it with an exported RewardModel, whose config has one label."
                )
            rewards = [finite_number(numbers[0]) for numbers in answer]
            for reward, numbers in zip(rewards, answer, strict=True):
                if reward is None:
                    raise EngineError(
                        f"The server at {self.url} returned the reward {numbers[0]!r:.80}. It must be a finite number "
                        "up to 1e15. Check the weights of its head, and its dtype: float16 overflows."
                    )
            return [reward for reward in rewards if reward is not None]

        return await _all_answers(self.url, ask, batches, MAX_CONCURRENT // BATCH)


def _rows(experience: Experience) -> tuple[list[list[int]], BranchRows | None]:
    """Returns the token ids of each trajectory (of each conversation, if some are trees), and the mapping back."""
    from lightrl.functional import BranchRows

    token_ids, lengths, tree = experience.token_ids, experience.lengths, None
    if experience.gaps is not None:
        tree = BranchRows.of(experience.gaps, lengths)
        token_ids, lengths = tree.spread(token_ids), tree.lengths
    rows = zip(token_ids.tolist(), lengths.tolist(), strict=True)
    return [ids[:length] for ids, length in rows], tree


async def _all_answers(
    url: str, ask: Callable[[SGLangClient, Item], Awaitable[Answer]], items: Sequence[Item], max_concurrent: int
) -> list[Answer]:
    """Calls `ask` for all items; returns the answers in order. A failure or cancellation cancels all requests."""
    client = SGLangClient(url, token=os.environ.get(TOKEN_VARIABLE))
    limit = asyncio.Semaphore(max_concurrent)

    async def answer(item: Item) -> Answer:
        async with limit:
            return await ask(client, item)

    tasks = [asyncio.ensure_future(answer(item)) for item in items]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await client.close()
