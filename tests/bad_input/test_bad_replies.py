"""Answers of servers with an error: none of their tokens is trained on, and the request goes to another server."""

import asyncio
import json
import math

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from bad_input_rows import each, row
from hypothesis import given, settings
from hypothesis import strategies as st

from lightrl.engines.servers import connection
from lightrl.engines.servers.connection import Connection
from lightrl.engines.servers.request import CompletionDraft, MalformedAnswer
from lightrl.engines.sglang.client import SGLangClient
from lightrl.engines.sglang.generation import read_answer
from lightrl.engines.vllm.client import VLLMClient
from lightrl.errors import EngineError, EngineUnreachable
from lightrl.trajectory import Sampling

pytestmark = pytest.mark.bad_input

VOCABULARY = 8


def reply(token_ids=(3, 4), logprobs=(-1.0, -2.0), spans=None, **meta):
    """What SGLang answers, with these changes."""
    triples = [[logprob, token, None] for logprob, token in zip(logprobs, token_ids, strict=True)]
    told = {"finish_reason": {"type": "length"}, "output_token_logprobs": triples, "weight_version": "5", **meta}
    return {"output_ids": list(token_ids), "meta_info": told | ({"weight_versions": spans} if spans else {})}


def span(start, end, version="5"):
    return {"start": start, "end": end, "version": version}


REPLIES = [
    row("reply: a list", [], "instead of tokens, logprobs and a numbered weight version"),
    row("reply: a logprob of NaN", reply(logprobs=(-1.0, math.nan)), "a logprob of nan"),
    row("reply: a logprob of null", reply(logprobs=(-1.0, None)), "instead of tokens, logprobs"),
    row("reply: a logprob above 0", reply(logprobs=(-1.0, 5.0)), "a logprob of 5"),
    row("reply: a negative token", reply(token_ids=(3, -1)), "a token id of -1"),
    row("reply: a token of 100 bits", reply(token_ids=(3, 2**100)), "instead of tokens"),
    row("reply: a token outside the vocabulary", reply(token_ids=(3, 8)), "token id 8", "outside the trainer's vocabulary (0 to 7)"),
    row("reply: a likely token outside the vocabulary", reply(output_token_sampling_logprobs=[-1, -2], output_token_sampling_mask=[[3], [4, 8]]), "token id 8", "(0 to 7)"),
    row("reply: a negative likely token", reply(output_token_sampling_logprobs=[-1, -2], output_token_sampling_mask=[[3], [-1, 4]]), "a token id of -1"),
    row("reply: more tokens than requested", reply(token_ids=[3] * 5, logprobs=[-1.0] * 5), "generated 5 tokens", "max_new_tokens=4"),
    row("reply: other tokens than logprobs", {**reply(), "output_ids": [3]}, "1 tokens, 2 logprobs"),
    row("reply: a version that is no number", reply(weight_version="default"), "a numbered weight version"),
    row("reply: a fraction of a version", reply(weight_version=5.5), "the weight version 5.5"),
    row("reply: a version that is true", reply(weight_version=True), "the weight version True"),
    row("reply: a version with an underscore", reply(weight_version="1_0"), "the weight version '1_0'"),
    row("reply: a span that ends at 10^9", reply(spans=[span(0, 10**9)]), "a span from 0 ends at 1000000000", "2 tokens"),
    row("reply: a span that ends before it starts", reply(spans=[span(0, 2), span(2, 1)]), "a span from 2 ends at 1"),
    row("reply: a hole between two spans", reply(spans=[span(0, 1), span(2, 2)]), "starts at 2, not at 1"),
    row("reply: an unknown end", reply(finish_reason={"type": "bored"}), "the finish reason 'bored'", "stop, length or abort"),
    row("reply: stopped without a token", reply((), (), finish_reason={"type": "stop"}), "ended a completion without a token"),
    row("reply: as long as requested without a token", reply((), ()), "ended a completion without a token"),
    row("reply: tokens after a stop token", reply((6, 4)), "sampled stop token 6", "did not stop there"),
    row("reply: a stop token too early", reply((6,), (-1.0,)), "sampled stop token 6 before min_new_tokens=2", "a proxy"),
]  # fmt: skip


def added(data: bytes) -> CompletionDraft:
    sampling = Sampling(max_new_tokens=4, min_new_tokens=2, stop_token_ids=(6,))
    draft = CompletionDraft([1], sampling, vocab_size=VOCABULARY)
    draft.add(read_answer(data), "http://there")
    return draft


def test_the_reply_that_the_rows_change_is_good():
    assert added(json.dumps(reply()).encode()).completion().token_ids == [3, 4]


@each(REPLIES)
def test_a_reply_with_an_error_adds_no_token(case):
    with pytest.raises(MalformedAnswer) as caught:
        added(json.dumps(case.given).encode())
    case.check(str(caught.value))
    assert "http://there" in str(caught.value)


@pytest.mark.parametrize("finish", ["abort", "length"])
def test_nothing_is_generated_after_a_stop_token_whatever_the_finish_reason_says(finish):
    draft = CompletionDraft([1], Sampling(max_new_tokens=4, stop_token_ids=(4,)), vocab_size=VOCABULARY)
    draft.add(read_answer(json.dumps(reply(finish_reason={"type": finish})).encode()), "http://there")
    assert (draft.completion().token_ids, draft.finish_reason) == ([3, 4], "stop")


