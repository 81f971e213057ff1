from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import pytest

from lightrl.dataflow import DataFlowGraph, ModelCall
from lightrl.errors import TrainingError
from lightrl.loops.run_calls import run_calls

REFERENCE = ModelCall("reference", "reference", "infer", ("token_ids",), ("reference_logprobs",))
PROXIMAL = ModelCall("proximal", "policy", "infer", ("token_ids",), ("proximal_logprobs",))
AFTER = ModelCall("after", "policy", "infer", ("reference_logprobs",), ("values",))
ROLES = {"policy", "reference"}


def own(name: str, *inputs: str, **settings: Any) -> ModelCall:
    """A call in its own thread, whose output is its name."""
    return ModelCall(name, None, "infer", inputs, (name,), run=lambda *_: None, **settings)


def graph(*calls: ModelCall) -> DataFlowGraph:
    return DataFlowGraph(calls, roles=ROLES, given={"token_ids"})


def executed(calls: list[ModelCall], run: Any) -> dict[str, Any]:
    def add(state: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
        return {**state, **more}

    return run_calls(graph(*calls), {"token_ids": 0}, run, add)


def test_each_call_runs_once_and_sees_what_it_needs() -> None:
    seen: list[str] = []

    def run(call: ModelCall, state: Mapping[str, Any]) -> dict[str, Any]:
        assert set(call.inputs) <= set(state)
        seen.append(call.name)
        return dict.fromkeys(call.outputs, call.name)

    calls = [AFTER, own("judge", "values"), own("style"), REFERENCE, own("sum", "judge", "style"), PROXIMAL]
    found = executed(calls, run)
    assert sorted(seen) == sorted(call.name for call in calls)
    assert set(found) == {"token_ids"} | {key for call in calls for key in call.outputs}


@pytest.mark.parametrize("other", [own("teacher"), PROXIMAL], ids=["two servers", "a server and the trainer"])
def test_calls_that_share_no_device_run_at_once(other: ModelCall) -> None:
    """Each waits until the other has started: one after the other, neither would end."""
    both = threading.Barrier(2)

    def run(call: ModelCall, state: Any) -> dict[str, Any]:
        both.wait(timeout=600)
        return dict.fromkeys(call.outputs, 1)

    assert set(executed([own("judge"), other], run)) == {"token_ids", "judge", *other.outputs}


def test_the_trainers_calls_run_one_after_another_in_the_callers_thread() -> None:
    threads = []

    def run(call: ModelCall, state: Any) -> dict[str, Any]:
        threads.append(threading.current_thread())
        return dict.fromkeys(call.outputs, 1)

    executed([REFERENCE, PROXIMAL, AFTER], run)
    assert threads == [threading.current_thread()] * 3


def test_an_error_of_a_call_that_runs_during_the_trainers_is_raised_as_it_is() -> None:
    def run(call: ModelCall, state: Any) -> dict[str, Any]:
        raise LookupError(f"no server for {call.name}")

    with pytest.raises(LookupError, match="no server for style"):
        executed([own("style")], run)


def test_who_does_not_answer_in_time_is_named() -> None:
    never = threading.Event()

    def run(call: ModelCall, state: Any) -> dict[str, Any]:
        if call.name == "slow":
            never.wait(600)
        return dict.fromkeys(call.outputs, 1)

    with pytest.raises(TrainingError, match=r"'slow' did not return its outputs .* within timeout_s=1.*\['slow'\]"):
        executed([own("slow", timeout_s=1), own("fast")], run)
    never.set()


def test_a_function_that_needs_another_starts_while_the_trainer_works() -> None:
    """The trainer's call ends only when the second function has started."""
    has_started = threading.Event()

    def run(call: ModelCall, state: Mapping[str, Any]) -> dict[str, Any]:
        if call.name == "second":
            has_started.set()
        if call.role is not None:
            assert has_started.wait(600)
        return dict.fromkeys(call.outputs, 1)

    assert "second" in executed([REFERENCE, own("first"), own("second", "first")], run)


def test_the_trainer_takes_what_is_ready_first() -> None:
    """The slow function ends only when the call that needs the fast one has run."""
    ran = threading.Event()

    def run(call: ModelCall, state: Mapping[str, Any]) -> dict[str, Any]:
        if call.name == "slow":
            assert ran.wait(600)
        if call.name == "needs fast":
            ran.set()
        return dict.fromkeys(call.outputs, 1)

    needs_slow = ModelCall("needs slow", "policy", "infer", ("slow",), ("values",))
    needs_fast = ModelCall("needs fast", "policy", "infer", ("fast",), ("proximal_logprobs",))
    assert "values" in executed([own("slow"), own("fast"), needs_slow, needs_fast], run)


def test_what_is_done_is_not_run_again() -> None:
    ran = []

    def run(call: ModelCall, state: Mapping[str, Any]) -> dict[str, Any]:
        ran.append(call.name)
        return dict.fromkeys(call.outputs, 1)

    calls = graph(own("judge"), AFTER, REFERENCE)
    run_calls(calls, {}, run, lambda state, more: {**state, **more}, left_out=("judge",))
    assert ran == ["reference", "after"]


JUDGE = own("judge", "values")
CALLS = [REFERENCE, AFTER, JUDGE, own("style"), PROXIMAL]


def on_two_ranks(calls: list[ModelCall], runs_on: Mapping[str, list[int]], run: Any) -> list[dict[str, Any]]:
    """What each of two ranks, a thread each, ends with; `runs_on` says who runs a call."""
    shared: dict[str, Any] = {}
    both = threading.Barrier(2)

    def rank_ends_with(rank: int, found: list[dict[str, Any]]) -> None:
        def share(call: ModelCall, result: Mapping[str, Any]) -> Mapping[str, Any]:
            if rank == runs_on[call.name][0]:
                shared[call.name] = result
            both.wait(600)
            return shared[call.name]

        found[rank] = run_calls(
            graph(*calls),
            {"token_ids": 0},
            lambda call, state: run(rank, call, state),
            lambda state, more: {**state, **more},
            runs_here=lambda call: rank in runs_on[call.name],
            share=share,
        )

    found: list[dict[str, Any]] = [{}, {}]
    threads = [threading.Thread(target=rank_ends_with, args=(rank, found), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    return found


@pytest.mark.parametrize("first", [0, 1])
def test_every_rank_ends_with_the_outputs_of_calls_that_others_ran(first: int) -> None:
    runs_on = {"reference": [first], "after": [1 - first], "judge": [0], "style": [0], "proximal": [0, 1]}
    ran: list[tuple[int, str]] = []

    def run(rank: int, call: ModelCall, state: Mapping[str, Any]) -> dict[str, Any]:
        assert set(call.inputs) <= set(state)
        ran.append((rank, call.name))
        return dict.fromkeys(call.outputs, call.name)

    left, right = on_two_ranks(CALLS, runs_on, run)
    assert left == right == {"token_ids": 0, **{key: call.name for call in CALLS for key in call.outputs}}
    assert sorted(ran) == sorted((rank, name) for name, ranks in runs_on.items() for rank in ranks)


def test_calls_on_different_ranks_and_a_function_run_at_once() -> None:
    """Each of the three waits until all have started."""
    three = threading.Barrier(3)

    def run(rank: int, call: ModelCall, state: Mapping[str, Any]) -> dict[str, Any]:
        three.wait(timeout=600)
        return dict.fromkeys(call.outputs, 1)

    runs_on = {"reference": [0], "proximal": [1], "style": [0]}
    left, right = on_two_ranks([REFERENCE, PROXIMAL, own("style")], runs_on, run)
    assert left == right
    assert set(left) == {"token_ids", "style", *REFERENCE.outputs, *PROXIMAL.outputs}
