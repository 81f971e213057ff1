"""The `behavior_topk_ids` and `behavior_topk_logprobs` columns: the most likely tokens at each sampled token.

Both have K = `Sampling.topk_logprobs` entries per sampled token, the most likely first; a pair takes 8 bytes. With
truncated sampling they are the most likely tokens of the support, with their logprobs within the support.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lightrl.columns.column import Column, TokenArray, Values

NO_TOKEN = -1e4  # the logprob of an entry without a token; its probability is 0


@dataclass(frozen=True)
class _TopK(Column):
    required_if: ClassVar[str] = "topk_logprobs"

    def requirement(self, sampling: Any) -> str:
        return (
            f"sampling.topk_logprobs={sampling.topk_logprobs} asks for the most likely tokens and their logprobs. Set "
            "it to 0, or return both"
        )


TOPK_IDS = _TopK("behavior_topk_ids", "i", width=None, is_hidden=True)
TOPK_LOGPROBS = _TopK("behavior_topk_logprobs", "f", fill=NO_TOKEN, width=None, is_hidden=True)
TOPK_NAMES = (TOPK_IDS.name, TOPK_LOGPROBS.name)


def topk_columns(tokens: Iterable[Sequence[tuple[float, int]]], num: int) -> dict[str, Values]:
    """Makes both columns from (logprob, token id) pairs in any order, for each sampled token.

    The `num` most likely pairs are kept. If the vocabulary or support has fewer, entries without a token are added.
    """
    ids: list[int] = []
    logprobs: list[float] = []
    for pairs in tokens:
        kept = sorted(pairs, key=lambda pair: (-pair[0], pair[1]))[:num]
        kept += [(NO_TOKEN, 0)] * (num - len(kept))
        ids += [token for _, token in kept]
        logprobs += [max(float(logprob), NO_TOKEN) for logprob, _ in kept]  # finite, even if it is -inf
    return {TOPK_IDS.name: TokenArray(ids, "i"), TOPK_LOGPROBS.name: TokenArray(logprobs, "f")}


def topk_parts(ids: Any, logprobs: Any, widths: Sequence[int]) -> list[dict[str, bytes]]:
    """Returns each row's ids and logprobs at one position as bytes, by column name; {} for a row of width 0.

    Args:
        ids, logprobs: tensors [n, K], the most likely first.
        widths: the number of likely tokens to return for each row, [n].
    """
    import numpy as np

    num = max(widths, default=0)
    missing = ((0, 0), (0, max(0, num - ids.shape[1])))  # padding if a row asks for more tokens than the vocabulary has
    all_ids = np.pad(ids.cpu().numpy().astype(np.int32), missing)
    all_logprobs = np.pad(logprobs.cpu().numpy().clip(min=NO_TOKEN), missing, constant_values=NO_TOKEN)
    return [
        dict(zip(TOPK_NAMES, (row_ids[:width].tobytes(), row_logprobs[:width].tobytes()), strict=True)) if width else {}
        for row_ids, row_logprobs, width in zip(all_ids, all_logprobs, widths, strict=True)
    ]
