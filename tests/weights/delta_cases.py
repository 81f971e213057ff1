"""A trainer whose parameters move a little, and its versions on their way to a DeltaFolder."""

from pathlib import Path

import torch
from torch import Tensor

from lightrl.weights import ServerForm, bucketed
from lightrl.weights.delta import DeltaCopy, checksum, full_parts, version_digest
from lightrl.weights.delta_folder import NOTHING, DeltaFolder, Version


class DeltaTrainer:
    """Parameters in float32, served in bfloat16; one is larger than a chunk."""

    def __init__(self, seed: int = 0, run: str = "run") -> None:
        self.generator = torch.Generator().manual_seed(seed)
        shapes = {"big": (600, 1000), "small": (7, 5), "unchanged": (11,), "empty": (0, 3)}
        self.named = {name: torch.randn(shape, generator=self.generator) * 0.02 for name, shape in shapes.items()}
        self.run = run
        self.copy = DeltaCopy(ServerForm(torch.bfloat16))
        self.version = self.base = NOTHING
        self.parts: list[bytes] = []  # of the delta from `base` to `version`

    def close(self) -> None:
        self.copy.close()

    def step(self, size: float = 1e-6) -> None:
        """The next version, and its delta."""
        for name in ("big", "small"):
            tensor = self.named[name]
            tensor += size * torch.randn(tensor.shape, generator=self.generator).sign()
        number, self.base = self.version.weight_version + 1, self.version
        self.copy.begin(number)
        self.parts = []
        for bucket in bucketed(self.named.items(), 1000):
            self.parts += self.copy.take_delta(bucket, number > 0)[0]
        self.version = Version(self.run, number, version_digest(self.run, number, self.copy.checksums))

    def expected(self) -> dict[str, Tensor]:
        return {name: tensor.bfloat16() for name, tensor in self.named.items()}

    def send_delta(self, folder: DeltaFolder) -> Path:
        return send(folder, self.version, self.parts, self.base.digest)

    def send_full(self, folder: DeltaFolder) -> Path:
        return send(folder, self.version, [part for bucket in self.copy.buckets() for part in full_parts(bucket)])


def send(folder: DeltaFolder, version: Version, parts: list[bytes], base: str = "") -> Path:
    folder.begin("session", base)
    for index, part in enumerate(parts):
        folder.write("session", index, part, checksum(part))
    return folder.finish("session", version, len(parts), {"model_type": "qwen3"})


def is_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
