from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from lightrl.data.chat import ChatRenderer, row_messages

ROW = {"question": "1 + 1?", "answer": "2", "level": "easy"}


def messages_of(row: dict, **changes) -> list[dict]:
    settings = {"prompt_column": "question", "prompt_template": "{prompt}", "system_prompt": None, "where": "Row 1"}
    return row_messages(row, **{**settings, **changes})


def test_a_row_becomes_system_prompt_and_user_turn():
    messages = messages_of(ROW, system_prompt="Be brief.", prompt_template="[{level}] {prompt}")
    assert messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "[easy] 1 + 1?"}]


def test_a_prompt_column_of_messages_is_taken_as_it_is():
    chat = [{"role": "user", "content": "hi"}]
    assert messages_of({"question": chat}) == chat


def test_braces_in_the_data_are_text():
    assert messages_of({"question": "{level} {"})[0]["content"] == "{level} {"


def test_a_chat_prompt_ends_where_the_policys_turn_begins(chat_tokenizer: PreTrainedTokenizerFast):
    token_ids = ChatRenderer(chat_tokenizer).prompt_ids([{"role": "user", "content": "hi"}])
    assert chat_tokenizer.decode(token_ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert token_ids.count(chat_tokenizer.convert_tokens_to_ids("<|im_start|>")) == 2


def test_without_a_chat_template_a_prompt_is_plain_text(plain_tokenizer: PreTrainedTokenizerFast):
    messages = messages_of(ROW, system_prompt="Be brief.")
    assert plain_tokenizer.decode(ChatRenderer(plain_tokenizer).prompt_ids(messages)) == "Be brief.\n\n1 + 1?"


@pytest.mark.parametrize("fixture", ["plain_tokenizer", "chat_tokenizer"])
def test_a_completion_ends_with_one_end_token(fixture: str, request: pytest.FixtureRequest):
    tokenizer = request.getfixturevalue(fixture)
    token_ids = ChatRenderer(tokenizer).completion_ids([{"role": "user", "content": "hi"}], "hello")
    assert tokenizer.decode(token_ids) == "hello<|im_end|>"
    assert token_ids.index(tokenizer.eos_token_id) == len(token_ids) - 1


def test_a_chat_template_may_be_given_as_text_or_as_a_file(plain_tokenizer: PreTrainedTokenizerFast, tmp_path: Path):
    template = "{% for message in messages %}<{{ message.content }}>{% endfor %}"
    path = tmp_path / "template.jinja"
    path.write_text(template)
    for given in (template, str(path)):
        token_ids = ChatRenderer(plain_tokenizer, chat_template=given).prompt_ids([{"role": "user", "content": "hi"}])
        assert plain_tokenizer.decode(token_ids) == "<hi>"


def test_a_template_that_rewrites_the_prompt_is_refused_for_completions(plain_tokenizer: PreTrainedTokenizerFast):
    renderer = ChatRenderer(plain_tokenizer, chat_template="{{ messages | length }}")
    with pytest.raises(ValueError, match=r"renders the prompt as '1' but the whole chat as '2'"):
        renderer.completion_ids([{"role": "user", "content": "hi"}], "hello")


def test_a_completion_needs_an_end_token(plain_tokenizer: PreTrainedTokenizerFast):
    plain_tokenizer.eos_token = None
    with pytest.raises(ValueError, match=r"The tokenizer has no end token"):
        ChatRenderer(plain_tokenizer).completion_ids(None, "hello")
