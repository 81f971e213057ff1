import contextlib
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from algorithm_cases import make_module
from test_dataflow import AFTER, PROXIMAL, REFERENCE, graph, own
from tiny import random_experience, random_trajectories, slow_outputs, tiny_spec
from torch import Tensor

from lightrl.algorithms import GRPO, ReferenceKL
from lightrl.dataflow import ModelCall
from lightrl.errors import TrainingError
from lightrl.experience import Experience
from lightrl.functional import group_advantages
from lightrl.loops.score import CallRun, score
from lightrl.loops.sharing import accept_changes
from lightrl.models import Outputs, Role
from lightrl.strategies import LogprobSettings, SingleModel
from lightrl.trajectory import Trajectory


def scored_by(module: GRPO, experience: Experience, **settings: Any) -> Experience:
    module.parallel_models = {role: SingleModel(getattr(module, role), LogprobSettings()) for role in module.models()}
    return score(module, experience, **settings).local


@pytest.mark.parametrize("microbatch_tokens", [1, 30, 10**6])
def test_scores_are_those_of_their_models_in_the_rows_order(microbatch_tokens: int) -> None:
    module = make_module("GRPO decoupled")
    module.microbatch_tokens = microbatch_tokens
    experience = scored_by(module, random_experience(is_scored=False))
    logprobs, _ = slow_outputs(module.policy, experience)
    torch.testing.assert_close(experience.proximal_logprobs, logprobs.detach(), rtol=1e-4, atol=1e-4)
    assert experience.reference_logprobs is None


def test_a_call_has_its_own_bound_on_a_microbatch() -> None:
    sizes: list[list[int]] = []

    class Sizes(SingleModel):
        def forward(self, microbatches: Sequence[Experience], *, topk: int = 0) -> list[Outputs]:
            sizes.append([len(part) for part in microbatches])
            return super().forward(microbatches)

    module = make_module("GRPO decoupled")
    (call,) = module.model_calls()
    module.parallel_models = {"policy": Sizes(module.policy, LogprobSettings())}
    for bound in (None, 1):
        module.model_calls = lambda: [replace(call, microbatch_tokens=bound)]  # noqa: B023
        score(module, random_experience(is_scored=False))
    assert sizes == [[9], [1] * 9]


@pytest.mark.parametrize("fails", [False, True], ids=["succeeds", "fails"])
def test_a_model_that_waits_in_cpu_memory_is_on_the_device_while_it_runs(fails: bool) -> None:
    """The device is `meta`, which shows the moves and computes nothing."""
    places: list[str] = []

    class Reference:
        def forward(self, microbatches: Sequence[Experience], *, topk: int = 0) -> list[Outputs]:
            places.append("runs")
            if fails:
                raise RuntimeError("out of memory")
            zeros = [torch.zeros(part.token_ids.shape) for part in microbatches]
            return [Outputs(zero, zero) for zero in zeros]

        def move_to(self, device: torch.device) -> None:
            places.append(device.type)

    module: Any = make_module("GRPO", reference=ReferenceKL(0.1, Role(tiny_spec(seed=1), offload=True)))
    module.to("meta")
    module.parallel_models = {"reference": Reference()}
    with pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
        score(module, random_experience(is_scored=False))
    assert places == ["meta", "runs", "cpu"]


def test_the_reference_is_another_model() -> None:
    module = make_module("GRPO with KL and entropy")
    experience = scored_by(module, random_experience(is_scored=False))
    logprobs, _ = slow_outputs(module.reference, experience)
    torch.testing.assert_close(experience.reference_logprobs, logprobs.detach(), rtol=1e-4, atol=1e-4)
    assert experience.proximal_logprobs is None
    assert not any(value.requires_grad for value in experience.tensors().values())


def test_a_model_whose_logprobs_are_not_finite_is_named_with_the_number_of_tokens() -> None:
    module, experience = make_module("GRPO with KL and entropy"), random_experience(is_scored=False)
    module.reference.model.norm.weight.data.fill_(math.nan)
    num = int(experience.loss_mask.sum())
    with pytest.raises(TrainingError, match=f"^reference returned NaN or infinity for {num} tokens in 'reference_l"):
        scored_by(module, experience)


def test_trained_models_may_return_nan_because_such_updates_are_skipped() -> None:
    module = make_module("GRPO decoupled")
    module.policy.model.norm.weight.data.fill_(math.nan)
    assert scored_by(module, random_experience(is_scored=False)).proximal_logprobs.isnan().any()


@pytest.mark.parametrize(
    ("algorithm", "num_updates", "expected"),
    [("GRPO", 2, 0), ("GRPO decoupled", 1, 0), ("GRPO decoupled", 2, 1), ("CISPO", 2, 0)],
)
def test_the_policy_runs_only_for_proximal_logprobs_that_can_differ(
    algorithm: str, num_updates: int, expected: int
) -> None:
    module = make_module(algorithm, num_minibatches=num_updates)
    module.parallel_models = {"policy": SingleModel(module.policy, LogprobSettings(), form="packed")}
    calls = []
    module.policy.base_model.register_forward_hook(lambda *_: calls.append(1))
    score(module, random_experience(is_scored=False))
    assert len(calls) == expected


