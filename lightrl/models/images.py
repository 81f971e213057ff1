"""Images: what a model that sees images needs besides token ids, from strings in a prompt to a forward.

    Prompt.images ─► pixel values ─► features ─► embeddings of K tokens each
    paths, data:     [M, 3, H, W]    [M, K, H]   of the prompt

An image is a fixed number K of image tokens, which the token ids of its prompt or observation contain from the start.
Only the first K · (number of images) image tokens of a row are images; one that the policy samples is like any other.

Shapes: B trajectories, T tokens, M images, I most images of a row, K tokens per image, H hidden size.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from lightrl.checks.printable import count_text
from lightrl.models.hybrids import set_time_step_limits
from lightrl.trajectory import JsonObject, Trajectory


class HasTensors(Protocol):
    """An Experience, sharded or not."""

    def with_tensors(self, tensors: dict[str, Tensor]) -> Self: ...


_AnyExperience = TypeVar("_AnyExperience", bound=HasTensors)

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import BaseImageProcessor, PretrainedConfig, PreTrainedModel
    from typing_extensions import Self

# Vision towers whose images are a fixed number of tokens, and how many tokens each adds to its patches.
_EXTRA_TOKENS = {"clip_vision_model": 1, "siglip_vision_model": 0}
SUPPORTED = "models of type 'llava' with a vision tower of type clip_vision_model or siglip_vision_model"
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")  # another one, EPS, would run Ghostscript
_CACHE_BYTES = 256 * 2**20  # pixel values are kept: the samples of a group have the same image


@dataclass(frozen=True)
class ImageReader:
    """Reads the images of a model.

    Example:
        ImageReader(image_token_id=32000, tokens_each=576, processor=CLIPImageProcessorPil(...))
    """

    image_token_id: int
    tokens_each: int  # K
    processor: BaseImageProcessor  # on Pillow
    _cache: dict[str, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, config: PretrainedConfig) -> ImageReader | None:
        """Makes the reader for a model of this config; None if it takes token ids only.

        The image processor comes from the checkpoint; for random weights one scales images to the tower's size.
        """
        if not sees_images(config):
            return None
        vision = config.vision_config
        num_patches = (vision.image_size // vision.patch_size) ** 2
        dropped = 1 if config.vision_feature_select_strategy == "default" else 0
        return cls(
            image_token_id=int(config.image_token_id),
            tokens_each=num_patches + _EXTRA_TOKENS[vision.model_type] - dropped,
            processor=_load_processor(config),
        )

    def expanded(self, token_ids: Sequence[int], num_images: int, *, where: str) -> list[int]:
        """Token ids with K image tokens for each image, from one for each, or K already."""
        num_tokens = list(token_ids).count(self.image_token_id)
        if num_tokens == num_images * self.tokens_each:
            return list(token_ids)
        if num_tokens != num_images:
            raise ValueError(
                f"{where} needs one image token (id {self.image_token_id}) for each of its {num_images} images, got "
                f"{num_tokens}. Give its messages an image part for each, and use a chat template that renders them."
            )
        repeats = (self.tokens_each if token == self.image_token_id else 1 for token in token_ids)
        return [token for token, times in zip(token_ids, repeats, strict=True) for _ in range(times)]

    def collapsed(self, token_ids: Sequence[int], num_images: int) -> list[int]:
        """The inverse of `expanded`: one image token for each image, as SGLang expects."""
        left, short_ids, skip = num_images, [], 0
        for token in token_ids:
            if skip:
                skip -= 1
                continue
            short_ids.append(token)
            if token == self.image_token_id and left:
                left -= 1
                skip = self.tokens_each - 1
        return short_ids

    def check(self, images: Sequence[str], token_ids: Sequence[int]) -> None:
        """Raises ValueError if the token ids have too few image tokens for these images."""
        num_tokens = list(token_ids).count(self.image_token_id)
        if num_tokens < len(images) * self.tokens_each:
            raise ValueError(
                f"The prompt needs {self.tokens_each} image tokens for each of its {len(images)} images, got "
                f"{num_tokens}. Render it with the data module, or repeat the image token."
            )

    def pixel_values(self, images: Sequence[str]) -> Tensor:
        """[M, 3, H, W] float32; recent images are cached."""
        rows = []
        for image in images:
            pixels = self._cache.get(image)
            if pixels is None:
                pixels = self.processor(images=[read_image(image)], return_tensors="pt")["pixel_values"][0].float()
                if (len(self._cache) + 1) * pixels.numel() * pixels.element_size() > _CACHE_BYTES:
                    self._cache.clear()
                self._cache[image] = pixels
            rows.append(pixels)
        return torch.stack(rows)


def sees_images(config: PretrainedConfig) -> bool:
    """Whether models of this config can get images from us."""
    tower = getattr(getattr(config, "vision_config", None), "model_type", None)
    return config.model_type == "llava" and tower in _EXTRA_TOKENS


def auto_model(config: PretrainedConfig) -> Any:
    """The auto class for a language model of this config; with an image tower if it has one, even on text alone."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    has_tower = hasattr(config, "vision_config") and type(config) in AutoModelForImageTextToText._model_mapping
    return AutoModelForImageTextToText if has_tower else AutoModelForCausalLM


