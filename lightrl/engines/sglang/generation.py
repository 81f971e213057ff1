"""Pure functions that make a completion's next request to SGLang's `/generate` and parse the answer."""

from __future__ import annotations

from typing import Any

from lightrl.columns import ROUTES
from lightrl.engines.servers.request import Answer, CompletionDraft, RawAnswer, parse_answer, request_seed

# Column → SGLang's names for it: the server argument, the field in a request, the field in an answer.
RETURNED = {ROUTES.name: ("enable_return_routed_experts", "return_routed_experts", "routed_experts")}


def request_of(draft: CompletionDraft, rid: str, cache_key: str) -> dict[str, Any]:
    """Returns the request to `/generate` for the missing tokens; equal `cache_key`s share cached prefixes."""
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
    else:  # only if there are no stop ids: with `ignore_eos`, SGLang would also ignore them
        params["ignore_eos"] = True
    if sampling.grammar:
        params["structural_tag"] = sampling.grammar
    attached = draft.attachments
    body = {
        "rid": rid,
        "input_ids": [*draft.prompt, *draft.token_ids] if attached is None else attached.input_ids(draft.token_ids),
        "sampling_params": params,
        "return_logprob": True,
        "extra_key": cache_key,
    }
    if sampling.is_truncated:
        body["return_sampling_mask"] = True
    if sampling.topk_logprobs:  # a number above the vocabulary size would crash SGLang
        body["top_logprobs_num"] = min(sampling.topk_logprobs, draft.vocab_size)
    body |= {RETURNED[name][1]: True for name in draft.encoders}
    if attached is not None:
        body |= attached.body
    return body


def read_answer(content: bytes) -> Answer:
    """Parses an answer from `/generate`; raises ValueError if it is not JSON."""
    return parse_answer(content, _parse)


def _parse(answer: Any) -> RawAnswer:
    meta = answer["meta_info"]
    output_ids = answer.get("output_ids") or []
    triples = meta.get("output_token_logprobs") or []
    truncated = meta.get("output_token_sampling_logprobs")  # over the support
    supports = None if truncated is None else meta["output_token_sampling_mask"]
    top = meta.get("output_top_logprobs")
    likely = top and [[(logprob, token) for logprob, token, *_ in pairs] for pairs in top]
    if likely and truncated is not None:  # SGLang's logprobs of likely tokens are over the vocabulary
        shifts = [within - triple[0] for within, triple in zip(truncated, triples, strict=True)]
        likely = [
            [(logprob + shift, token) for logprob, token in pairs if token in kept]
            for pairs, shift, kept in zip(likely, shifts, map(set, meta["output_token_sampling_mask"]), strict=True)
        ]
    # A server without spans (before 0.5.20) reports one version for all tokens.
    spans = meta.get("weight_versions") or [{"version": meta.get("weight_version"), "start": 0, "end": len(output_ids)}]
    return RawAnswer(
        output_ids,
        [triple[0] for triple in triples] if truncated is None else truncated,
        [triple[1] for triple in triples],
        spans,
        str(meta["finish_reason"]["type"]),
        supports,
        {name: meta.get(names[2]) for name, names in RETURNED.items()},
        top=likely,
        rid=meta.get("id"),
        num_read=meta.get("prompt_tokens"),
    )
