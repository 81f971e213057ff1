from typing import Any

import pytest

from lightrl.dataflow import DataFlowGraph, ModelCall

REFERENCE = ModelCall("reference", "reference", "infer", ("token_ids",), ("reference_logprobs",))
PROXIMAL = ModelCall("proximal", "policy", "infer", ("token_ids",), ("proximal_logprobs",))
AFTER = ModelCall("after", "policy", "infer", ("reference_logprobs",), ("values",))
UPDATE = ModelCall("update", "policy", "train", ("token_ids",))
ROLES = {"policy", "reference"}


def own(name: str, *inputs: str, **settings: Any) -> ModelCall:
    """A call in its own thread, whose output is its name."""
    return ModelCall(name, None, "infer", inputs, (name,), run=lambda *_: None, **settings)


def graph(*calls: ModelCall) -> DataFlowGraph:
    return DataFlowGraph(calls, roles=ROLES, given={"token_ids"})


def names(*calls: ModelCall) -> list[str]:
    return [call.name for call in graph(*calls).calls]


def test_edges_follow_from_keys_whatever_the_order_of_declaration() -> None:
    assert names() == []
    assert names(AFTER, PROXIMAL, REFERENCE) == ["proximal", "reference", "after"]
    assert graph(AFTER, REFERENCE).edges == {"after": ("reference",), "reference": ()}


def test_an_edge_may_be_said_where_no_key_says_it() -> None:
    first = ModelCall("first", "policy", "infer", ("token_ids",), ("values",), after=("reference",))
    assert names(first, REFERENCE) == ["reference", "first"]


def test_what_waits_for_no_other_thread_comes_first() -> None:
    waits = ModelCall("waits", "policy", "infer", ("judge",), ("values",))
    assert names(own("judge"), waits, REFERENCE) == ["judge", "reference", "waits"]


REWARD = ModelCall("reward", None, "infer", ("token_ids",), ("rewards",), run=lambda *_: None)
ADVANTAGES = ModelCall("advantages", None, "infer", ("rewards", "values"), ("advantages",), on_all_ranks=True, run=len)


def test_what_needs_no_rewards_runs_before_them() -> None:
    calls = (REWARD, REFERENCE, AFTER, ADVANTAGES, own("judge"), UPDATE)
    assert graph(*calls).before_rewards() == {"reference", "after", "judge"}
    late = own("late", "advantages")
    assert graph(*calls, late).before_rewards() == {"reference", "after", "judge"}


@pytest.mark.parametrize("reader", [own("audit", "rewards"), own("audit", after=("reward",))], ids=["key", "after"])
def test_nothing_runs_before_rewards_that_another_call_waits_for(reader: ModelCall) -> None:
    assert graph(REWARD, REFERENCE, AFTER, ADVANTAGES, reader).before_rewards() == set()


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ([REFERENCE, REFERENCE], "Two model calls are named 'reference'"),
        (
            [ModelCall("judge", "judge", "infer", (), ("values",))],
            r"role of model call 'judge' must be one of \['policy', 'reference'\], got 'judge'",
        ),
        ([ModelCall("judge", outputs=("x",))], "'judge' needs a role from models\\(\\), or a function as run="),
        ([AFTER], "'after' needs 'reference_logprobs', which no call produces"),
        ([own("a", after=("b",))], r"`after` of model call 'a' must name calls among \['a'\], got 'b'"),
        ([own("a", "b"), own("b", "c"), own("c", "a")], "wait for each other: a -> c -> b -> a. Remove a key"),
        (
            [REFERENCE, ModelCall("again", "policy", "infer", ("token_ids",), ("reference_logprobs",))],
            "'again' produces 'reference_logprobs', but 'reference' already does",
        ),
        ([own("token_ids")], "'token_ids' produces 'token_ids', but 'the rollout' already does"),
        ([own("late", after=("update",)), UPDATE], "'late' runs after the update 'update', but updates must come last"),
    ],
    ids=["name twice", "no such role", "nobody runs", "no producer", "nobody", "circle", "twice", "given", "late"],
)
def test_calls_that_make_no_graph_are_refused(calls: list[ModelCall], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        graph(*calls)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"outputs": "style", "run": len},
            r"outputs of model call .* must be a tuple of names, got 'style'. Write \('style',\)",
        ),
        ({"inputs": "token_ids", "outputs": ("x",), "run": len}, "inputs of model call 'style' must be a tuple"),
        ({"kind": "judge", "run": len}, "kind of model call 'style' must be generate, infer or train, got 'judge'"),
        ({"outputs": ("x",), "run": len, "microbatch_tokens": 0}, "microbatch_tokens for model call 'style'"),
        ({"role": "policy"}, r"forward of 'policy', .* outputs must list one key, got \[\]"),
        ({"role": "policy", "outputs": ("x", "y")}, r"outputs must list one key, got \['x', 'y'\]"),
        (
            {"role": "policy", "outputs": ("x",), "topk": 4},
            "outputs must list one key, then teacher_topk_ids, then teacher_topk_l",
        ),
    ],
    ids=["no comma", "no comma in inputs", "kind", "no tokens", "no output", "two outputs", "top-k tokens unnamed"],
)
def test_a_call_that_cannot_run_is_refused_where_it_is_made(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        ModelCall("style", **settings)