def new_model(config: PretrainedConfig, **options: Any) -> PreTrainedModel:
    """A language model with random weights; `options` are those of `from_config`."""
    model: PreTrainedModel = auto_model(config).from_config(config, **options)
    give_pad_id(model)
    set_time_step_limits(model)
    return model


def give_pad_id(model: PreTrainedModel) -> None:
    """Gives the config of a model with an image tower a pad id, which some forwards put in place of image tokens.

    Called on a finished model: its embeddings were made without, so that every row of them has a gradient.
    """
    text = model.config.get_text_config()
    if text is not model.config and getattr(text, "pad_token_id", None) is None:
        text.pad_token_id = 0


def read_image(image: str) -> Image:
    """The image of a path or a `data:` URL, in RGB; raises ValueError above Pillow's limit of 179 million pixels."""
    from PIL import Image

    try:
        source = io.BytesIO(_bytes_of(image)) if image.startswith("data:") else Path(image).expanduser()
        with Image.open(source, formats=_FORMATS) as opened:
            return opened.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(
            f"Image {image[:80]!r} cannot be read ({error}). It must be the path of an image or a data: URL with "
            f"base64: {', '.join(_FORMATS)}."
        ) from error


def data_url(image: str | bytes | Image) -> str:
    """An image as a `data:` URL, text that can be sent to other machines."""
    if isinstance(image, str):
        if image.startswith("data:"):
            return image
        image = read_image(image)
    if not isinstance(image, bytes):
        buffer = io.BytesIO()
        image.save(buffer, format="PNG")
        image = buffer.getvalue()
    return "data:image/png;base64," + base64.b64encode(image).decode()


def with_images(
    experience: _AnyExperience,
    trajectories: Sequence[Trajectory],
    image_reader: ImageReader | None,
    *,
    rows: Collection[int] | None = None,
) -> _AnyExperience:
    """The experience with its trajectories' images, each once.

    Args:
        experience: of these trajectories, row by row.
        image_reader: of the policy.
        rows: those whose images are computed on here; None for all.
    """
    images = [(*trajectory.prompt.images, *trajectory.images) for trajectory in trajectories]
    distinct = dict.fromkeys(image for row in images for image in row)
    if not distinct:
        return experience
    if image_reader is None:
        raise ValueError(refusal(len(distinct)))
    if rows is not None:
        here = set(rows)
        images = [names if row in here else () for row, names in enumerate(images)]
    index_of = {image: index for index, image in enumerate(dict.fromkeys(image for row in images for image in row))}
    width = max(len(row) for row in images)
    image_rows = [[index_of[image] for image in row] + [-1] * (width - len(row)) for row in images]
    pixel_values = image_reader.pixel_values(list(index_of)) if index_of else torch.zeros(0, 3, 1, 1)
    return experience.with_tensors({"pixel_values": pixel_values, "image_rows": torch.tensor(image_rows)})


def refusal(num_images: int) -> str:
    """The message about images for a model that takes token ids only."""
    return (
        f"Got {count_text(num_images, 'image')}, but the policy takes token ids only. Use one of {SUPPORTED}, or leave "
        "the images out."
    )


