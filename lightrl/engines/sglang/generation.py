"""A completion's next request to SGLang's `/generate`, and the answer. Pure."""

from __future__ import annotations

import gc
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lightrl.engines.servers.request import NO_IDS, Answer, CompletionDraft, check_numbers, request_seed
from lightrl.functional import encode_supports
from lightrl.trajectory import TokenArray


def request_of(draft: CompletionDraft, rid: str, cache_key: str) -> dict[str, Any]:
    """The next request to `/generate`, for the tokens that are missing; shares key-values under `cache_key`."""
    sampling, num_generated = draft.sampling, len(draft.token_ids)
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.max_support,
        "max_new_tokens": sampling.max_new_tokens - num_generated,
        "min_new_tokens": max(0, sampling.min_new_tokens - num_generated),
        "sampling_seed": request_seed(sampling.seed, draft.sample),
    }
    if sampling.stop_token_ids:
        params["stop_token_ids"] = list(sampling.stop_token_ids)
    else:  # SGLang then ignores the stop ids of the request too
        params["ignore_eos"] = True
    images = draft.images
    body = {
        "rid": rid,
        "input_ids": (draft.prompt if images is None else images.prompt) + list(draft.token_ids),
        "sampling_params": params,
        "return_logprob": True,
        "extra_key": cache_key,
    }
    if sampling.is_truncated:
        body["return_sampling_mask"] = True
    if images is not None:
        body["image_data"] = images.image_data
    if draft.adapter is not None:
        body["lora_path"] = draft.adapter.name
    return body


def read_answer(content: bytes) -> Answer:
    """The answer of `/generate`; raises ValueError if it is not JSON.

    A thousand tokens are a thousand short-lived lists in JSON. The garbage collector is off meanwhile: they would
    trigger it, and it would visit all trajectories in memory (0.9 of 2.2 ms per request).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return _read(json.loads(content))
    finally:
        if was_enabled:
            gc.enable()


def _read(answer: Any) -> Answer:
    try:
        meta = answer["meta_info"]
        output_ids = answer.get("output_ids") or []
        finish = str(meta["finish_reason"]["type"])
        triples = meta.get("output_token_logprobs") or []
        is_complete = output_ids == [triple[1] for triple in triples]
        token_ids: TokenArray[int] = TokenArray(output_ids, "i")
        chosen = meta.get("output_token_sampling_logprobs")  # within the supports; the others are before truncation
        logprobs: TokenArray[float] = TokenArray([triple[0] for triple in triples] if chosen is None else chosen, "f")
        check_numbers(token_ids, logprobs)
        supports = None if chosen is None else _support_codes(meta["output_token_sampling_mask"], output_ids)
        versions = _token_versions(meta, len(output_ids)) if output_ids else NO_IDS
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        return Answer(
            problem=f"{str(answer)[:200]} ({error!r}) instead of tokens, logprobs and a numbered weight version"
        )
    if (
        not is_complete
        or {len(versions), len(logprobs)} != {len(token_ids)}
        or finish not in ("stop", "length", "abort")
    ):
        return Answer(
            problem=f"{len(token_ids)} tokens, {len(logprobs)} logprobs, {len(versions)} versions and the finish "
            f"reason {finish!r}; the numbers must be equal, the reason stop, length or abort"
        )
    return Answer(token_ids, logprobs, versions, finish, supports)


def _support_codes(masks: Sequence[Sequence[int]], token_ids: Sequence[int]) -> TokenArray[int]:
    """Codes of the tokens, whose supports are sorted by probability."""
    if len(masks) != len(token_ids) or not all(masks):
        raise ValueError(f"{len(masks)} sampling masks for {len(token_ids)} tokens, or an empty one")
    rows = np.arange(len(masks)).repeat([len(mask) for mask in masks])
    ids = np.fromiter(itertools.chain.from_iterable(masks), np.int64, len(rows))
    codes = encode_supports(rows, ids[np.lexsort((ids, rows))], np.array(token_ids, np.int64))
    return TokenArray.of_stored(b"".join(codes), b"", "B")


def _token_versions(meta: Mapping[str, Any], num_tokens: int) -> TokenArray[int]:
    """One per token, from the spans; a server without spans (before 0.5.20) has one version for all."""
    spans = meta.get("weight_versions")
    if not spans:
        return TokenArray.of_runs([(int(meta["weight_version"]), num_tokens)], "i")
    end = 0
    for span in spans:
        if span["start"] != end:
            raise ValueError(f"a span starts at {span['start']}, not at {end}")
        if not end <= span["end"] <= num_tokens:
            raise ValueError(f"a span from {end} ends at {span['end']}; there are {num_tokens} tokens")
        end = span["end"]
    return TokenArray.of_runs([(int(span["version"]), span["end"] - span["start"]) for span in spans], "i")
