"""Writes rated sentences from movie reviews (MIT license) as rows, and rewards the right label.

    python -m examples.pretrained.reviews --to runs/pretrained/reviews

The sentences come from the source archive of the package `vaderSentiment`, which pip downloads (2.5 MB): those with at
most 120 characters and a mean rating of at least 1 on the scale from −4 to 4, or at most −1.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tarfile
import tempfile
from pathlib import Path

from examples.pretrained.download import download
from lightrl.trajectory import Trajectory

PACKAGE = "vaderSentiment==3.3.2"
SHA256 = "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9"
ARCHIVE = "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"
RATINGS = "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"
NUM_HELD_OUT = 720
SHOTS = (("A warm, funny and moving film.", "positive"), ("Dull from start to end.", "negative"))
MAX_WORDS = 6  # shorter than every review and question that names a label
_NEGATIONS = {"not", "no", "non", "nor", "neither", "never", "t"}  # "t" ends "isn't" and the like


def right_label(trajectory: Trajectory) -> dict[str, float]:
    """Returns 1 if the completion ends by itself and names the right label once, in at most six words.

    Completions that name a label twice, name both, negate it or repeat the question do not count.
    """
    words = re.findall(r"[a-z]+", trajectory.answer.lower())
    labels = [word for word in words if re.match("positive|negative", word)]  # also "positively"
    is_label = labels in (["positive"], ["negative"]) and len(words) <= MAX_WORDS and not _NEGATIONS & set(words)
    is_label = is_label and trajectory.finish_reason == "stop"
    is_right = is_label and labels == [trajectory.prompt.fields["answer"]]
    return {"reward": float(is_right), "accuracy": float(is_right), "format": float(is_label)}


def ratings_of(sdist: Path) -> str:
    """Returns the file of ratings from the archive within the package's source archive."""
    with tarfile.open(sdist) as outer, tarfile.open(fileobj=outer.extractfile(ARCHIVE)) as inner:
        return inner.extractfile(RATINGS).read().decode()


def rows_of(ratings: str, *, max_chars: int = 120, min_rating: float = 1.0) -> list[dict[str, str]]:
    """Returns a row for each short and clearly rated sentence of lines `<number> TAB <mean rating> TAB <sentence>`."""
    labels: dict[str, str] = {}
    for line in ratings.splitlines():
        _, rating, text = line.split("\t")
        if len(text.strip()) <= max_chars and abs(float(rating)) >= min_rating:
            labels[text.strip()] = "positive" if float(rating) > 0 else "negative"
    return [{"question": text, "answer": label} for text, label in labels.items()]


def with_shots(row: dict[str, str]) -> dict[str, object]:
    """Returns the row as a chat that begins with two worked examples."""
    messages = [{"role": "system", "content": "You label movie reviews as positive or negative."}]
    for text, label in SHOTS:
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": label}]
    return {"question": [*messages, {"role": "user", "content": row["question"]}], "answer": row["answer"]}


def write_rows(ratings: str, folder: Path, *, num_held_out: int = NUM_HELD_OUT) -> None:
    """Writes train.jsonl, test.jsonl, and two_shots.jsonl, the test rows after two worked examples."""
    rows = rows_of(ratings)
    shuffled = random.Random(0).sample(rows, len(rows))
    held_out = shuffled[:num_held_out]
    folder.mkdir(parents=True, exist_ok=True)
    files = {"train": shuffled[num_held_out:], "test": held_out, "two_shots": [with_shots(row) for row in held_out]}
    for name, split in files.items():
        num_positive = sum(row["answer"] == "positive" for row in split)
        path = folder / f"{name}.jsonl"
        path.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in split), encoding="utf-8")
        print(f"{path}: {len(split)} reviews, {num_positive} of them positive")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--to", type=Path, required=True, help="the folder to write")
    folder = parser.parse_args().to
    with tempfile.TemporaryDirectory() as scratch:
        sdist = download(f"{PACKAGE} --hash=sha256:{SHA256}", Path(scratch), "--no-binary", "vaderSentiment")
        write_rows(ratings_of(sdist), folder)
