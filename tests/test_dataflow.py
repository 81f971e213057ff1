from __future__ import annotations

import pytest

from lightrl.dataflow import ModelCall, check_score_calls

REFERENCE = ModelCall("reference", "reference", "infer", ("token_ids",), ("reference_logprobs",))
PROXIMAL = ModelCall("proximal", "policy", "infer", ("token_ids",), ("proximal_logprobs",))
AFTER = ModelCall("after", "policy", "infer", ("reference_logprobs",), ("values",))
ROLES = {"policy", "reference"}


@pytest.mark.parametrize("calls", [[], [REFERENCE], [PROXIMAL, REFERENCE, AFTER]], ids=["none", "one", "a chain"])
def test_calls_that_can_run_in_order_pass(calls: list[ModelCall]) -> None:
    check_score_calls(calls, ROLES, {"token_ids"})


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ([REFERENCE, REFERENCE], "Two model calls are named 'reference'"),
        (
            [ModelCall("judge", "judge", "infer", (), ("values",))],
            r"'judge' uses role 'judge'.*\['policy', 'reference'\]",
        ),
        ([ModelCall("x", "policy", "train", (), ("values",))], "'x' has kind 'train', expected 'infer'"),
        ([AFTER, REFERENCE], "'after' needs 'reference_logprobs', which nothing before it gives"),
        (
            [REFERENCE, ModelCall("again", "policy", "infer", ("token_ids",), ("reference_logprobs",))],
            "'again' gives 'reference_logprobs' a second time",
        ),
        ([ModelCall("x", "policy", "infer", (), ("token_ids",))], "'x' gives 'token_ids' a second time"),
    ],
    ids=["name twice", "no such role", "not infer", "wrong order", "output twice", "rollout field"],
)
def test_calls_that_cannot_run_are_refused(calls: list[ModelCall], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_score_calls(calls, ROLES, {"token_ids"})