@pytest.mark.parametrize("is_per_token", [False, True], ids=["B", "B by T"])
def test_advantages_are_spread_over_loss_tokens_and_masked_elsewhere(is_per_token: bool) -> None:
    experience, module = random_experience(is_scored=False), make_module()
    values = torch.randn(experience.token_ids.shape if is_per_token else experience.rewards.shape)
    module.advantages = lambda _: values  # type: ignore[method-assign]
    found = scored_by(module, experience).advantages
    expected = values if is_per_token else values[:, None].expand(experience.token_ids.shape)
    assert torch.equal(found, torch.where(experience.loss_mask, expected, 0.0))


@pytest.mark.parametrize("shape", [(3,), (9, 3), (9, 1), ()], ids=str)
def test_advantages_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    module = make_module()
    module.advantages = lambda _: torch.zeros(shape)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"advantages must return advantages as \[B\] = \(9,\) or \[B, T\] = \(9, 1"):
        scored_by(module, random_experience(is_scored=False))


def test_scores_stay_float32_and_advantages_keep_the_default_dtype_in_half_precision() -> None:
    @contextlib.contextmanager
    def half_precision() -> Iterator[None]:
        torch.set_default_dtype(torch.bfloat16)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)

    module = make_module("GRPO decoupled")
    default_dtypes = []

    def advantages(experience: Experience) -> Tensor:
        default_dtypes.append(torch.get_default_dtype())
        return experience.rewards

    module.advantages = advantages  # type: ignore[method-assign]
    experience = scored_by(module, random_experience(is_scored=False), forward_context=half_precision)
    assert experience.proximal_logprobs.dtype == torch.float32
    assert not torch.equal(experience.proximal_logprobs, experience.proximal_logprobs.bfloat16().float())
    assert default_dtypes == [torch.float32]


def test_a_hook_may_take_tokens_out_and_change_advantages() -> None:
    experience = random_experience()
    loss_mask = experience.loss_mask & (experience.token_ids > 4)
    changed = replace(experience, loss_mask=loss_mask, advantages=experience.advantages + 1)
    accepted = accept_changes(experience, changed)
    assert torch.equal(accepted.loss_mask, loss_mask)
    assert torch.equal(accepted.advantages, torch.where(loss_mask, experience.advantages + 1, 0.0))


@pytest.mark.parametrize(
    "name", ["rewards", "token_ids", "behavior_logprobs", "proximal_logprobs", "lengths", "values"]
)
def test_a_hook_may_neither_change_nor_add_nor_remove_anything_else(name: str) -> None:
    experience = random_experience()
    changed = replace(experience, **{name: 1 + getattr(experience, "rewards" if name == "values" else name)})
    for before, after in ((experience, changed), (changed, experience)):
        with pytest.raises(ValueError, match=f"on_experience_ready changed '{name}'"):
            accept_changes(before, after)


def test_a_hook_may_not_train_tokens_that_have_no_logprobs() -> None:
    experience = random_experience()
    changed = replace(experience, loss_mask=torch.ones_like(experience.loss_mask))
    with pytest.raises(ValueError, match=r"added \d+ tokens? to loss_mask, but may only remove tokens"):
        accept_changes(experience, changed)


@pytest.mark.parametrize("changed", [True, replace(random_experience(), advantages=None)], ids=["a bool", "none left"])
def test_a_hook_that_returns_no_experience_with_advantages_is_an_error(changed: Any) -> None:
    with pytest.raises(TypeError, match="must return None or an Experience with advantages"):
        accept_changes(random_experience(), changed)


class TwoRewards(GRPO):
    """README's and docs' example: an LLM judge whose number is added to the reward."""

    def model_calls(self) -> list[ModelCall]:
        return [*super().model_calls(), ModelCall("style", outputs=("style_rewards",), run=self.style)]

    def style(self, experience: Experience, trajectories: list[Trajectory]) -> Tensor:
        return torch.tensor([float(len(trajectory.token_ids)) for trajectory in trajectories])

    def shaped_rewards(self, experience: Experience) -> Tensor:
        return super().shaped_rewards(experience) + experience["style_rewards"]


def two_rewards(**settings: Any) -> TwoRewards:
    module = TwoRewards(tiny_spec(), reward=len, **settings)
    module.configure_model()
    return module


def test_a_call_of_the_users_own_adds_to_the_reward() -> None:
    module, trajectories = two_rewards(group_size=3), random_trajectories()
    experience = score(module, Experience.from_trajectories(trajectories), trajectories)
    assert torch.equal(experience["style_rewards"], experience.lengths.float())
    expected = group_advantages(experience.rewards + experience.lengths, experience.group_ids)
    assert torch.equal(
        experience.advantages[experience.loss_mask], expected.repeat_interleave(experience.loss_mask.sum(1))
    )
    assert "style" in [call.name for call in module.data_flow().calls]


