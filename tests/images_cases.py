"""Tiny models of random weights whose images change their logits, images to show them, and trajectories that do."""

import random
from collections.abc import Sequence
from typing import Any

from PIL import Image
from tiny import _COMMON, LETTERS, VOCABULARY
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lightrl.data import SFTDataModule
from lightrl.experience import Experience
from lightrl.models import ModelSpec
from lightrl.models.images import ImageReader, ImageTable, data_url
from lightrl.trajectory import Prompt, Trajectory

IMAGE_TOKEN = 2  # <unk> of the tokenizer of characters
TOKENS_EACH = 4
CONFIG: dict[str, Any] = {
    "model_type": "llava",
    "image_token_index": IMAGE_TOKEN,
    "vision_feature_layer": -1,
    "text_config": {"model_type": "qwen3", **_COMMON},
    "vision_config": {
        "model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 16, "patch_size": 8, "initializer_range": 0.4,
    },
}  # fmt: skip
_TOWER: dict[str, Any] = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 16, "patch_size": 4,
    "spatial_merge_size": 2, "initializer_range": 0.4,
}  # fmt: skip
_QWEN: dict[str, Any] = {"image_token_id": IMAGE_TOKEN, "video_token_id": 0, "initializer_range": 0.4}
_TEXT: dict[str, Any] = {
    **_COMMON,
    "num_attention_heads": 2,
    "head_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
}
_LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 2, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 2,
}  # fmt: skip
_SQUARE: dict[str, Any] = {**_TOWER, "num_position_embeddings": 16}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
# A family of each vision_kind, and of each way to read a grid.
FAMILIES: dict[str, dict[str, Any]] = {
    "llava": CONFIG,
    "gemma3": {
        "model_type": "gemma3",
        "image_token_index": IMAGE_TOKEN,
        "boi_token_index": 14,
        "eoi_token_index": 15,
        "mm_tokens_per_image": 4,
        "tie_word_embeddings": False,
        "initializer_range": 0.4,
        "text_config": {
            **_COMMON, "sliding_window": 3, "query_pre_attn_scalar": 4,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "vision_config": {**CONFIG["vision_config"], "model_type": "siglip_vision_model", "patch_size": 4},
    },
    "qwen2_5_vl": {
        **_QWEN, "model_type": "qwen2_5_vl", "text_config": _TEXT,
        "vision_config": {**_TOWER, "fullatt_block_indexes": [1], "window_size": 8, "tokens_per_second": 2},
    },
    "qwen3_vl": {
        **_QWEN, "model_type": "qwen3_vl", "text_config": _TEXT,
        "vision_config": {**_SQUARE, "deepstack_visual_indexes": [0, 1]},
    },
    "qwen3_vl_moe": {
        **_QWEN, "model_type": "qwen3_vl_moe", "text_config": {**_TEXT, **_EXPERTS},
        "vision_config": {**_SQUARE, "deepstack_visual_indexes": [0]},
    },
    "qwen3_5": {
        **_QWEN, "model_type": "qwen3_5", "text_config": {**_TEXT, **_LINEAR}, "vision_config": _SQUARE,
    },
}  # fmt: skip
UNPACKED = ("qwen3_5",)  # packed rows of its linear attention need kernels for GPUs
RED, BLUE, HALF, WIDE = (
    data_url(image)
    for image in (
        Image.new("RGB", (16, 16), "red"),
        Image.new("RGB", (20, 12), "blue"),
        Image.linear_gradient("L").resize((16, 16)),
        Image.linear_gradient("L").resize((32, 16)),  # eight tokens for families with grids
    )
)


def line_tokenizer() -> PreTrainedTokenizerFast:
    """Knows a line break instead of a space; Gemma 3 reads some around an image."""
    ids = {token: index for index, token in enumerate([*LETTERS[:-1], "\n"])}
    backend = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=64, **names)


def image_spec(family: str = "llava", **options: Any) -> ModelSpec:
    tokenizer = "images_cases.line_tokenizer" if family == "gemma3" else "tiny.char_tokenizer"
    return ModelSpec(config=FAMILIES[family], tokenizer=tokenizer, **{"seed": 0, **options})


def image_reader(family: str = "llava") -> ImageReader:
    return ImageReader.of(image_spec(family).load_config())


def with_images(experience: Experience, trajectories: Sequence[Trajectory], reader: ImageReader | None) -> Experience:
    """The experience of these trajectories with their images."""
    images = ImageTable.of([(*item.prompt.images, *item.images) for item in trajectories], reader)
    return experience if images is None else experience.with_tensors(images._asdict())


def image_trajectories(
    num_groups: int = 4, group_size: int = 2, seed: int = 0, family: str = "llava"
) -> list[Trajectory]:
    """Groups that show no image, one or two; a completion may hold an image token that is no image.

    Between two images is a token, except for Llava.
    """
    draw = random.Random(seed)
    counts = image_reader(family).counts
    found = []
    for group in range(num_groups):
        images = [(RED,), (BLUE,), (), (HALF if family == "llava" else WIDE, RED)][group % 4]
        text = [draw.randrange(3, VOCABULARY) for _ in range(3)]
        between = [] if family == "llava" else [16]
        places = [token for count in counts(images) for token in [*[IMAGE_TOKEN] * count, *between]]
        token_ids = [text[0], *places, *text[1:]]
        for sample in range(group_size):
            said = [draw.randrange(3, VOCABULARY) for _ in range(draw.randint(1, 5))] + [IMAGE_TOKEN, 5]
            start, end = len(token_ids), len(token_ids) + len(said)
            found.append(
                Trajectory(
                    prompt=Prompt(id=f"prompt-{group}", token_ids=token_ids, images=images), group_id=group,
                    sample=sample, token_ids=token_ids + said, loss_mask=[position >= start for position in range(end)],
                    behavior_logprobs=[0.0] * start + [-1.0] * len(said),
                    weight_versions=[-1] * start + [0] * len(said), completion_ids=said, completion="",
                    reward=draw.random(),
                )
            )  # fmt: skip
    return found


class PhotoChats(SFTDataModule):
    """Chats with an image, without, and with two."""

    def make_prompts(self, split: str) -> list[Prompt]:
        prompts = []
        for n, images in enumerate([(RED,), (), (WIDE, RED)]):
            parts = [part for image in images for part in ({"type": "image"}, {"type": "text", "text": "1"})]
            messages = [{"role": "user", "content": [*parts, {"type": "text", "text": f"{n}="}]}]
            fields = {"answer": "23" * (n + 1)}
            prompts.append(Prompt(id=f"{split}-{n}", messages=messages, images=images, fields=fields))
        return prompts