OTHERS = [
    row("reply: to another request", {"id": "q"}, "request r of 1 tokens as if it were q of 1"),
    row("reply: to no request", {"id": None}, "as if it were None of 1"),
    row("reply: to a shorter prompt", {"prompt_tokens": 0}, "of 1 tokens as if it were r of 0"),
    row("reply: without the prompt's length", {"prompt_tokens": None}, "of 1 tokens as if it were r of None"),
    row(
        "reply: a version from the future",
        {"weight_version": "1005"},
        "versions [1005]",
        "only have had versions 4 to 6",
    ),
    row("reply: a version from the past", {"weight_version": "3"}, "versions [3]", "only have had versions 4 to 6"),
    row("reply: a version below 0", {"weight_version": "-1"}, "versions [-1]", "only have had versions 4 to 6"),
]


@each(OTHERS)
def test_a_reply_is_that_of_its_request_by_weights_that_the_server_had(case):
    draft, own = CompletionDraft([1], Sampling(max_new_tokens=4)), {"id": "r", "prompt_tokens": 1}
    draft.check(read_answer(json.dumps(reply(**own)).encode()), "http://there", "r", 4, 6)
    with pytest.raises(MalformedAnswer) as caught:
        draft.check(read_answer(json.dumps(reply(**own | case.given)).encode()), "http://there", "r", 4, 6)
    case.check(str(caught.value))


@pytest.mark.parametrize("client_type", [SGLangClient, VLLMClient])
@pytest.mark.parametrize("changes", [{"id": "q"}, {"prompt_tokens": 5}], ids=["another request's", "of another prompt"])
def test_no_reply_to_another_request_counts_for_scores_and_caches(client_type, changes, monkeypatch):
    async def answer(method, path, body, **settings):
        meta = {"id": body.get("rid"), "prompt_tokens": len(body.get("input_ids") or [])} | changes
        usage = {"prompt_tokens": changes.get("prompt_tokens", len(body.get("token_ids") or []))}
        rid = changes.get("id", body.get("request_id"))
        one = {"meta_info": meta, "request_id": f"generate-tokens-{rid}", "usage": usage}
        return [{"meta_info": {**meta, "id": changes.get("id", body["rid"][0])}}] if path == "/classify" else one

    client = client_type("http://there")
    monkeypatch.setattr(client, "request", answer)
    asked = [client.logprobs([1, 2]), client.num_cached([1], "r", "key", timeout_s=9.0)]
    asked += [client.classify([[1, 2]])] if client_type is SGLangClient else []
    for one in asked:
        with pytest.raises(MalformedAnswer, match=r"http://there answered request .* as if it were"):
            asyncio.run(one)


NAMES = ["output_ids", "meta_info", "finish_reason", "type", "output_token_logprobs", "weight_versions", "weight_version",
         "start", "end", "version"]  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["stop", "length", "5", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=12,
)
META = st.fixed_dictionaries({}, optional=dict.fromkeys(NAMES[2:7], JSON))


@settings(max_examples=300, derandomize=True, deadline=None, database=None)
@given(JSON | META.map(lambda meta: reply(**meta)))
def test_whatever_a_server_answers_is_added_whole_or_refused(answer):
    try:
        draft = added(json.dumps(answer).encode())
    except MalformedAnswer:
        return
    completion = draft.completion()
    assert len(completion.token_ids) == len(completion.logprobs) == len(completion.weight_versions) <= 4
    assert all(0 <= token < VOCABULARY for token in completion.token_ids)
    assert all(math.isfinite(logprob) for logprob in completion.logprobs)


@pytest.mark.parametrize("tells_length", [True, False], ids=["which tells its length", "in pieces"])
def test_an_answer_that_would_fill_the_memory_is_refused(tells_length: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connection, "_MAX_ANSWER_BYTES", 2**20)

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": str(2**40)} if tells_length else {})
        await response.prepare(request)
        while True:  # until the client has had enough
            await response.write(b" " * 2**16)

    async def ask() -> None:
        app = web.Application()
        app.router.add_post("/generate", answer)
        async with TestServer(app) as server:
            client = Connection(f"http://127.0.0.1:{server.port}", num_retries=0)
            try:
                await client.request("POST", "/generate", {}, read=read_answer)
            finally:
                await client.close()

    with pytest.raises(EngineUnreachable, match="answered /generate with more than 1 MiB"):
        asyncio.run(ask())


@pytest.mark.parametrize("reply", [[], 3, "text", {"meta_info": 3, "usage": 3, "vllm_config": 3}], ids=str)
@pytest.mark.parametrize(
    "ask",
    [lambda client: client.logprobs([1, 2]), lambda client: client.num_cached([1], "r", "key", timeout_s=9.0)],
    ids=["logprobs", "num_cached"],
)
@pytest.mark.parametrize("client_type", [SGLangClient, VLLMClient])
def test_a_reply_of_another_form_names_the_server_and_the_route(client_type, ask, reply, monkeypatch):
    client = client_type("http://there")

    async def answer(*arguments, **settings):
        return reply

    monkeypatch.setattr(client, "request", answer)
    with pytest.raises(EngineError, match=r"http://there answered /\S+ in an unknown format .* Use (SGLang|vLLM) 0"):
        asyncio.run(ask(client))
