"""Images: reads a prompt's images and turns them into the inputs of a vision model's forward.

    Prompt.images ─► a table of pixel values ─► features ──────► embeddings of the image's tokens
    paths, data:     [P, ...], grids [M, 3]     [K, H] of each   and their positions

An image takes K image tokens, which are in the token ids of its prompt or observation from the start. K is fixed for
Llava and Gemma 3; Qwen's models have a token per square of patches. Image tokens that the policy samples come after
the tokens of the row's images. They count as text and have text positions.

Shapes: B trajectories, T tokens, M images, P entries of the table, I images per row at most, H hidden size.
"""

from __future__ import annotations

import base64
import binascii
import functools
import io
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from lightrl.checks.printable import count_text
from lightrl.errors import RolloutError
from lightrl.experience import Experience
from lightrl.functional import on_host, to_device
from lightrl.models.hybrids import set_time_step_limits
from lightrl.trajectory import JsonObject

_T = TypeVar("_T")

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import BaseImageProcessor, PretrainedConfig, PreTrainedModel

# Llava's vision towers → the number of tokens that each adds to an image's patch tokens.
_EXTRA_TOKENS = {"clip_vision_model": 1, "siglip_vision_model": 0}
# Models whose images are grids of patches, with positions in three dimensions.
_GRIDS = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
SUPPORTED = (
    f"models of type {', '.join(_GRIDS)}, gemma3, or llava with a vision tower of type clip_vision_model or "
    "siglip_vision_model"
)
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")  # no EPS, because reading it would run Ghostscript
_CACHE_BYTES = 256 * 2**20  # limit for cached pixel values; all trajectories in a group read the same images


class ImageTable(NamedTuple):
    """Pixel values of all images, and the images that each row shows; fields of an Experience.

    Example:
        Images of 2 × 4 and 4 × 4 patches of 96 numbers; the first row shows both, the second none:
        ImageTable(torch.zeros(24, 96), torch.tensor([[1, 2, 4], [1, 4, 4]]), torch.tensor([[0, 1], [-1, -1]]))
    """

    pixel_values: Tensor  # float32 [P, ...]: patches [D] of a grid, or images [C, height, width]
    image_grids: Tensor  # int64 [M, 3]; an image's number of entries is the product of its grid; read on the host
    image_rows: Tensor  # int64 [B, I], indices of each row's images in order, padded with -1; read on the host

    @classmethod
    def of(cls, rows: Sequence[Sequence[str]], image_reader: ImageReader | None) -> ImageTable | None:
        """Reads each image of the rows once; returns None without images. Raises ValueError for a text-only policy."""
        index_of = {image: index for index, image in enumerate(dict.fromkeys(itertools.chain(*rows)))}
        if not index_of:
            return None
        if image_reader is None:
            raise ValueError(refusal(len(index_of)))
        width = max(map(len, rows))
        image_rows = [[index_of[image] for image in row] + [-1] * (width - len(row)) for row in rows]
        return image_reader.read(list(index_of))._replace(image_rows=torch.tensor(image_rows))

    def shown(self) -> ImageTable:
        """Removes the images that no row shows, and renumbers the rest."""
        values, grids, rows = self.pixel_values, on_host(self.image_grids), on_host(self.image_rows)
        is_shown, new_rows = renumbered(rows, len(grids))
        if not is_shown.all():
            entries = is_shown.repeat_interleave(grids.prod(1)).nonzero()[:, 0]
            values = values[to_device(entries, values.device)]
        return ImageTable(values, grids[is_shown], new_rows)


