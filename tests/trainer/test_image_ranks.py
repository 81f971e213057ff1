"""Images on two ranks, of which one has none: the weights are those of one process; image_ranks_run.py is what runs."""

from pathlib import Path

import pytest
import torch
from images_cases import FAMILIES
from rank_scripts import ROUNDING, run

pytestmark = pytest.mark.extra


def test_ranks_with_and_without_images_train_as_one_process(tmp_path: Path) -> None:
    run(Path(__file__).with_name("image_ranks_run.py"), tmp_path, *FAMILIES)
    for family in FAMILIES:
        one = torch.load(tmp_path / f"{family}-1" / "rank-0.pt")
        ranks = [torch.load(tmp_path / f"{family}-2" / f"rank-{rank}.pt") for rank in range(2)]
        first, second = (sum(found["images"][iteration] for found in ranks) for iteration in range(2))
        assert [first, second] == one["images"], family
        assert 0 in [found["images"][0] for found in ranks], family
        for algorithm, weights in one["weights"].items():
            for name, value in weights.items():
                for found in ranks:
                    difference = (found["weights"][algorithm][name] - value).abs().max()
                    size = max(1e-3, float(value.abs().max()))  # a bias of keys has no gradient but rounding
                    assert difference <= ROUNDING * size, (family, algorithm, name)
