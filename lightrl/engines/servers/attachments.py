"""Attachments: what a request has besides its prompt's tokens, which are the prompt's images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightrl.errors import RolloutError
from lightrl.models.images import ImageReader, data_url, refusal


@dataclass(frozen=True)
class Attachments:
    """The images of a prompt as servers take them, next to its tokens."""

    prompt: list[int]  # the prompt's token ids, with one image token for each image: the server repeats it
    body: dict[str, Any]  # in the body of a request: data: URLs, for servers on other machines
    image_token_id: int  # the id that stands for an image
    num_images: int

    @classmethod
    def of(cls, image_reader: ImageReader | None, images: Sequence[str], token_ids: list[int]) -> Attachments:
        """The images of a prompt, given how the policy reads them; raises ValueError if it takes none."""
        if image_reader is None:
            raise ValueError(refusal(len(images)))
        if image_reader.frame:
            raise ValueError(
                "Servers take no images for models of type gemma3: they write line breaks around an image, which the "
                "tokens of its prompt have already. Use LocalEngine."
            )
        image_reader.check(images, token_ids)
        prompt = image_reader.collapsed(token_ids, images)
        body = {"image_data": [data_url(image) for image in images]}
        return cls(prompt, body, image_reader.image_token_id, len(images))

    def input_ids(self, generated: Sequence[int]) -> list[int]:
        """The prompt and what follows; raises RolloutError if a server would take one of its tokens for an image."""
        token_ids = [*self.prompt, *generated]
        if token_ids.count(self.image_token_id) != self.num_images:
            raise RolloutError(
                f"The policy has sampled an image token (id {self.image_token_id}), which a server would take for an "
                "image in the next request."
            )
        return token_ids
