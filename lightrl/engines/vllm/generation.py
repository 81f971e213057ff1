"""Pure functions that make a completion's next request to vLLM and parse the answer.

Only one of vLLM's runners returns the support of truncated sampling, and only if every request has `top_k`. So requests
ask for the most likely tokens instead; tokens outside the support have no finite logprob.

Source: vLLM 0.32.0, entrypoints/scale_out/token_in_token_out/protocol.py and serving.py.
"""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np

from lightrl.columns import ROUTES
from lightrl.engines.servers.request import Answer, CompletionDraft, RawAnswer, parse_answer, request_seed
from lightrl.trajectory import MAX_SUPPORT

MAX_LOGPROBS = MAX_SUPPORT + CompletionDraft.num_ties  # per token
PREFIX = "generate-tokens-"  # vLLM prepends it to a request's id
_IMPOSSIBLE = -9999.0  # the logprob that vLLM sends for -inf


def request_of(draft: CompletionDraft, rid: str, cache_key: str) -> dict[str, Any]:
    """Returns the request for the missing tokens; requests with the same `cache_key` share cached prefixes."""
    if draft.attachments is not None:
        raise ValueError("VLLMEngine does not support images yet. Use SGLangEngine for a policy that reads them.")
    sampling, num_generated = draft.sampling, len(draft.token_ids)
    num_support = min(sampling.max_support + draft.num_ties, MAX_LOGPROBS) if sampling.is_truncated else 0
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.max_support,
        "max_tokens": sampling.max_new_tokens - num_generated,
        "min_tokens": max(0, sampling.min_new_tokens - num_generated),
        # vLLM's random numbers restart with each request, so a later request needs a different seed.
        "seed": request_seed(request_seed(sampling.seed, draft.sample), num_generated),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,
        "detokenize": False,
        # A request for more logprobs than the vocabulary has tokens crashes vLLM.
        "logprobs": min(max(num_support, sampling.topk_logprobs), draft.vocab_size),
    }
    if sampling.grammar:
        params["structured_outputs"] = {"structural_tag": sampling.grammar}
    token_ids = [*draft.prompt, *draft.token_ids]
    return {"request_id": rid, "token_ids": token_ids, "sampling_params": params, "cache_salt": cache_key}


def read_answer(content: bytes) -> Answer:
    """Parses an answer from `/inference/v1/generate`; raises ValueError if it is not JSON."""
    return parse_answer(content, _parse)


def _parse(answer: Any) -> RawAnswer:
    (choice,) = answer["choices"]
    entries = choice["logprobs"]["content"] or []
    top_tokens = [entry["top_logprobs"] for entry in entries]
    supports = [[token["token_id"] for token in tokens if token["logprob"] > _IMPOSSIBLE] for tokens in top_tokens]
    # If sampling is not truncated, the sampled token need not be among the most likely ones.
    are_complete = all(entry["token_id"] in support for entry, support in zip(entries, supports, strict=True))
    full_sizes = (
        len(support) for support, tokens in zip(supports, top_tokens, strict=True) if len(support) == len(tokens)
    )
    num_read = (answer.get("usage") or {}).get("prompt_tokens")
    return RawAnswer(
        choice["token_ids"],
        [entry["logprob"] for entry in entries],
        [entry["token_id"] for entry in entries],
        choice["weight_versions"],
        str(choice["finish_reason"]),
        supports if are_complete and any(len(tokens) > 1 for tokens in top_tokens) else None,
        {ROUTES.name: _expert_ids(choice.get("routed_experts"), num_read and num_read + len(entries) - 1)},
        full_support=min(full_sizes, default=None),
        top=[
            [(token["logprob"], token["token_id"]) for token in tokens if not token["logprob"] <= _IMPOSSIBLE]  # or NaN
            for tokens in top_tokens
        ],
        rid=str(answer.get("request_id")).removeprefix(PREFIX),
        num_read=num_read,
    )


def _expert_ids(text: str | None, num_tokens: int | None) -> str | None:
    """Converts expert ids [tokens, layers, k], including dense layers, from base64 of `.npy` to base64 of int32."""
    if text is None:
        return None
    ids = np.lib.format.read_array(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    if ids.dtype.kind not in "iu" or ids.ndim != 3 or num_tokens not in (None, len(ids)):
        raise ValueError(f"expert ids of dtype {ids.dtype} and shape {list(ids.shape)} for {num_tokens} tokens")
    return base64.b64encode(ids.astype(np.int32).tobytes()).decode()
