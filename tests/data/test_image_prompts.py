"""Images of rows: columns and image parts, paths from the file's folder, and how many tokens each takes."""

from pathlib import Path

import pytest
from data_cases import set_up, write_rows
from images_cases import BLUE, RED, TOKENS_EACH, WIDE, image_reader, line_tokenizer
from tiny import char_tokenizer
from transformers import PreTrainedTokenizerFast

from lightrl.data import PromptDataModule
from lightrl.models.images import read_image, take_images
from lightrl.trajectory import Prompt

IMAGE = 2  # the image token of images_cases


def prompts_of(
    rows: list[dict],
    tmp_path: Path,
    *,
    sees: bool = True,
    family: str = "llava",
    tokenizer: PreTrainedTokenizerFast | None = None,
    **settings,
) -> list[Prompt]:
    path = write_rows(tmp_path / "rows.jsonl", rows)
    data = PromptDataModule(path, batch_size=1, answer_column=None, shuffle=False, **settings)
    reader = image_reader(family) if sees else None
    return set_up(data, tokenizer or char_tokenizer(), image_reader=reader).prompts["train"]


def test_a_column_of_paths_is_read_from_the_files_folder(tmp_path: Path):
    read_image(RED).save(tmp_path / "red.png")
    rows = [{"image": "red.png", "question": "1+"}, {"image": [RED, BLUE], "question": "2"}]
    first, second = prompts_of(rows, tmp_path, image_column="image")
    assert (first.images, first.fields) == ((str(tmp_path / "red.png"),), {"question": "1+"})
    assert first.token_ids == [IMAGE] * TOKENS_EACH + [4, 14]
    assert second.images == (RED, BLUE)
    assert second.token_ids.count(IMAGE) == 2 * TOKENS_EACH


def test_some_rows_may_have_no_image(tmp_path: Path):
    rows = [{"image": image, "question": "1"} for image in (None, [], RED)]
    prompts = prompts_of(rows, tmp_path, image_column="image")
    assert [(prompt.images, prompt.token_ids[-1]) for prompt in prompts] == [((), 4), ((), 4), ((RED,), 4)]
    assert [prompt.token_ids.count(IMAGE) for prompt in prompts] == [0, 0, TOKENS_EACH]


def test_messages_name_their_images_where_they_stand(tmp_path: Path):
    content = [{"type": "text", "text": "1"}, {"type": "image", "image": RED}, {"type": "text", "text": "2"}]
    (prompt,) = prompts_of([{"question": [{"role": "user", "content": content}]}], tmp_path)
    assert (prompt.images, prompt.token_ids) == ((RED,), [4, *[IMAGE] * TOKENS_EACH, 5])
    assert prompt.messages[0]["content"][1] == {"type": "image"}


def test_an_image_that_becomes_a_grid_has_a_token_for_each_square_of_its_patches(tmp_path: Path):
    content = [{"type": "image", "image": WIDE}, {"type": "text", "text": "1"}, {"type": "image", "image": RED}]
    (prompt,) = prompts_of([{"question": [{"role": "user", "content": content}]}], tmp_path, family="qwen3_vl")
    assert prompt.token_ids == [*[IMAGE] * 8, 4, *[IMAGE] * 4]
    table = image_reader("qwen3_vl").read(prompt.images)
    assert table.image_grids.tolist() == [[1, 4, 8], [1, 4, 4]]
    assert table.pixel_values.shape == (48, 3 * 2 * 4 * 4)


@pytest.mark.parametrize("template", [None, "{% for part in messages[0].content %}{{ part.text or '+' }}{% endfor %}"])
def test_gemma_3_reads_line_breaks_and_two_tokens_around_those_of_an_image(tmp_path: Path, template):
    (prompt,) = prompts_of(
        [{"image": RED, "question": "1"}], tmp_path, image_column="image", family="gemma3",
        tokenizer=line_tokenizer(), chat_template=template,
    )  # fmt: skip
    assert prompt.token_ids == [16, 16, 14, *[IMAGE] * TOKENS_EACH, 15, 16, 16, 4]


def test_a_chat_template_writes_the_image_token(tmp_path: Path):
    template = (
        "{% for m in messages %}{% for part in m.content %}"
        "{% if part.type == 'image' %}<unk>{% else %}{{ part.text }}{% endif %}{% endfor %}={% endfor %}"
    )
    (prompt,) = prompts_of([{"image": RED, "question": "1"}], tmp_path, image_column="image", chat_template=template)
    assert prompt.token_ids == [*[IMAGE] * TOKENS_EACH, 4, 13]


@pytest.mark.parametrize(
    ("row", "policy", "problem"),
    [
        ({"image": "none.png"}, {}, "image '.*none.png' does not exist"),
        ({"image": "https://a/b.png"}, {}, "Line 1 of .* not a web address"),
        ({}, {}, "image"),
        ({"image": RED}, {"sees": False}, r"Line 1 of .*accepts only token ids"),
        ({"image": [RED, BLUE]}, {"family": "qwen2_5_vl"}, r"Line 1 of .* has two adjacent images"),
    ],
    ids=["no file", "a web address", "no column", "no images in the policy", "grids with nothing between them"],
)
def test_an_image_that_cannot_be_read_is_said_before_the_run(tmp_path: Path, row, policy, problem):
    with pytest.raises(ValueError, match=problem):
        prompts_of([{"question": "1", **row}], tmp_path, image_column="image", **policy)


def test_each_image_part_needs_one_image():
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "1"}]}]
    assert take_images(messages, [RED], folder=Path())[1] == (RED,)
    with pytest.raises(ValueError, match="2 images for 1 image parts"):
        take_images(messages, [RED, BLUE], folder=Path())
    with pytest.raises(ValueError, match="An image part needs an image"):
        take_images(messages, folder=Path())


def test_one_question_about_two_images_is_no_repetition(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    of_red, of_blue = ({"image": image, "question": "1"} for image in (RED, BLUE))
    for others in ([of_blue], [of_blue, of_red]):
        assert "validation prompts are" not in caplog.text
        validation = write_rows(tmp_path / "others.jsonl", others)
        prompts_of([of_red], tmp_path, validation=validation, image_column="image")
    assert "1 of 2 validation prompts are also train prompts" in caplog.text
