"""What columns_run.py's engines say of their tokens; workflow workers import this file, and no declaration of it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lightrl.columns import TokenArray
from lightrl.engines.servers.request import Answer
from lightrl.engines.sglang.client import SGLangClient


def doubts(token_ids: Sequence[int], logprobs: Sequence[float]) -> Any:
    """A number for each token, that no two tokens of a test share unless they are the same."""
    return np.asarray(token_ids, np.float32) - 3 * np.asarray(logprobs, np.float32)


class DoubtingClient(SGLangClient):
    @staticmethod
    def read_answer(content: bytes) -> Answer:
        answer = SGLangClient.read_answer(content)
        values: TokenArray[float] = TokenArray(doubts(answer.token_ids, answer.logprobs), "f")
        return replace(answer, columns={**answer.columns, "doubt": values})
