"""models/expert_parallel.py: which families' experts can be divided; ranks are in trainer/test_divided_experts.py."""

import pytest
from moe_cases import EACH_FAMILY, moe_spec
from tiny import tiny_spec
from transformers import PreTrainedModel

from lightrl.models.expert_parallel import num_split_experts

WITHOUT_PLAN = {"llama4_text", "gemma4_text"}


@pytest.mark.parametrize("family", EACH_FAMILY)
def test_the_experts_of_a_family_are_counted_or_refused(family):
    config = moe_spec(family).load_config()
    if family in WITHOUT_PLAN:
        with pytest.raises(
            ValueError, match=f"transformers has no plan to divide the experts of model_type '{family}'"
        ):
            num_split_experts(config)
    else:
        assert num_split_experts(config) == 4


def test_a_dense_model_has_no_experts_to_divide():
    assert num_split_experts(tiny_spec().load_config()) == 0


def test_transformers_has_the_plans_that_are_read():
    assert isinstance(PreTrainedModel.ep_plan, property)
    assert callable(PreTrainedModel._expand_parallel_plan)