def input_embeddings(model: PreTrainedModel, token_ids: Tensor, pixel_values: Tensor, image_rows: Tensor) -> Tensor:
    """The input of the layers, [B, T, H]: token embeddings, with the images' features at their image tokens.

    Each image goes through the vision tower once, however many rows show it.

    Args:
        model: sees images.
        token_ids: [B, T], with all image tokens of the prompts.
        pixel_values: [M, 3, H, W].
        image_rows: int64 [B, I], the images of each row in order; -1 is none.
    """
    embeddings = model.get_input_embeddings()(token_ids)
    shown = image_rows[image_rows >= 0]
    if not len(shown):
        return cast(Tensor, embeddings)
    used, inverse = torch.unique(shown, return_inverse=True)
    pixels = pixel_values[used].to(embeddings.dtype)
    features = torch.stack(
        tuple(model.base_model.get_image_features(pixel_values=pixels, return_dict=True).pooler_output)
    )
    num_tokens = (image_rows >= 0).sum(1, keepdim=True) * features.shape[1]
    is_image = token_ids == model.config.image_token_id
    is_prompt_image = is_image & (is_image.cumsum(1) <= num_tokens)
    if not torch.equal(is_prompt_image.sum(1, keepdim=True), num_tokens):
        raise ValueError(
            f"The rows need {num_tokens[:, 0].tolist()} image tokens for their images, got "
            f"{is_prompt_image.sum(1).tolist()}. Render the prompts with the data module."
        )
    filled: Tensor = embeddings.masked_scatter(is_prompt_image[..., None], features[inverse].to(embeddings.dtype))
    return filled


def take_images(
    messages: Sequence[JsonObject], images: Sequence[object] = (), *, folder: Path
) -> tuple[list[JsonObject], tuple[str, ...]]:
    """Moves images out of messages: bare image parts, and the images as paths or data: URLs, in order.

    Args:
        messages: image parts look like `{"type": "image", "image": "cats/3.png"}`; `path` and `url` also work, and a
            part without any of them takes the next of `images`.
        images: the row's images; if no part takes them, they go first in the last user turn.
        folder: base of relative paths.

    Raises:
        ValueError: for an image part without an image, images that do not match the parts, or a web address.
    """
    unplaced = [_image_text(image, folder) for image in images]
    placed: list[str] = []
    bare: list[JsonObject] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            parts = []
            for part in content:
                if part.get("type") == "image":
                    named = next((part[key] for key in ("image", "path", "url") if part.get(key)), None)
                    if named is None and not unplaced:
                        raise ValueError('An image part needs an image: {"type": "image", "image": "cats/3.png"}.')
                    placed.append(_image_text(named, folder) if named is not None else unplaced.pop(0))
                    part = {"type": "image"}
                parts.append(part)
            message = {**message, "content": parts}
        bare.append(message)
    if unplaced and placed:
        raise ValueError(
            f"There are {len(placed) + len(unplaced)} images for {len(placed)} image parts. Give each image an "
            "image part, or use no image parts."
        )
    if unplaced:
        last = max((index for index, message in enumerate(bare) if message["role"] == "user"), default=None)
        if last is None:
            raise ValueError("Images need a user turn, but the messages have none. Add one, or image parts.")
        content = bare[last]["content"]
        text = [{"type": "text", "text": content}] if isinstance(content, str) else content
        bare[last] = {**bare[last], "content": [*({"type": "image"} for _ in unplaced), *text]}
    return bare, tuple(placed or unplaced)


def _image_text(image: Any, folder: Path) -> str:
    """An image as a Prompt holds it: a path or a data: URL. Takes those, bytes, Pillow images and datasets' dicts."""
    if isinstance(image, dict):
        image = image.get("bytes") or image.get("path")
    if not isinstance(image, str):
        return data_url(image)
    if image.startswith("data:") or Path(image).expanduser().is_absolute():
        return image
    if "://" in image:
        raise ValueError(f"Image {image[:80]!r} must be a path or a data: URL, not a web address. Download it first.")
    return str(folder / image)


def save_processor(config: PretrainedConfig, folder: Path) -> None:
    """Writes the image processor next to an exported model that sees images; nothing for others."""
    image_reader = ImageReader.of(config)
    if image_reader is not None:
        image_reader.processor.save_pretrained(folder)


def _load_processor(config: PretrainedConfig) -> BaseImageProcessor:
    from transformers import AutoImageProcessor, CLIPImageProcessorPil

    source = config.name_or_path
    is_bare = Path(source).is_dir() and not any(
        (Path(source) / name).is_file() for name in ("preprocessor_config.json", "processor_config.json")
    )
    if source and not is_bare:
        return AutoImageProcessor.from_pretrained(source, backend="pil", trust_remote_code=False)
    size = config.vision_config.image_size
    return CLIPImageProcessorPil(size={"height": size, "width": size}, do_center_crop=False)


def _bytes_of(url: str) -> bytes:
    kind, _, text = url.partition(",")
    if not kind.endswith(";base64"):
        raise binascii.Error("no ;base64, in it")
    return base64.b64decode(text, validate=True)