def test_a_call_of_the_users_own_may_come_after_any_other() -> None:
    seen: dict[str, Experience] = {}

    def look(name: str) -> Any:
        def run(experience: Experience, trajectories: list[Trajectory]) -> Tensor:
            seen[name] = experience
            return experience.rewards

        return run

    module = two_rewards()
    module.model_calls = lambda: [  # type: ignore[method-assign]
        *TwoRewards.model_calls(module),
        ModelCall("early", outputs=("early",), run=look("early"), after=("reward",)),
        ModelCall("late", inputs=("advantages",), outputs=("late",), run=look("late")),
    ]
    trajectories = random_trajectories()
    experience = score(module, Experience.from_trajectories(trajectories), trajectories)
    assert seen["early"].advantages is None
    assert torch.equal(seen["late"].advantages, experience.advantages)
    assert {"early", "late", "style_rewards"} <= experience.extras.keys()


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (torch.zeros(4), r"'style' must return 'style_rewards' as a tensor \[B\] = \(9,\) .* got \(4,\)"),
        ([0.0] * 9, "'style' must return 'style_rewards' as a tensor .* got list"),
        ({"other": torch.zeros(9)}, r"'style' must return .* outputs \['style_rewards'\], got \['other'\]"),
        (torch.full((9,), math.inf), "'style' returned NaN or infinity in 'style_rewards', which no loss can use"),
        (torch.where(random_experience().loss_mask, math.nan, 0.0), "'style' returned NaN or infinity"),
    ],
    ids=["too few", "a list", "another key", "infinite", "NaN for tokens"],
)
def test_what_a_call_of_the_users_own_returns_is_checked(returned: Any, message: str) -> None:
    module = two_rewards()
    module.style = lambda *_: returned  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=message):
        score(module, random_experience(is_scored=False))


def test_numbers_of_tokens_outside_the_loss_mask_may_be_anything() -> None:
    module, experience = two_rewards(), random_experience(is_scored=False)
    module.style = lambda *_: torch.where(experience.loss_mask, 1.0, math.nan)  # type: ignore[method-assign]
    module.advantages = lambda shown: shown.rewards  # type: ignore[method-assign]
    assert bool(score(module, experience)["style_rewards"][experience.loss_mask].eq(1).all())


def test_what_a_call_of_the_users_own_raises_names_the_call() -> None:
    module = two_rewards()

    def ask(*_: Any) -> Any:
        raise KeyError("score")

    module.style = ask  # type: ignore[method-assign]
    with pytest.raises(TrainingError, match=r"function for model call 'style' raised KeyError: 'score'") as seen:
        score(module, random_experience(is_scored=False))
    assert isinstance(seen.value.__cause__, KeyError)


def test_advantages_may_give_further_keys() -> None:
    module, experience = make_module(), random_experience(is_scored=False)
    found = torch.randn(experience.token_ids.shape)
    module.advantages = lambda _: {"advantages": experience.rewards, "returns": found}  # type: ignore[method-assign]
    scored = scored_by(module, experience)
    assert torch.equal(scored.returns, torch.where(experience.loss_mask, found, 0.0))


def executed(calls: list[ModelCall], run: Any, **options: Any) -> dict[str, Any]:
    return CallRun(graph(*calls), {"token_ids": 0}, run, lambda state, more: {**state, **more}, **options).finish()


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


NEEDS_SLOW = ModelCall("needs slow", "policy", "infer", ("slow",), ("values",))
NEEDS_FAST = ModelCall("needs fast", "policy", "infer", ("fast",), ("proximal_logprobs",))


@pytest.mark.parametrize(
    ("waits", "starts", "calls"),
    [
        (REFERENCE.name, "second", [REFERENCE, own("first"), own("second", "first")]),
        ("slow", NEEDS_FAST.name, [own("slow"), own("fast"), NEEDS_SLOW, NEEDS_FAST]),
    ],
    ids=["a function that needs another, while the trainer works", "the trainer takes what is ready first"],
)
def test_what_has_all_it_needs_starts_while_others_run(waits: str, starts: str, calls: list[ModelCall]) -> None:
    """The call that waits ends only when the other one has started."""
    has_started = threading.Event()

    def run(call: ModelCall, state: Mapping[str, Any]) -> dict[str, Any]:
        if call.name == starts:
            has_started.set()
        if call.name == waits:
            assert has_started.wait(600)
        return dict.fromkeys(call.outputs, 1)

    assert executed(calls, run).keys() == {"token_ids"} | {key for call in calls for key in call.outputs}


def test_what_is_done_is_not_run_again() -> None:
    ran = []

    def run(call: ModelCall, state: Mapping[str, Any]) -> dict[str, Any]:
        ran.append(call.name)
        return dict.fromkeys(call.outputs, 1)

    executed([own("judge"), AFTER, REFERENCE], run, left_out=("judge",))
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

        runs_here = {"runs_here": lambda call: rank in runs_on[call.name], "share": share}
        found[rank] = executed(calls, partial(run, rank), **runs_here)

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
