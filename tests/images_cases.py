"""A tiny Llava of random weights whose images change its logits, images to show it, and trajectories that do."""

import random
from typing import Any

from PIL import Image
from tiny import _COMMON, VOCABULARY

from lightrl.models import ModelSpec
from lightrl.models.images import data_url
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
RED, BLUE, HALF = (
    data_url(image)
    for image in (
        Image.new("RGB", (16, 16), "red"),
        Image.new("RGB", (20, 12), "blue"),
        Image.linear_gradient("L").resize((16, 16)),
    )
)


def image_spec(**options: Any) -> ModelSpec:
    return ModelSpec(config=CONFIG, tokenizer="tiny.char_tokenizer", **{"seed": 0, **options})


def image_trajectories(num_groups: int = 4, group_size: int = 2, seed: int = 0) -> list[Trajectory]:
    """Groups that show no image, one or two; a completion may hold an image token that is no image."""
    draw = random.Random(seed)
    found = []
    for group in range(num_groups):
        images = [(RED,), (BLUE,), (), (HALF, RED)][group % 4]
        text = [draw.randrange(3, VOCABULARY) for _ in range(3)]
        token_ids = [text[0], *[IMAGE_TOKEN] * (TOKENS_EACH * len(images)), *text[1:]]
        for sample in range(group_size):
            said = [draw.randrange(3, VOCABULARY) for _ in range(draw.randint(1, 5))] + [IMAGE_TOKEN, 5]
            start, end = len(token_ids), len(token_ids) + len(said)
            found.append(
                Trajectory(
                    prompt=Prompt(id=f"prompt-{group}", token_ids=token_ids, images=images),
                    group_id=group,
                    sample=sample,
                    token_ids=token_ids + said,
                    loss_mask=[position >= start for position in range(end)],
                    behavior_logprobs=[0.0] * start + [-1.0] * len(said),
                    weight_versions=[-1] * start + [0] * len(said),
                    completion_ids=said,
                    completion="",
                    reward=draw.random(),
                )
            )
    return found
