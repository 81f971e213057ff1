"""Images on two ranks, of which one has none: the weights are those of one process; image_ranks_run.py is what runs."""

from pathlib import Path

import pytest
import torch
from images_cases import FAMILIES, image_spec
from rank_scripts import ROUNDING, run

pytestmark = pytest.mark.extra


@pytest.mark.parametrize(
    ("family", "cp"),
    [*((family, 1) for family in FAMILIES), *((family, 2) for family in ("qwen3_vl", "llava", "gemma3"))],
)
def test_ranks_with_and_without_images_train_as_one_process(family: str, cp: int, tmp_path: Path) -> None:
    run(Path(__file__).with_name("image_ranks_run.py"), tmp_path, family, str(cp))
    one = torch.load(tmp_path / f"{family}-1" / "rank-0.pt")
    ranks = [torch.load(tmp_path / f"{family}-2" / f"rank-{rank}.pt") for rank in range(2)]
    first, second = (sum(found["images"][iteration] for found in ranks) for iteration in range(2))
    assert [first, second] == one["images"]
    assert cp > 1 or 0 in [found["images"][0] for found in ranks]
    start = image_spec(family).load_model().state_dict()
    tower = next(name for name in start if "patch_embed" in name)
    for algorithm, weights in one["weights"].items():
        assert not torch.equal(weights[tower], start[tower]), algorithm
        for name, value in weights.items():
            for found in ranks:
                difference = (found["weights"][algorithm][name] - value).abs().max()
                size = max(1e-3, float(value.abs().max()))  # a bias of keys has no gradient but rounding
                assert difference <= ROUNDING * size, (algorithm, name)
