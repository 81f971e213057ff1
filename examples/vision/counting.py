"""Counting in the style of CLEVR: generated images of red and blue shapes; the answer is the number of one color."""

import random
import re

from PIL import Image, ImageDraw
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lightrl.models.images import data_url
from lightrl.trajectory import Trajectory


def tokenizer() -> PreTrainedTokenizerFast:
    texts = {"<pad>": 0, "<eos>": 1, "<image>": 2, "red": 3, "blue": 4, "1": 5, "2": 6, "3": 7}
    backend = Tokenizer(models.WordLevel(texts, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("<image>"), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


def rows(split: str = "train", num_rows: int = 2000) -> list[dict[str, str]]:
    draw = random.Random(split)
    made: list[dict[str, str]] = []
    while len(made) < num_rows:
        pen = ImageDraw.Draw(image := Image.new("RGB", (32, 32), "gray"))
        counts = {"red": draw.randint(1, 3), "blue": draw.randint(1, 3)}
        cells = draw.sample(range(16), sum(counts.values()))
        for color in [name for name, count in counts.items() for _ in range(count)]:
            x, y = (8 * part + draw.randint(0, 2) for part in divmod(cells.pop(), 4))
            draw.choice([pen.ellipse, pen.rectangle])((x, y, x + 5, y + 5), fill=color)
        color, count = draw.choice(list(counts.items()))
        made.append({"image": data_url(image), "color": color, "answer": str(count)})
    return made


def reward(trajectory: Trajectory) -> float:
    """Whether the last number of the completion is the answer, which CLEVR has in brackets."""
    return float(re.findall(r"\d+", trajectory.answer)[-1:] == [trajectory.prompt.fields["answer"].strip("[] ")])
