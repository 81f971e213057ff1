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
    generator = random.Random(split)
    rows: list[dict[str, str]] = []
    while len(rows) < num_rows:
        drawing = ImageDraw.Draw(image := Image.new("RGB", (32, 32), "gray"))
        counts = {"red": generator.randint(1, 3), "blue": generator.randint(1, 3)}
        cells = generator.sample(range(16), sum(counts.values()))
        for color in [name for name, count in counts.items() for _ in range(count)]:
            x, y = (8 * part + generator.randint(0, 2) for part in divmod(cells.pop(), 4))
            generator.choice([drawing.ellipse, drawing.rectangle])((x, y, x + 5, y + 5), fill=color)
        color, count = generator.choice(list(counts.items()))
        rows.append({"image": data_url(image), "color": color, "answer": str(count)})
    return rows


def reward(trajectory: Trajectory) -> float:
    """Returns 1 if the last number in the completion is the answer; CLEVR's answers are in brackets."""
    return float(re.findall(r"\d+", trajectory.answer)[-1:] == [trajectory.prompt.fields["answer"].strip("[] ")])
