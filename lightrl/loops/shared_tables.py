"""Shares the images in an Experience: each image is sent once to every rank that works on a row with it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from lightrl.loops.sharing import all_rows_of, nowhere, working_rows
from lightrl.models.images import ImageTable, renumbered
from lightrl.module import RLModule
from lightrl.strategies import ShardedExperience
from lightrl.strategies.sharded_experience.exchange import exchange
from lightrl.strategies.sharded_experience.experience import TokenRows
from lightrl.trajectory import Trajectory


def share_tables(
    experience: ShardedExperience, trajectories: Sequence[Trajectory], module: RLModule, *, has_all: Collection[int]
) -> ShardedExperience:
    """Reads the images on the ranks `has_all`, and sends each image once to every rank that needs it. Collective."""
    image_reader = module.image_reader
    ranks = experience.ranks
    images_by_row = [(*item.prompt.images, *item.images) for item in trajectories] if ranks.rank in has_all else []
    table = ImageTable.of(images_by_row, image_reader) if any(images_by_row) else None
    if ranks.size == 1 or image_reader is None:
        return experience if table is None else experience.with_tensors(table._asdict())
    without_pixels = {} if table is None else table._replace(pixel_values=table.pixel_values[:0])._asdict()
    fields = ranks.broadcast_tensors(without_pixels)
    if not fields:
        return experience
    empty, grids, image_rows = (fields[name] for name in ImageTable._fields)
    images = ShardedExperience({"lengths": grids.prod(1)}, {}, ranks)
    pixels = nowhere(images, empty) if table is None else TokenRows.of_flat(table.pixel_values.numpy(), images.lengths)
    shown = [renumbered(image_rows.where(rows[:, None], -1), len(grids)) for rows in working_rows(experience)]
    needs = torch.stack([is_shown for is_shown, _ in shown])  # the images that each rank needs
    pixels = exchange(images, {"pixel_values": pixels}, all_rows_of(images, has_all), needs)["pixel_values"]
    is_here, image_rows = shown[ranks.rank]
    local = ImageTable(torch.from_numpy(pixels.flat(pixels.here)), grids[is_here], image_rows)
    return experience.with_tensors(local._asdict())
