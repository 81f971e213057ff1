from __future__ import annotations

import pytest

from lightrl.algorithms.setting_names import setting_names


def test_a_refusal_names_the_setting_wherever_the_argument_stands_as_a_word() -> None:
    with (
        pytest.raises(
            ValueError, match=r"^importance_cap=0, expected more than importance_floor=1 of capital\. Raise it"
        ),
        setting_names(cap="importance_cap", floor="importance_floor"),
    ):
        raise ValueError("cap=0, expected more than floor=1 of capital. Raise it.")


def test_other_errors_keep_their_words() -> None:
    with pytest.raises(RuntimeError, match=r"^cap$"), setting_names(cap="importance_cap"):
        raise RuntimeError("cap")
