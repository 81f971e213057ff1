"""A role from a path, a ModelSpec or a Role."""

from typing import Any

import pytest
from tiny import tiny_spec

from lightrl.models import LoRA, ModelSpec, Role
from lightrl.models.tuning import tuning_of


def test_a_role_is_made_of_a_path_or_a_model_or_is_one() -> None:
    role = Role("org/name", lr=0.1)
    assert Role.of(role) is role
    assert Role.of("org/name") == Role("org/name")
    assert Role.of("org/name").spec == Role.of(ModelSpec("org/name")).spec == ModelSpec("org/name")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, r"lr must be >= 0, got -1\.0"),
        ({"weight_decay": float("nan")}, "weight_decay must be >= 0, got nan"),
    ],
    ids=["lr", "decay"],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Role("org/name", **settings)


def test_adapters_belong_to_the_role_and_not_to_its_model() -> None:
    role = Role(tiny_spec(), lora=LoRA(rank=2))
    assert tuning_of(role.load_model()).keeps_base
    assert not tuning_of(role.spec.load_model()).keeps_base


def test_a_scalar_head_changes_the_model_alone() -> None:
    role = Role(tiny_spec(), lr=0.5).with_scalar_head()
    assert (role.spec.head, role.lr) == ("scalar", 0.5)
