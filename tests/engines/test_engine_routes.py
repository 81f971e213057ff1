"""Routes that engines return: LocalEngine's own, and those of servers, joined over requests."""

import asyncio
import base64
import copy
import io
import json

import numpy as np
import pytest
import torch
from moe_cases import engine_of, moe_model
from tiny import tiny_model

from lightrl import LocalEngine, Sampling
from lightrl.columns import extended
from lightrl.engines import Completion
from lightrl.engines.servers.request import CompletionDraft, MalformedAnswer
from lightrl.engines.sglang.client import SGLangClient
from lightrl.engines.sglang.generation import read_answer, request_of
from lightrl.engines.vllm import generation as vllm
from lightrl.engines.vllm.client import VLLMClient
from lightrl.models.moe import moe_blocks, router_of
from lightrl.models.routes import RouteLayout, Routes, replaying, wrap_blocks
from lightrl.weights import Bucket

LAYOUT = RouteLayout(layers=(1,), num_layers=2, num_experts=8)  # the first layer is dense


def answered(num_tokens, experts=None, finish="length"):
    """SGLang's answer; `experts` are one of layer 1 for each token."""
    logprobs = [[-1.0, 3, None]] * num_tokens
    meta = {"finish_reason": {"type": finish}, "output_token_logprobs": logprobs, "weight_version": "5"}
    if experts is not None:
        both = np.array([[0, expert] for expert in experts], np.int32)
        meta["routed_experts"] = base64.b64encode(both.tobytes()).decode()
    return read_answer(json.dumps({"output_ids": [3] * num_tokens, "meta_info": meta}).encode())


def answered_by_vllm(num_tokens, experts=None, finish="length", num_read=None, k=1):
    """The same of vLLM, which sends an array in the smallest dtype."""
    content = [{"token_id": 3, "logprob": -1.0, "top_logprobs": []}] * num_tokens
    choice = {"token_ids": [3] * num_tokens, "finish_reason": finish, "logprobs": {"content": content}}
    choice["weight_versions"] = [{"version": "5", "start": 0, "end": num_tokens}]
    if experts is not None:
        both = np.array([[[0] * k, [expert] * k] for expert in experts], np.int32 if min(experts) < 0 else np.uint8)
        np.save(file := io.BytesIO(), both)
        choice["routed_experts"] = base64.b64encode(file.getvalue()).decode()
    return vllm.read_answer(json.dumps({"choices": [choice], "usage": {"prompt_tokens": num_read}}).encode())


of_each_server = pytest.mark.parametrize(
    ("answered", "column_help"),
    [(answered, SGLangClient.column_help), (answered_by_vllm, VLLMClient.column_help)],
    ids=["SGLang", "vLLM"],
)


def draft(layout=LAYOUT):
    return CompletionDraft(
        [1, 2], Sampling(max_new_tokens=4), encoders={} if layout is None else {"routes": layout.encode_sent}
    )


def test_only_a_draft_with_a_layout_asks_for_routes():
    assert request_of(draft(), "id", "key")["return_routed_experts"] is True
    assert "return_routed_experts" not in request_of(draft(None), "id", "key")


@of_each_server
@pytest.mark.parametrize(
    ("first", "second", "joined"),
    [
        # Other weights computed the first three again.
        pytest.param({"routes": [5, 6, 7]}, [0, -1, 0, 1, 2], [0, 6, 0, 1, 2], id="both"),
        pytest.param({}, [3, 4, 5, 6, -1], [3, 4, 5, 6, 255], id="none of an interrupted request"),
    ],
)
def test_routes_of_a_completion_are_joined_over_its_requests(first, second, joined, answered, column_help):
    one = draft()
    one.add(answered(2, first.get("routes"), "abort"), "http://there")
    assert dict(one.completion().columns) == first
    one.add(answered(2, second), "http://there")
    assert one.completion().columns["routes"] == joined


@of_each_server
@pytest.mark.parametrize(
    ("experts", "message"),
    [
        pytest.param(None, "enable.return.routed.experts", id="none"),
        pytest.param([1, 2, 3, 4], "a different model's routes", id="of another number of layers"),
        pytest.param([1, 2, 3, 4, 8], "expert 8, but the model has 8 experts", id="of more experts"),
    ],
)
def test_a_finished_request_without_the_models_routes_is_refused(experts, message, answered, column_help):
    with pytest.raises(MalformedAnswer, match=message):
        draft().add(answered(4, experts), "http://there", column_help=column_help)


