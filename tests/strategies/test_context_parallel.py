"""Packed rows that several ranks share against one process: outputs and gradients; and what is refused.

tests/trainer/test_layouts.py has whole runs, and tests/strategies/test_families.py the families of models.
"""

from dataclasses import replace
from typing import Any

import pytest
from moe_cases import moe_spec
from rank_scripts import ROUNDING
from strategy_cases import on_cpus, results_of
from tiny import tiny_spec

from benchmarks.families import family_spec
from lightrl import GRPO, FSDP2Strategy, ModelSpec, Role, RoleMesh
from lightrl.strategies import check_strategy

# Processes, cp, a model and what is special. Tiny models have 4 heads of queries and 2 of keys.
CASES: list[list[Any]] = [
    [2, 2, "qwen3", "one token"],
    [2, 2, "deepseek_v3", "plain"],
    [2, 2, "gemma3 hybrid", "truncated"],
    [2, 2, "shared critic", "checkpointed"],
]
MORE: list[list[Any]] = [
    *[[4, 4, family, "one token"] for family in ("qwen3", "deepseek_v3", "mistral with a window", "critic")],
    [4, 4, "gemma3 hybrid", "truncated"],
    [4, 2, "qwen3_moe", "checkpointed"],
    [4, 2, "shared critic", "one token"],
]


SCALED = family_spec("granite")
SCALED = replace(SCALED, config={**dict(SCALED.config or {}), "logits_scaling": 2.0})
STABLE = replace(SCALED, config={**dict(SCALED.config or {}), "model_type": "stablelm"})


@pytest.fixture(
    scope="module", params=[pytest.param(CASES, id="two ranks"), pytest.param(MORE, id="more", marks=pytest.mark.extra)]
)
def results(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    found = results_of("context_parallel_run.py", request.param)
    assert [result["case"] for result in found] == request.param
    return found


@pytest.mark.slow
def test_ranks_that_share_a_row_have_the_outputs_and_gradients_of_one_process(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert max(result["outputs"], result["gradients"]) < ROUNDING, result


@pytest.mark.parametrize(
    ("policy", "settings", "message"),
    [
        (tiny_spec(), {"cp": 3}, r"cp=3 must divide the 4 ranks\. Set it to 2 or 4"),
        (
            moe_spec(num_attention_heads=2),
            {"cp": 4},
            r"cp=4 must divide the 2 attention heads of the policy\. Set it to 2",
        ),
        (family_spec("lfm2"), {"cp": 2}, "'lfm2' does not allow it: its tokens interact beyond .* Set cp to 1"),
        (family_spec("falcon_h1"), {"cp": 2}, "'falcon_h1' does not allow it: its tokens interact"),
        (family_spec("deepseek_v32"), {"cp": 2}, "'deepseek_v32' does not allow it: its tokens interact"),
        (tiny_spec("gemma2 with capped logits"), {"cp": 2}, "'gemma2' does not allow it: its tokens interact"),
        (SCALED, {"cp": 2}, "'granite' does not allow it: .* or it changes logits"),
        (STABLE, {"cp": 2}, "'stablelm' does not allow it: its tokens interact"),
        (tiny_spec(attn_implementation="eager"), {"cp": 2}, "interact beyond causal SDPA attention"),
        (Role(tiny_spec(), mesh=RoleMesh(0, 2)), {"cp": 2}, "whose roles have no mesh, got GRPO"),
    ],
    ids=[
        *["ranks", "heads", "hybrid", "parallel hybrid", "sparse", "capped", "scaled", "own attention", "attention"],
        "mesh",
    ],
)
def test_what_cannot_be_cut_is_refused_before_a_device_is_touched(
    policy: ModelSpec | Role, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_strategy(on_cpus(FSDP2Strategy(**settings), 4), GRPO(policy, reward=len))
