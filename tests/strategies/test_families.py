"""Families of models: two GRPO steps give the engine's logprobs, packed or not, on two ranks as in one process."""

import json

import pytest
from moe_cases import adapters_of_experts

from benchmarks import families
from benchmarks.families import FAMILIES, TOLERANCE
from lightrl.strategies.layouts.packing_trial import refuses_packing

REFUSED = {"minimax", "mamba2", "zamba2", "deepseek_v32", "glm_moe_dsa"}
# Those whose experts transformers has a plan for.
DIVIDED = ["qwen3_vl_moe", *(name for name in FAMILIES["mixture of experts"] if name not in {*REFUSED, "llama4_text"})]
ALL = [family for kind in FAMILIES.values() for family in kind]
# Caps or scales of logits, sinks, chunks, or attention that packed rows do not reach; states, on a CPU.
NOT_PACKED = {"gemma2", "cohere2", "nemotron", "gpt_oss", "llama4_text", *FAMILIES["hybrid"]}


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "qwen2_5_vl", "qwen3_next", "minimax", "deepseek_v32"])
def test_a_family_is_exact_in_one_process_or_refused_with_the_reason(family):
    check(families.measure(family, fsdp2=False))


@pytest.mark.extra
@pytest.mark.parametrize("family", ALL)
def test_a_family_is_exact_on_two_ranks_too_or_refused_with_the_reason(family):
    row = families.measure(family)
    check(row)
    assert family in REFUSED or row.fsdp2_grad_error <= TOLERANCE


def check(row):
    assert row.outcome == ("refused" if row.family in REFUSED else "exact"), row.why
    if row.outcome == "refused":
        assert row.family in row.why
        assert ("Use a different model" if row.family == "zamba2" else "Use SGLangEngine") in row.why
        return
    assert row.max_abs_dlogp <= TOLERANCE
    assert row.packed == (row.family not in NOT_PACKED)


@pytest.mark.extra
@pytest.mark.parametrize(
    ("family", "num_ranks", "settings", "bound"),
    [
        pytest.param("qwen3_moe", 3, {}, TOLERANCE, id="a rank without experts"),
        pytest.param("qwen3_moe", 2, {"is_mixed": True}, 0.01, id="bf16-mixed"),
        pytest.param("deepseek_v3", 2, {"is_mixed": True}, 0.01, id="bf16-mixed with shared experts"),
        pytest.param("qwen3_moe", 2, {"is_mixed": True, "ep": 2}, 0.01, id="bf16-mixed with divided experts"),
        *[pytest.param(name, 2, {}, TOLERANCE, id=name) for name in FAMILIES["hybrid"]],
        *[pytest.param(name, 4, {"ep": 2}, TOLERANCE, id=f"divided experts of {name}") for name in DIVIDED],
        pytest.param("qwen3_moe", 2, {"is_mixed": True, "cp": 2}, 0.01, id="bf16-mixed with shared rows"),
        *[
            pytest.param(name, 2, {"cp": 2}, TOLERANCE, id=f"shared rows of {name}")
            for name in ALL
            if name not in {*REFUSED, *NOT_PACKED}
        ],
    ],
)
def test_gradients_of_ranks_equal_those_of_one_process(family, num_ranks, settings, bound, tmp_path):
    families.make_folder(family, str(tmp_path))
    assert families.measure_ranks(str(tmp_path), num_ranks, **settings) <= bound


@pytest.mark.extra
@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"])
def test_adapters_of_experts_get_the_gradients_of_one_process(family, ep, tmp_path):
    spec = families.make_folder(family, str(tmp_path))
    lora = adapters_of_experts(spec.load_model(), tmp_path / "adapter")
    assert families.measure_ranks(str(tmp_path), 4, lora=lora, ep=ep) <= TOLERANCE


@pytest.mark.extra
@pytest.mark.parametrize("family", sorted({*REFUSED, *NOT_PACKED}))
def test_a_family_whose_rows_cannot_be_cut_is_refused(family, tmp_path):
    families.make_folder(family, str(tmp_path))
    with pytest.raises(ValueError, match=f"'{family}' does not allow it: its tokens interact beyond causal SDPA"):
        families.measure_ranks(str(tmp_path), 2, cp=2)


def test_a_family_that_can_be_packed_is_not_refused_early():
    packed = sorted(set(ALL) - {*REFUSED, *NOT_PACKED})
    assert len(packed) > 30
    assert not [name for name in packed if refuses_packing(families.family_spec(name).load_config(), has_logits=True)]


@pytest.mark.extra
def test_tokens_are_trained_with_the_experts_that_a_bfloat16_engine_chose():
    row = families.measure_replay("mixtral")
    assert 0.1 < row.routed_otherwise < 0.9
    assert row.replayed < row.native / 3


def test_the_page_has_the_rows_of_the_last_run():
    rows = [families.Row(**json.loads(line)) for line in families.ROWS.read_text().splitlines()]
    assert [row.family for row in rows] == ALL
    assert families.with_tables(families.PAGE.read_text(), rows) == families.PAGE.read_text()
    for row in rows:
        assert row.outcome == ("refused" if row.family in REFUSED else "exact")
