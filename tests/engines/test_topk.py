"""The most likely tokens that servers return beside each sampled one, and engines that return none."""

import json
import math
from typing import Any

import pytest

from lightrl import FakeEngine, Sampling
from lightrl.columns import NO_TOKEN
from lightrl.engines.servers.request import CompletionDraft, MalformedAnswer
from lightrl.engines.sglang import generation as sglang
from lightrl.engines.vllm import generation as vllm

VERSIONS = [{"version": "7", "start": 0, "end": 2}]


def sglang_answer(**more: Any) -> bytes:
    meta = {
        "finish_reason": {"type": "length"}, "weight_versions": VERSIONS, "prompt_tokens": 1,
        "output_token_logprobs": [[-0.5, 4, None], [-3.0, 9, None]], **more,
    }  # fmt: skip
    return json.dumps({"output_ids": [4, 9], "meta_info": meta}).encode()


def vllm_answer(top: list[list[tuple[float, int]]]) -> bytes:
    entries = [
        {"token_id": token, "logprob": logprob,
         "top_logprobs": [{"logprob": value, "token_id": other} for value, other in pairs]}
        for token, logprob, pairs in zip((4, 9), (-0.5, -3.0), top, strict=True)
    ]  # fmt: skip
    choice = {"token_ids": [4, 9], "logprobs": {"content": entries}, "weight_versions": VERSIONS}
    return json.dumps({"choices": [{**choice, "finish_reason": "length"}]}).encode()


TOP = [[(-0.5, 4), (-1.5, 2), (-2.0, 7)], [(-1.0, 3), (-1.25, 4), (-3.0, 9)]]
TRIPLES = [[[logprob, token, None] for logprob, token in pairs] for pairs in TOP]


def columns_of(generation: Any, content: bytes, **sampling: Any) -> dict[str, list[float]]:
    draft = CompletionDraft([1], Sampling(max_new_tokens=2, **sampling), vocab_size=61)
    draft.add(generation.read_answer(content), "http://there")
    return {name: list(values) for name, values in draft.completion().columns.items()}


def test_the_most_likely_tokens_of_each_sampled_one_become_columns():
    draft = CompletionDraft([1], Sampling(max_new_tokens=2, topk_logprobs=2), vocab_size=61)
    assert sglang.request_of(draft, "r", "k")["top_logprobs_num"] == 2
    assert vllm.request_of(draft, "r", "k")["sampling_params"]["logprobs"] == 2
    expected = {"behavior_topk_ids": [4, 2, 3, 4], "behavior_topk_logprobs": [-0.5, -1.5, -1.0, -1.25]}
    assert columns_of(sglang, sglang_answer(output_top_logprobs=TRIPLES), topk_logprobs=2) == expected
    sampled_first = [TOP[0], [TOP[1][2], *TOP[1][:2]]]  # vLLM adds the sampled token to the others
    assert columns_of(vllm, vllm_answer(sampled_first), topk_logprobs=2) == expected
    assert "top_logprobs_num" not in sglang.request_of(CompletionDraft([1], Sampling()), "r", "k")
    assert columns_of(sglang, sglang_answer(output_top_logprobs=TRIPLES)) == {}


def test_with_truncated_sampling_they_are_within_the_support():
    # Within the first support every probability is exp(0.25) times as large; the second has one token.
    masks = {"output_token_sampling_mask": [[4, 7], [9]], "output_token_sampling_logprobs": [-0.25, 0.0]}
    found = columns_of(sglang, sglang_answer(output_top_logprobs=TRIPLES, **masks), topk_logprobs=2, top_k=2)
    assert found["behavior_topk_ids"] == [4, 7, 9, 0]
    assert found["behavior_topk_logprobs"] == [-0.25, -1.75, 0.0, NO_TOKEN]
    likely = [[*TOP[0][:2], (-9999.0, 7)], [*TOP[1], (-9999.0, 8)]]
    found = columns_of(vllm, vllm_answer(likely), topk_logprobs=3, top_k=40)
    assert found["behavior_topk_logprobs"] == [-0.5, -1.5, NO_TOKEN, -1.0, -1.25, -3.0]


@pytest.mark.parametrize("generation", [sglang, vllm])
@pytest.mark.parametrize(
    ("pair", "problem"),
    [((math.nan, 2), "a logprob of nan"), ((0.5, 2), "a logprob of 0.5"), ((-1.0, 61), "a token id of 61"),
     ((-1.0, -1), "a token id of -1"), ((-1.0, 2**40), "tokens"), ((-1.0, "2"), "tokens"), ((None, 2), "tokens")],
)  # fmt: skip
def test_impossible_likely_tokens_are_a_malformed_answer(generation: Any, pair: tuple[Any, Any], problem: str) -> None:
    top = [[TOP[0][0], pair], TOP[1][:2]]
    triples = [[[*each, None] for each in pairs] for pairs in top]
    content = vllm_answer(top) if generation is vllm else sglang_answer(output_top_logprobs=triples)
    with pytest.raises(MalformedAnswer, match=problem):
        columns_of(generation, content, topk_logprobs=2)


def test_an_engine_or_server_that_returns_no_such_tokens_is_refused_by_name():
    with pytest.raises(ValueError, match=r"topk_logprobs=2 needs an engine.* but FakeEngine does not"):
        FakeEngine().check_sampling(Sampling(topk_logprobs=2))
    with pytest.raises(MalformedAnswer, match="did not return the behavior_topk_ids of its tokens"):
        columns_of(sglang, sglang_answer(), topk_logprobs=2)
