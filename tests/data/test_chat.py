from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from lightrl.data.chat import ChatRenderer, row_messages
from lightrl.models.chat_template import set_chat_template
from lightrl.trajectory import Prompt

ROW = {"question": "1 + 1?", "answer": "2", "level": "easy"}


def messages_of(row: dict, **changes) -> list[dict]:
    settings = {"prompt_column": "question", "prompt_template": "{prompt}", "system_prompt": None, "where": "Row 1"}
    return row_messages(row, row["question"], **{**settings, **changes})


def prompt_ids(renderer: ChatRenderer, messages: list[dict]) -> list[int]:
    (prompt,) = renderer.rendered([Prompt(id="0", messages=messages)], str)
    return list(prompt.token_ids or [])


def completion_of(renderer: ChatRenderer, messages: list[dict] | None, text: str) -> list[int]:
    token_ids, is_generated = renderer.completion_ids(messages, [{"role": "assistant", "content": text}])
    assert is_generated == [True] * len(token_ids)
    return token_ids


def test_a_row_becomes_system_prompt_and_user_turn():
    messages = messages_of(ROW, system_prompt="Be brief.", prompt_template="[{level}] {prompt}")
    assert messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "[easy] 1 + 1?"}]


def test_a_prompt_column_of_messages_is_taken_as_it_is():
    chat = [{"role": "user", "content": "hi"}]
    assert messages_of({"question": chat}) == chat


def test_braces_in_the_data_are_text():
    assert messages_of({"question": "{level} {"})[0]["content"] == "{level} {"


def test_a_chat_prompt_ends_where_the_policys_turn_begins(chat_tokenizer: PreTrainedTokenizerFast):
    token_ids = prompt_ids(ChatRenderer(chat_tokenizer), [{"role": "user", "content": "hi"}])
    assert chat_tokenizer.decode(token_ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert token_ids.count(chat_tokenizer.convert_tokens_to_ids("<|im_start|>")) == 2


def test_without_a_chat_template_a_prompt_is_plain_text(plain_tokenizer: PreTrainedTokenizerFast):
    messages = messages_of(ROW, system_prompt="Be brief.")
    assert plain_tokenizer.decode(prompt_ids(ChatRenderer(plain_tokenizer), messages)) == "Be brief.\n\n1 + 1?"


@pytest.mark.parametrize("fixture", ["plain_tokenizer", "chat_tokenizer"])
def test_a_completion_ends_with_one_end_token(fixture: str, request: pytest.FixtureRequest):
    tokenizer = request.getfixturevalue(fixture)
    token_ids = completion_of(ChatRenderer(tokenizer), [{"role": "user", "content": "hi"}], "hello")
    assert tokenizer.decode(token_ids) == "hello<|im_end|>"
    assert token_ids.index(tokenizer.eos_token_id) == len(token_ids) - 1


def test_a_chat_template_may_be_given_as_text_or_as_a_file(plain_tokenizer: PreTrainedTokenizerFast, tmp_path: Path):
    template = "{% for message in messages %}<{{ message.content }}>{% endfor %}"
    path = tmp_path / "template.jinja"
    path.write_text(template)
    for given in (template, str(path)):
        set_chat_template(plain_tokenizer, given)
        token_ids = prompt_ids(ChatRenderer(plain_tokenizer), [{"role": "user", "content": "hi"}])
        assert plain_tokenizer.decode(token_ids) == "<hi>"


def test_a_prompt_that_ends_with_the_assistants_words_continues_them(chat_tokenizer: PreTrainedTokenizerFast):
    renderer = ChatRenderer(chat_tokenizer)
    chat = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "It is "}]
    token_ids = prompt_ids(renderer, chat)
    assert chat_tokenizer.decode(token_ids).endswith("<|im_start|>assistant\nIt is ")
    assert chat_tokenizer.decode(completion_of(renderer, chat, "two.")) == "two.<|im_end|>"


@pytest.mark.parametrize("completion", ["so\n</think>\n\n4", "<think>\nso\n</think>\n\n4"])
def test_a_completion_continues_the_thinking_that_the_template_opens(
    chat_tokenizer: PreTrainedTokenizerFast, completion: str
):
    opened = "<|im_start|>assistant\n<think>\n"
    chat_tokenizer.chat_template = str(chat_tokenizer.chat_template).replace("<|im_start|>assistant\n", opened)
    token_ids = completion_of(ChatRenderer(chat_tokenizer), [{"role": "user", "content": "2 + 2?"}], completion)
    assert chat_tokenizer.decode(token_ids) == "so\n</think>\n\n4<|im_end|>"


def test_a_completion_is_not_cut_at_a_special_token_that_ends_no_turn(plain_tokenizer: PreTrainedTokenizerFast):
    plain_tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"  # writes no end, as GLM's
    token_ids = completion_of(ChatRenderer(plain_tokenizer), [{"role": "user", "content": "hi"}], "a<|im_start|>b")
    assert plain_tokenizer.decode(token_ids) == "a<|im_start|>b<|im_end|>"


def test_a_template_without_a_generation_prompt_is_refused(chat_tokenizer: PreTrainedTokenizerFast):
    chat_tokenizer.chat_template = str(chat_tokenizer.chat_template).split("{% if add_generation_prompt %}")[0]
    with pytest.raises(ValueError, match=r"writes '<\|im_start\|>assistant' before the assistant's message, but not"):
        ChatRenderer(chat_tokenizer)
    mistral = "{% for m in messages %}{{ m.content if m.role == 'assistant' else '[INST] ' + m.content + ' [/INST]' }}"
    chat_tokenizer.chat_template = mistral + "{% endfor %}"
    ChatRenderer(chat_tokenizer)  # the user's message ends where the assistant's begins


def test_a_template_for_text_prompts_is_refused_for_chats():
    with pytest.raises(ValueError, match=r"Row 1: 'question' holds chat messages, but prompt_template='Say {prompt}'"):
        messages_of({"question": [{"role": "user", "content": "hi"}]}, prompt_template="Say {prompt}")


def test_a_template_that_rewrites_the_prompt_is_refused_for_completions(plain_tokenizer: PreTrainedTokenizerFast):
    plain_tokenizer.chat_template = "{{ messages | length }}"
    renderer = ChatRenderer(plain_tokenizer)
    with pytest.raises(ValueError, match=r"renders the prompt as '1' but the whole chat as '2'"):
        completion_of(renderer, [{"role": "user", "content": "hi"}], "hello")


def test_a_completion_needs_an_end_token(plain_tokenizer: PreTrainedTokenizerFast):
    plain_tokenizer.eos_token = None
    with pytest.raises(ValueError, match=r"The tokenizer has no end token"):
        completion_of(ChatRenderer(plain_tokenizer), None, "hello")


@pytest.mark.parametrize("form", ["nested", "flat"])
def test_nulls_that_parquet_adds_to_arguments_are_left_out_and_those_of_json_text_stay(form: str):
    def arguments_of(arguments: object) -> object:
        call = {"name": "look", "arguments": arguments}
        turn = {"role": "assistant", "content": "", "tool_calls": [{"function": call} if form == "nested" else call]}
        (read,) = messages_of({"question": [{"role": "user", "content": "?"}, turn]})[1]["tool_calls"]
        return read.get("function", read)["arguments"]

    added = {"city": "Bonn", "unit": None, "at": {"hour": 3, "minute": None}, "tags": [None, {"a": None}]}
    assert arguments_of(added) == {"city": "Bonn", "at": {"hour": 3}, "tags": [None, {}]}
    assert arguments_of('{"unit": null}') == '{"unit": null}'
