"""Script of test_image_ranks.py: GRPO and SFT with images, on one rank and on two, one of which has none at first.

    python tests/trainer/image_ranks_run.py FOLDER FAMILY [CP]

Each rank leaves its weights, and how many images it read in each iteration, in `FOLDER/FAMILY-<ranks>/rank-<rank>.pt`.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from images_cases import PhotoChats, image_spec, image_trajectories
from rank_scripts import fork_runs, leave
from resharded_run import weights_of
from several_ranks_run import BySGD
from tiny_run import make_trainer

from lightrl import GRPO, FSDP2Strategy, LocalEngine, Prompt, PromptDataModule, Sampling, Trajectory
from lightrl.algorithms import SFT
from lightrl.experience import Experience


class Photos(PromptDataModule):
    """Prompts with an image, two, and none; those of the first iteration are so long that each trains on one rank."""

    def __init__(self, family: str) -> None:
        super().__init__(None, batch_size=2, shuffle=False)
        self.family = family

    def make_prompts(self, split: str) -> list[Prompt]:
        one, other, text, two = (item.prompt for item in image_trajectories(group_size=1, family=self.family))
        return [Prompt("with", token_ids=[*one.token_ids, 4], images=one.images), text, other, two]


class ImageGRPO(BySGD, GRPO):
    def __init__(self, family: str) -> None:
        super().__init__(
            image_spec(family),
            group_size=2,
            sampling=Sampling(max_new_tokens=4, temperature=4.0),  # unlike tokens in a group
            lr=0.05,
            microbatch_tokens=24,
        )
        self.loss_unit = "group"  # the rows of a group are on one rank
        self.num_images: list[int] = []

    def reward(self, trajectory: Trajectory) -> float:
        return float(trajectory.sample)

    def on_experience_ready(self, experience: Experience) -> None:
        images = experience.local.image_rows
        self.num_images.append(0 if images is None else int((images >= 0).sum()))


class ImageSFT(SFT):
    """Adam would divide the rounding of a tiny gradient by itself."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def spread(size: int, cp: int) -> dict[str, Any]:
    return {"devices": size, "strategy": FSDP2Strategy(cp=cp)} if size > 1 else {}


def train(folder: Path, family: str, cp: int, size: int) -> None:
    torch.set_num_threads(1)
    module = ImageGRPO(family)
    files = folder / f"files of {family} {size}"
    trainer = make_trainer(files, max_steps=2, engine=LocalEngine(threads=1), **spread(size, cp))
    trainer.fit(module, datamodule=Photos(family))
    supervised = ImageSFT(image_spec(family))
    trainer = make_trainer(files, max_steps=3, **spread(size, cp))
    trainer.fit(supervised, datamodule=PhotoChats(batch_size=3))
    weights = {"GRPO": weights_of(module), "SFT": weights_of(supervised)}
    leave({"weights": weights, "images": module.num_images}, folder / f"{family}-{size}")


if __name__ == "__main__":
    sys.exit(fork_runs([1, 2], partial(train, Path(sys.argv[1]), sys.argv[2], int(*sys.argv[3:] or [1]))))
