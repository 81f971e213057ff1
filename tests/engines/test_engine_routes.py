"""Routes that engines return: LocalEngine's own, and those of servers, joined over requests."""

import asyncio
import base64
import copy
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
from lightrl.models.moe import moe_blocks, router_of
from lightrl.models.routes import RouteLayout, Routes
from lightrl.weights import Bucket

LAYOUT = RouteLayout(layers=(1,), num_layers=2, num_experts=8)  # the first layer is dense


def answered(num_tokens, experts=None, finish="length"):
    """SGLang's answer; `experts` are one of layer 1 for each token."""
    meta = {
        "finish_reason": {"type": finish},
        "output_token_logprobs": [[-1.0, 3, None]] * num_tokens,
        "weight_version": "5",
    }
    if experts is not None:
        both = np.array([[0, expert] for expert in experts], np.int32)
        meta["routed_experts"] = base64.b64encode(both.tobytes()).decode()
    return read_answer(json.dumps({"output_ids": [3] * num_tokens, "meta_info": meta}).encode())


def draft(layout=LAYOUT):
    return CompletionDraft(
        [1, 2], Sampling(max_new_tokens=4), encoders={} if layout is None else {"routes": layout.encode_sent}
    )


def test_only_a_draft_with_a_layout_asks_for_routes():
    assert request_of(draft(), "id", "key")["return_routed_experts"] is True
    assert "return_routed_experts" not in request_of(draft(None), "id", "key")


def test_routes_of_a_completion_are_joined_over_its_requests():
    one = draft()
    one.add(answered(2, [5, 6, 7], "abort"), "http://there")
    assert one.completion().columns["routes"] == [5, 6, 7]
    one.add(answered(2, [0, -1, 0, 1, 2]), "http://there")  # other weights computed the first three again
    assert one.completion().columns["routes"] == [0, 6, 0, 1, 2]


def test_an_interrupted_request_may_lack_its_routes():
    one = draft()
    one.add(answered(2, None, "abort"), "http://there")
    assert not one.completion().columns
    one.add(answered(2, [3, 4, 5, 6, -1]), "http://there")
    assert one.completion().columns["routes"] == [3, 4, 5, 6, 255]


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        pytest.param(None, "a gateway must forward routed_experts: set router to null", id="none"),
        pytest.param([1, 2, 3, 4], "routes of a different model", id="of another number of layers"),
        pytest.param([1, 2, 3, 4, 8], "expert 8, but the model has 8 experts", id="of more experts"),
    ],
)
def test_a_finished_request_without_the_models_routes_is_refused(experts, message):
    with pytest.raises(MalformedAnswer, match=message):
        draft().add(answered(4, experts), "http://there", column_help=SGLangClient.column_help)


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
    model = models[latest % 2]
    with torch.no_grad(), Routes(model).replaying(routes):
        logprobs = model(input_ids=inputs, use_cache=False).logits[0, 2:-1].log_softmax(-1)
    of_tokens = logprobs.gather(1, inputs[0, 3:, None])[:, 0]
    is_new = torch.tensor(made.weight_versions) == latest
    torch.testing.assert_close(of_tokens[is_new], torch.tensor(made.logprobs)[is_new], atol=1e-5, rtol=0)


def test_routes_are_recorded_unless_they_are_not_wanted_or_there_are_none():
    with engine_of(moe_model(), record_routes=False) as engine:
        assert not generated(engine, [4, 7], 2).columns
    with pytest.raises(ValueError, match="has no experts to record"):
        LocalEngine(record_routes=True).start(tiny_model("llama").config)