def test_vllms_routes_of_half_the_tokens_by_two_experts_are_not_those_of_all_tokens():
    with pytest.raises(MalformedAnswer, match="for 4 tokens"):
        draft().add(answered_by_vllm(3, [1, 2], num_read=2, k=2), "http://there")


@pytest.fixture
def engine_and_model():
    model = moe_model()
    with engine_of(model) as engine:
        yield engine, model


def generated(engine, token_ids, num, **request):
    (completion,) = asyncio.run(
        engine.generate(token_ids, Sampling(max_new_tokens=num, seed=3), session="one", **request)
    )
    return completion


def test_routes_do_not_depend_on_turns(engine_and_model):
    engine, model = engine_and_model
    prompt, observation = [4, 7, 5], [9, 8]
    first = generated(engine, prompt, 4)
    read = [*prompt, *first.token_ids, *observation]
    second = generated(engine, read, 5)
    token_ids = [*read, *second.token_ids]
    columns = extended({}, len(prompt), first.columns, 4)
    columns = extended(columns, len(read) - 2, {}, 2)
    columns = extended(columns, len(read), second.columns, 5)
    with torch.no_grad(), Routes(model).recording() as recorded:
        model(input_ids=torch.tensor([token_ids[:-1]]), use_cache=False)
    assert columns["routes"] == [*recorded().flatten().tolist(), *[255] * 4]


def test_a_completion_that_was_started_has_the_routes_of_the_weights_that_continue_it(engine_and_model):
    engine, _ = engine_and_model
    whole = generated(engine, [4, 7, 5], 6)
    old = [9] * 4 + list(whole.columns["routes"][4 : (3 + 2 - 1) * 4])  # as other weights have routed the first token
    begun = Completion(whole.token_ids[:2], whole.logprobs[:2], [0, 0], "abort", columns={"routes": old})
    assert Completion.from_state(begun.state_dict()).columns["routes"] == old
    continued = generated(engine, [4, 7, 5], 6, started=begun)
    assert (continued.token_ids, continued.columns) == (whole.token_ids, whole.columns)


def test_after_a_sync_amid_a_completion_a_trainer_that_replays_has_the_engines_logprobs(engine_and_model):
    engine, model = engine_and_model
    models = [model, copy.deepcopy(model)]
    for block in moe_blocks(models[1]).values():  # which then chooses other experts
        router_of(block).weight.data.neg_()

    async def completed(version: int) -> Completion:
        request = engine.generate([4, 7, 5], Sampling(max_new_tokens=40, seed=3), session="one")
        completing = asyncio.create_task(request)
        await asyncio.sleep(0.01)
        engine.load_weights([Bucket(dict(models[version % 2].named_parameters()))], weight_version=version)
        return (await completing)[0]

    made = next(made for made in map(asyncio.run, map(completed, range(1, 100))) if len(set(made.weight_versions)) > 1)
    inputs = torch.tensor([[4, 7, 5, *made.token_ids]])
    routes = torch.tensor(extended({}, 3, made.columns, 40)["routes"], dtype=torch.uint8).view(43, -1)
    latest = made.weight_versions[-1]
    wrap_blocks(model := models[latest % 2])
    with torch.no_grad(), replaying(routes):
        logprobs = model(input_ids=inputs, use_cache=False).logits[0, 2:-1].log_softmax(-1)
    of_tokens = logprobs.gather(1, inputs[0, 3:, None])[:, 0]
    is_new = torch.tensor(made.weight_versions) == latest
    torch.testing.assert_close(of_tokens[is_new], torch.tensor(made.logprobs)[is_new], atol=1e-5, rtol=0)


def test_routes_are_recorded_unless_they_are_not_wanted_or_there_are_none():
    with engine_of(moe_model(), record_routes=False) as engine:
        assert not generated(engine, [4, 7], 2).columns
    with pytest.raises(ValueError, match="has no experts to record"):
        LocalEngine(record_routes=True).start(tiny_model("llama").config)