def keep_shown(fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Removes images that no row shows from these fields of an Experience, renumbering the rest; {} without images."""
    return {} if "pixel_values" not in fields else _table_of(fields).shown()._asdict()


def _table_of(fields: Mapping[str, Tensor] | Experience) -> ImageTable:
    return ImageTable(*(fields[name] for name in ImageTable._fields))


def renumbered(image_rows: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Returns a mask [num] of the images that the rows show, and the rows [B, I] with those images renumbered."""
    is_shown = torch.zeros(num + 1, dtype=torch.bool)  # the last entry is for the padding, -1
    is_shown[image_rows] = True
    is_shown = is_shown[:-1]
    return is_shown, torch.cat([is_shown.cumsum(0) - 1, torch.tensor([-1])])[image_rows]


@dataclass(frozen=True)
class ImageReader:
    """Reads images in the format that one model needs, and counts their tokens.

    Example:
        ImageReader(image_token_id=32000, tokens_each=576, processor=CLIPImageProcessorPil(...))
    """

    image_token_id: int
    tokens_each: int | None  # K; None if it depends on the image's size
    processor: BaseImageProcessor  # the Pillow version of the processor
    frame: tuple[int, int] | None = None  # Gemma 3's tokens around an image; its template writes only the first
    _cache: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, config: PretrainedConfig) -> ImageReader | None:
        """Makes the reader for a model with this config; None if the model accepts only token ids.

        The image processor comes from the checkpoint. If the checkpoint has none, images are scaled to the tower's
        size, except for models with grids.
        """
        kind = vision_kind(config)
        if kind is None:
            return None
        vision, token_id, processor = config.vision_config, int(config.image_token_id), _load_processor(config)
        if kind == "grid":
            return cls(token_id, None, processor)
        if kind == "bidirectional":
            frame = config.boi_token_index, config.eoi_token_index
            return cls(token_id, config.mm_tokens_per_image, processor, frame=frame)
        num_patches = (vision.image_size // vision.patch_size) ** 2
        dropped = 1 if config.vision_feature_select_strategy == "default" else 0
        return cls(token_id, num_patches + _EXTRA_TOKENS[vision.model_type] - dropped, processor)

    def counts(self, images: Sequence[str]) -> list[int]:
        """Returns each image's K, computed from the image's size without decoding the image."""
        if self.tokens_each is not None:
            return [self.tokens_each] * len(images)
        processor: Any = self.processor
        sizes = (read_with_pillow(image, lambda opened: opened.size) for image in images)
        return [processor.get_number_of_image_patches(h, w, {}) // processor.merge_size**2 for w, h in sizes]

    def expanded(self, token_ids: Sequence[int], images: Sequence[str], *, where: str) -> list[int]:
        """Returns token ids with K image tokens per image; the given ids have either one or K per image."""
        token_ids, counts = list(token_ids), self.counts(images)
        num_tokens = token_ids.count(self.image_token_id)
        if num_tokens not in (len(images), sum(counts)):
            raise ValueError(
                f"{where} needs one image token (id {self.image_token_id}) for each of its {len(images)} images, got "
                f"{num_tokens}. Give its messages an image part for each, and use a chat template that renders them."
            )
        runs = (is_image for is_image, _ in itertools.groupby(token_ids, lambda token: token == self.image_token_id))
        if self.tokens_each is None and sum(runs) != len(images):
            raise ValueError(
                f"{where} has two adjacent images, but this model needs tokens between them. Put text between them, or "
                "use a chat template that writes tokens around an image."
            )
        if num_tokens == sum(counts):
            return token_ids
        remaining = iter(counts)
        return [token for token in token_ids for _ in range(next(remaining) if token == self.image_token_id else 1)]

    def collapsed(self, token_ids: Sequence[int], images: Sequence[str]) -> list[int]:
        """Inverts `expanded`: returns token ids with one image token per image, as SGLang expects."""
        remaining, tokens, collapsed_ids = iter(self.counts(images)), iter(token_ids), []
        for token in tokens:
            collapsed_ids.append(token)
            if token == self.image_token_id:
                list(itertools.islice(tokens, next(remaining, 1) - 1))  # skips the image's other tokens
        return collapsed_ids

    def check(self, images: Sequence[str], token_ids: Sequence[int]) -> None:
        """Raises ValueError if the token ids have too few image tokens for these images."""
        num_tokens, counts = list(token_ids).count(self.image_token_id), self.counts(images)
        if num_tokens < sum(counts):
            raise ValueError(
                f"The prompt needs {' + '.join(map(str, counts))} image tokens for its "
                f"{count_text(len(images), 'image')}, got {num_tokens}. Render it with the data module, or repeat the "
                "image token."
            )

    def read(self, images: Sequence[str]) -> ImageTable:
        """Returns a table with one row that shows these images; caches them."""
        pairs = []
        for image in images:
            pair = self._cache.get(image)
            if pair is None:
                inputs = self.processor(images=[read_image(image)], return_tensors="pt")
                pair = inputs["pixel_values"].float(), inputs.get("image_grid_thw", torch.ones(1, 3, dtype=torch.int64))
                if (len(self._cache) + 1) * pair[0].nbytes > _CACHE_BYTES:
                    self._cache.clear()
                self._cache[image] = pair
            pairs.append(pair)
        values, grids = map(torch.cat, zip(*pairs, strict=True))
        return ImageTable(values, grids, torch.arange(len(pairs))[None])


@dataclass(frozen=True)
class Attachments:
    """A prompt with images, in the format that servers accept."""

    prompt: list[int]  # token ids with one image token per image; the server repeats it
    body: dict[str, list[str]]  # fields of the request: data: URLs, since servers may be on other machines
    image_token_id: int

    @classmethod
    def for_model(cls, config: PretrainedConfig) -> Callable[..., Attachments | None]:
        """Returns a picklable function that makes Attachments from token ids and images, or None without images."""
        return functools.partial(cls.of, ImageReader.of(config))

    @classmethod
    def of(
        cls, image_reader: ImageReader | None, token_ids: list[int], images: Sequence[str] = ()
    ) -> Attachments | None:
        """Makes a prompt's attachments; raises ValueError if the policy or a server cannot read its images."""
        if not images:
            return None
        if image_reader is None:
            raise ValueError(refusal(len(images)))
        if image_reader.frame:
            raise ValueError(
                "Servers cannot read images for a gemma3 model: they add line breaks around each image, but the "
                "prompt's tokens already have them. Use LocalEngine."
            )
        image_reader.check(images, token_ids)
        prompt = image_reader.collapsed(token_ids, images)
        return cls(prompt, {"image_data": [data_url(image) for image in images]}, image_reader.image_token_id)

    def input_ids(self, generated: Sequence[int]) -> list[int]:
        """Joins the prompt and its completion; raises RolloutError if the completion has an image token."""
        token_ids = [*self.prompt, *generated]
        if token_ids.count(self.image_token_id) != len(self.body["image_data"]):
            raise RolloutError(
                f"The policy has sampled an image token (id {self.image_token_id}), which a server would take for an "
                "image in the next request."
            )
        return token_ids


def vision_kind(config: PretrainedConfig) -> Literal["plain", "grid", "bidirectional"] | None:
    """Returns how models with this config handle image tokens; None if lightrl cannot pass them images.

    plain: image tokens are positioned and masked like text. grid: they have positions in three dimensions.
    bidirectional: the tokens of an image attend to each other in both directions.
    """
    if config.model_type in _GRIDS:
        return "grid"
    if config.model_type == "gemma3":
        return "bidirectional"
    tower = getattr(getattr(config, "vision_config", None), "model_type", None)
    return "plain" if config.model_type == "llava" and tower in _EXTRA_TOKENS else None


def auto_model(config: PretrainedConfig) -> Any:
    """Returns the auto class for a language model with this config, with its image tower even if only text is used."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    has_tower = hasattr(config, "vision_config") and type(config) in AutoModelForImageTextToText._model_mapping
    return AutoModelForImageTextToText if has_tower else AutoModelForCausalLM


def new_model(config: PretrainedConfig, **options: Any) -> PreTrainedModel:
    """Makes a language model with random weights; passes `options` to `from_config`."""
    model: PreTrainedModel = auto_model(config).from_config(config, **options)
    finish_model(model)
    return model


def finish_model(model: PreTrainedModel) -> None:
    """Sets Mamba layers' step size limits and a missing pad id, and registers a hook that passes on image features.

    The pad id is set after construction, because an embedding made with a padding index has a row without gradient.
    """
    set_time_step_limits(model)
    text = model.config.get_text_config()
    if text is not model.config and getattr(text, "pad_token_id", None) is None:
        text.pad_token_id = 0
    if vision_kind(model.config) == "grid":
        model.base_model.language_model.register_forward_pre_hook(_take_layers, with_kwargs=True)


def read_image(image: str) -> Image:
    """Reads a path or `data:` URL as an RGB image; raises ValueError above Pillow's limit of 179 million pixels."""
    return read_with_pillow(image, lambda opened: opened.convert("RGB"))


def read_with_pillow(image: str, read: Callable[[Image], _T]) -> _T:
    """Opens an image without decoding its pixels, and returns `read(image)`."""
    from PIL import Image

    try:
        source = io.BytesIO(_bytes_of(image)) if image.startswith("data:") else Path(image).expanduser()
        with Image.open(source, formats=_FORMATS) as opened:
            return read(opened)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(
            f"Image {image[:80]!r} cannot be read ({error}). It must be the path to an image or a data: URL with "
            f"base64: {', '.join(_FORMATS)}."
        ) from error


def data_url(image: str | bytes | Image) -> str:
    """Returns an image as a `data:` URL, which can be sent to other machines."""
    if isinstance(image, str):
        if image.startswith("data:"):
            return image
        image = read_image(image)
    if not isinstance(image, bytes):
        buffer = io.BytesIO()
        image.save(buffer, format="PNG")
        image = buffer.getvalue()
    return "data:image/png;base64," + base64.b64encode(image).decode()  # Pillow detects the real format


def self_contained(answer: Any) -> Any:
    """Replaces image files in an environment's answer with data: URLs, since files may be gone after a resume."""
    if isinstance(answer, (list, tuple)):
        return [self_contained(item) for item in answer]
    if not isinstance(answer, dict):
        return answer
    if answer.get("type") == "image":
        image = next((answer[key] for key in ("image", "path", "url") if answer.get(key)), None)
        if isinstance(image, str):
            with suppress(ValueError):  # an unreadable image is reported by the conversation
                return {**answer, "image": data_url(image)}
    return {key: self_contained(item) for key, item in answer.items()}


def refusal(num_images: int) -> str:
    """Returns the error message for images in a text-only policy's prompt."""
    return (
        f"Got {count_text(num_images, 'image')}, but the policy accepts only token ids. Use one of {SUPPORTED}, or "
        "leave the images out."
    )


def forward_inputs(
    model: PreTrainedModel,
    experience: Experience,
    rows: Tensor,
    token_ids: Tensor,
    positions: tuple[Tensor, Tensor] | None = None,
) -> dict[str, Any]:
    """Returns the model's arguments for token ids [b, T] of these rows [b] of an experience, with or without images.

    Args:
        positions: rows and columns [N] of the tokens to concatenate into one row; None keeps the rows separate.
    """
    if experience.pixel_values is None:
        return {"input_ids": token_ids if positions is None else token_ids[positions][None]}
    images = _table_of(experience)
    images = images._replace(image_rows=on_host(images.image_rows)[on_host(rows)])
    return image_inputs(model, token_ids, images, positions=positions)


def image_inputs(
    model: PreTrainedModel, token_ids: Tensor, images: ImageTable, *, positions: tuple[Tensor, Tensor] | None = None
) -> dict[str, Any]:
    """Returns the model's arguments for rows with images: token embeddings with image features at the image tokens.

    Each image passes through the vision tower once, however many rows show it. The forward of a sharded tower is
    collective, so a rank without images runs it on a blank image and multiplies the features by 0.

    Args:
        token_ids: [B, T], with all image tokens in the prompts.
        images: the images of these rows.
        positions: rows and columns [N] of the tokens to concatenate into one row; None keeps the rows separate.

    Returns:
        `inputs_embeds` [B, T, H], or [1, N, H] with `positions`; `position_ids` [3, B, T] or [3, 1, N] for grids;
        `token_type_ids` [B, T] for Gemma 3; `image_layers`, for `_take_layers`, for Qwen3-VL.

    Raises:
        ValueError: if the model cannot read images, or a row has too few image tokens for its images.
    """

    def pick(values: Tensor) -> Tensor:
        """Selects `positions`, [B, T, ...] → [1, N, ...]; without them, returns the values."""
        return values if positions is None else values[positions][None]

    config, kind = model.config, vision_kind(model.config)
    if kind is None or not hasattr(model.base_model, "get_image_features"):
        raise ValueError(f"{type(model).__name__} cannot read the images in the prompts. Use one of {SUPPORTED}.")
    embeddings = model.get_input_embeddings()(token_ids)
    images, device = images.shown(), embeddings.device
    is_blank = not len(images.image_grids)
    from torch.distributed.fsdp import FSDPModule  # imported late: slow, needed only in training

    if is_blank and not isinstance(model, FSDPModule):
        return {"inputs_embeds": pick(embeddings)}
    if is_blank:
        size = config.vision_config.spatial_merge_size if kind == "grid" else 1
        values = images.pixel_values.new_zeros(size**2, *images.pixel_values.shape[1:])
        images = ImageTable(values, torch.tensor([[1, size, size]]), images.image_rows)
    grids = {"image_grid_thw": to_device(images.image_grids, device)} if kind == "grid" else {}
    tower = model.base_model.get_image_features(images.pixel_values.to(embeddings), return_dict=True, **grids)
    # Each image's features: for its tokens, and in some models also for decoder layers to add to their outputs.
    levels = [list(tower.pooler_output), *map(list, getattr(tower, "deepstack_features", None) or ())]
    if is_blank:
        return {"inputs_embeds": pick(embeddings + 0 * sum(level[0].sum() for level in levels))}
    shown = images.image_rows[images.image_rows >= 0].tolist()
    features, *layers = (torch.cat([level[index] for index in shown]).to(embeddings.dtype) for level in levels)
    num_tokens = torch.tensor([*map(len, levels[0]), 0])[images.image_rows].sum(1, keepdim=True)
    host_ids = on_host(token_ids)
    is_image = host_ids == config.image_token_id
    is_image &= is_image.cumsum(1) <= num_tokens
    if not torch.equal(is_image.sum(1, keepdim=True), num_tokens):
        raise ValueError(
            f"The rows need {num_tokens[:, 0].tolist()} image tokens for their images, got {is_image.sum(1).tolist()}. "
            "Render the prompts with the data module."
        )
    mask = to_device(is_image, device)
    inputs: dict[str, Any] = {"inputs_embeds": pick(embeddings.masked_scatter(mask[..., None], features))}
    if kind == "grid":
        layout = {"mm_token_type_ids": is_image.int(), "image_grid_thw": images.image_grids[shown]}
        position_ids, _ = model.base_model.get_rope_index(host_ids, **layout)
        inputs["position_ids"] = pick(to_device(position_ids, device).movedim(0, -1)).movedim(-1, 0)
    elif kind == "bidirectional":
        inputs["token_type_ids"] = mask.long()
    if layers:
        if positions is not None:  # the tokens of a shared prompt occur once
            feature_index, at = is_image.flatten().cumsum(0).view_as(is_image) - 1, tuple(map(on_host, positions))
            picked = to_device(feature_index[at][is_image[at]], device)
            layers = [layer[picked] for layer in layers]
        inputs["image_layers"] = {"visual_pos_masks": pick(mask), "deepstack_visual_embeds": layers}
    return inputs


def _take_layers(module: torch.nn.Module, arguments: Any, settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Passes `image_layers` to the text model; the outer model passes only image features that it computed itself."""
    image_features = settings.pop("image_layers", {})
    return arguments, settings | image_features


def take_images(
    messages: Sequence[JsonObject], images: Sequence[object] = (), *, folder: Path
) -> tuple[list[JsonObject], tuple[str, ...]]:
    """Moves images out of messages; returns messages with bare image parts, and the images as paths or data: URLs.

    Args:
        messages: image parts look like `{"type": "image", "image": "cats/3.png"}`. `path` and `url` also work; a part
            without any of the three shows the next image in `images`.
        images: the row's images; if the messages have no image parts, they are put before the last user turn's text.
        folder: relative paths start here.

    Raises:
        ValueError: if an image part has no image, images remain without a part, or an image is a web address.
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
    """Turns a path, data: URL, bytes, Pillow image, or a dict from `datasets` into a path or data: URL for a Prompt."""
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
    """Writes the image processor into an exported model's folder, if the model reads images."""
    image_reader = ImageReader.of(config)
    if image_reader is not None:
        image_reader.processor.save_pretrained(folder)


def _load_processor(config: PretrainedConfig) -> BaseImageProcessor:
    """Loads the image processor; makes one from the config if the model's folder has none or there is no folder."""
    from transformers import AutoImageProcessor, CLIPImageProcessorPil, Qwen2VLImageProcessorPil

    source, vision = config.name_or_path, config.vision_config
    is_bare = Path(source).is_dir() and not any(
        (Path(source) / name).is_file() for name in ("preprocessor_config.json", "processor_config.json")
    )
    if source and not is_bare:
        return AutoImageProcessor.from_pretrained(source, backend="pil", trust_remote_code=False)
    if vision_kind(config) == "grid":
        patch, merge, depth = vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size
        size = {"shortest_edge": (patch * merge) ** 2, "longest_edge": 1280 * (patch * merge) ** 2}
        return Qwen2VLImageProcessorPil(patch_size=patch, merge_size=merge, temporal_patch_size=depth, size=size)
    size = {"height": vision.image_size, "width": vision.image_size}
    return CLIPImageProcessorPil(size=size, do_center_crop=False)


def _bytes_of(url: str) -> bytes:
    kind, _, text = url.partition(",")
    if not kind.endswith(";base64"):
        raise binascii.Error("no ;base64, in the URL")
    return base64.b64decode(text, validate=True)
