"""docs/algorithms.md: its losses train as they stand there, and the classes it names exist."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import gradients, random_experience, tiny_spec

import lightrl
from lightrl.loops.update import MinibatchLoss
from lightrl.strategies import LogprobSettings, SingleModel

PAGE = (Path(lightrl.__file__).parents[1] / "docs" / "algorithms.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def defined(block: str) -> type[lightrl.RLModule]:
    names: dict[str, Any] = {}
    exec(block, names)  # the page's own code
    (kind,) = [value for value in names.values() if isinstance(value, type) and issubclass(value, lightrl.RLModule)]
    return kind


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.split("class ")[1].split("(")[0])
def test_a_new_loss_takes_at_most_15_lines_and_trains_whatever_the_microbatches(block: str) -> None:
    assert len([line for line in block.split("class ")[1].splitlines() if line.strip()]) <= 15
    module = defined(block)(tiny_spec(), reward=len, group_size=3)
    module.configure_model()
    minibatch = random_experience(num_groups=5)

    def gradient(max_tokens: int) -> torch.Tensor:
        parts = minibatch.microbatch_rows(max_tokens, unit=module.loss_unit)[1]
        assert max_tokens > 100 or len(parts) > 1
        model = SingleModel(module.policy, LogprobSettings())
        model.forward_backward(parts, MinibatchLoss(module, minibatch), torch.Tensor.backward)
        return gradients(module.policy)["lm_head.weight"]

    whole = gradient(10**6)
    assert whole.abs().max() > 0
    torch.testing.assert_close(gradient(1), whole, rtol=1e-3, atol=1e-5)


def test_the_classes_that_the_page_names_exist() -> None:
    table_rows = [line for line in PAGE.splitlines() if line.startswith("| `")]
    names = {name for line in table_rows for name in re.findall(r"`([A-Z]\w+)`", line.split("|")[1])}
    assert len(names) > 12
    assert not [name for name in names if not hasattr(lightrl, name)]


@pytest.mark.parametrize(
    ("setting", "kind"),
    [("decoupled", lightrl.ImportanceWeights), ("reference", lightrl.AdaptiveKL)],
    ids=["decoupled", "reference"],
)
def test_the_settings_in_braces_that_the_page_names_exist(setting: str, kind: type) -> None:
    examples = re.findall(rf"{setting}: {{([^}}]*)}}", PAGE)
    names = {part.split(":")[0].strip() for example in examples for part in example.split(",")}
    assert len(names) >= 2
    assert names <= inspect.signature(kind).parameters.keys()
