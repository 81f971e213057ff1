"""FakeEngine: the contract, and what users ask of it: scripts, stragglers, failures."""

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_contract import CONTRACT, EngineCase, run
from sync_cases import config_of
from transformers import AutoModelForCausalLM

from lightrl.engines.fake_engine import FakeEngine
from lightrl.errors import EngineError, WeightSyncError
from lightrl.trajectory import Sampling


def make_case(**arguments: Any) -> EngineCase:
    config = config_of()
    engine = FakeEngine(**arguments)
    engine.start(config)
    with torch.random.fork_rng():
        models = [AutoModelForCausalLM.from_config(config) for _ in range(3)]
    return EngineCase(engine, models, has_model=False)


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_fake_engine_keeps_the_contract(check: Callable[[EngineCase], None]) -> None:
    check(make_case(seconds_per_token=0.001))


def test_a_script_writes_the_tokens_up_to_a_stop_token_or_the_limit() -> None:
    case = make_case(script=lambda prompt, sampling, sample: [prompt[-1], sample, 1, 9, 9])
    case.load(0)
    completions = run(case.generate([5, 7], Sampling(max_new_tokens=4, stop_token_ids=(1,)), n=3))
    assert [completion.token_ids for completion in completions] == [[7, 0, 1], [7, 1], [7, 2, 1]]
    assert {completion.finish_reason for completion in completions} == {"stop"}
    cut = run(case.generate([5, 7], Sampling(max_new_tokens=4)))[0]
    assert (cut.token_ids, cut.finish_reason) == ([7, 0, 1, 9], "length")


def test_logprobs_are_uniform_unless_made_wrong_on_purpose() -> None:
    case = make_case()
    case.load(0)
    sampling = Sampling(max_new_tokens=2, min_new_tokens=1, stop_token_ids=(1, 2))
    honest = run(case.generate([5], sampling))[0]
    assert honest.logprobs[0] == pytest.approx(-math.log(59))
    assert honest.logprobs[1:] == pytest.approx([-math.log(61)] * (len(honest.logprobs) - 1))
    case.engine.logprob_error_nats = 0.5  # type: ignore[attr-defined]
    wrong = run(case.generate([5], sampling))[0]
    assert wrong.logprobs == pytest.approx([logprob + 0.5 for logprob in honest.logprobs])


def test_a_chosen_request_fails_and_a_chosen_load_fails() -> None:
    case = make_case(fail_requests={1}, fail_loads={2})
    case.load(0)
    run(case.generate([1], Sampling(max_new_tokens=1)))
    with pytest.raises(EngineError, match="request 1"):
        run(case.generate([1], Sampling(max_new_tokens=1)))
    run(case.generate([1], Sampling(max_new_tokens=1)))
    case.load(1)
    with pytest.raises(WeightSyncError, match="version 2"):
        case.load(2)
    assert case.engine.weight_version == 1


def test_a_hanging_request_can_be_cancelled_or_closed() -> None:
    case = make_case(hang_requests={0, 1})
    case.load(0)

    async def scenario() -> None:
        cancelled = asyncio.create_task(case.generate([1], Sampling()))
        closed = asyncio.create_task(case.generate([1], Sampling()))
        await asyncio.sleep(0.01)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        case.engine.close()
        with pytest.raises(EngineError, match="closed"):
            await closed

    run(scenario())
