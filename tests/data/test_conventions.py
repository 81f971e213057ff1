"""Data as other frameworks write it: what becomes of a row, or the message that refuses it."""

from pathlib import Path
from typing import Any

import data_cases
import pytest

from lightrl.data import DataSource, PreferenceDataModule, PromptDataModule, SFTDataModule

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
TEMPLATE = (
    "{% if tools is defined and tools %}[{{ tools | length }} tools]{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking is defined and not enable_thinking %}"
    "(no thinking){% endif %}{% endif %}"
)


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


ASKED = "<user>1+1?<|im_end|>\n<assistant>"
TALK = [user("1+1?"), said("2"), user("+3?"), said("5")]
TALKED = "<user>1+1?<|im_end|>\n<assistant>2<|im_end|>\n<user>+3?<|im_end|>\n<assistant>"


def set_up(kind: type, tmp_path: Path, tokenizer: Any, row: dict[str, Any], settings: dict[str, Any]) -> Any:
    path = data_cases.write_rows(tmp_path / "rows.jsonl", [row])
    tokenizer.chat_template = TEMPLATE
    others = dict(settings)
    data = kind(DataSource(path, columns=others.pop("columns", {})), batch_size=1, **others)
    return data_cases.set_up(data, tokenizer)


PROMPTS = {
    "TRL, text": ({"prompt": "1+1?", "answer": "2"}, {"prompt_column": "prompt"}, ASKED),
    "TRL, chat": (
        {"prompt": [user("1+1?")], "solution": "2"}, {"prompt_column": "prompt", "columns": {"answer": "solution"}},
        ASKED,
    ),
    "TRL, tools": ({"question": [user("1+1?")], "answer": "2", "tools": [TOOL]}, {}, f"[1 tools]{ASKED}"),
    "TRL, arguments of the template": (
        {"question": "1+1?", "answer": "2", "chat_template_kwargs": {"enable_thinking": False}}, {},
        f"{ASKED}(no thinking)",
    ),
    "verl": (
        {"prompt": [user("1+1?")], "reward_model": {"style": "rule", "ground_truth": "2"}, "extra_info": {"index": 0}},
        {"prompt_column": "prompt", "columns": {"answer": "reward_model.ground_truth"}}, ASKED,
    ),
    "SkyRL": (
        {"prompt": [user("1+1?")], "env_class": "gsm8k", "reward_spec": {"ground_truth": "2"}},
        {"prompt_column": "prompt", "columns": {"answer": "reward_spec.ground_truth"}}, ASKED,
    ),
    "NeMo-Gym": (
        {"responses_create_params": {"input": [user("1+1?")]}, "expected_answer": "2"},
        {"prompt_column": "responses_create_params.input", "columns": {"answer": "expected_answer"}}, ASKED,
    ),
    "NeMo-Gym, parts": (
        {"responses_create_params": {"input": [user([{"type": "input_text", "text": "1+1?"}])]}, "answer": "2"},
        {"prompt_column": "responses_create_params.input"}, ASKED,
    ),
    "OpenRLHF": ({"input": "1+1?", "label": "2"}, {"columns": {"question": "input", "answer": "label"}}, ASKED),
    "slime": (
        {"prompt": [user("1+1?")], "label": "2", "metadata": {"a": 1}},
        {"prompt_column": "prompt", "columns": {"answer": "label"}}, ASKED,
    ),
    "AReaL": ({"messages": [user("1+1?")], "answer": "2"}, {"prompt_column": "messages"}, ASKED),
    "verifiers": ({"question": "1+1?", "answer": "2", "info": {"x": 1}}, {}, ASKED),
    "ShareGPT": (
        {"conversations": [{"from": "human", "value": "1+1?"}], "answer": "2"}, {"prompt_column": "conversations"},
        ASKED,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROMPTS)
def test_a_prompt_is_read_with_its_answer(name: str, tmp_path: Path, plain_tokenizer: Any):
    row, settings, text = PROMPTS[name]
    prompt = set_up(PromptDataModule, tmp_path, plain_tokenizer, row, settings).prompt_stream[0]
    assert plain_tokenizer.decode(prompt.token_ids) == text
    assert prompt.fields["answer"] == "2"


MESSAGES = {"prompt_column": "messages", "answer_column": None}
COMPLETION = {"prompt_column": "prompt", "answer_column": "completion"}
CHATS = {
    "TRL, text": ({"prompt": "1+1?", "completion": "2"}, COMPLETION, ASKED, ["2<|im_end|>"]),
    "TRL, chats": ({"prompt": [user("1+1?")], "completion": [said("2")]}, COMPLETION, ASKED, ["2<|im_end|>"]),
    "TRL, messages": ({"messages": TALK}, MESSAGES, ASKED, ["2<|im_end|>", "5<|im_end|>"]),
    "a chat of several turns after the prompt": (
        {"prompt": TALK[:1], "completion": TALK[1:]}, COMPLETION, ASKED, ["2<|im_end|>", "5<|im_end|>"],
    ),
    "a whole chat beside its prompt": ({"prompt": TALK[:3], "completion": TALK}, COMPLETION, TALKED, ["5<|im_end|>"]),
    "a message": ({"question": "1+1?", "answer": said("2")}, {}, ASKED, ["2<|im_end|>"]),
    "parts": ({"question": "1+1?", "answer": [{"type": "text", "text": "2"}]}, {}, ASKED, ["2<|im_end|>"]),
    "ShareGPT": (
        {"conversations": [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}]},
        {"prompt_column": "conversations", "answer_column": "conversations"}, ASKED, ["2<|im_end|>"],
    ),
    "chosen and rejected": (
        {"prompt": [user("1+1?")], "chosen": [said("2")], "rejected": [said("3")]}, None, ASKED,
        ["2<|im_end|>", "3<|im_end|>"],
    ),
    "chosen and rejected alone": (
        {"chosen": TALK, "rejected": [*TALK[:3], said("6")]}, None, TALKED, ["5<|im_end|>", "6<|im_end|>"],
    ),
    "chosen and rejected with a prompt that they go on after": (
        {"prompt": "1+1?", "chosen": TALK, "rejected": [*TALK[:3], said("6")]}, None, TALKED,
        ["5<|im_end|>", "6<|im_end|>"],
    ),
}  # fmt: skip


def turns(ids: list[int], is_generated: list[bool], tokenizer: Any) -> list[str]:
    """The text of each run of tokens that the policy writes."""
    text = "".join(chr(token_id) if keep else "\0" for token_id, keep in zip(ids, is_generated, strict=True))
    return [tokenizer.decode([ord(letter) for letter in part]) for part in text.split("\0") if part]


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_is_read_and_its_turns_are_trained(name: str, tmp_path: Path, plain_tokenizer: Any):
    row, settings, prompt, targets = CHATS[name]
    kind = PreferenceDataModule if settings is None else SFTDataModule
    data = set_up(kind, tmp_path, plain_tokenizer, row, settings or {})
    (chat,) = data.prompts["train"]
    assert plain_tokenizer.decode(chat.token_ids) == prompt
    completions = zip(chat.completion_ids, chat.is_generated, strict=True)
    assert [turn for ids, mask in completions for turn in turns(ids, mask, plain_tokenizer)] == targets
    batch = next(iter(data.train_dataloader()))
    assert int(batch.loss_mask.sum()) == sum(map(sum, chat.is_generated))


REFUSED = {
    "text without a prompt": (
        SFTDataModule, {"text": "1+1=2"}, {"prompt_column": "text", "answer_column": None},
        r"Line 1 of '.*': 'text' must hold chats that begin with .* For text, add a prompt column",
    ),
    "unpaired preferences": (
        PreferenceDataModule, {"prompt": [user("1+1?")], "completion": [said("2")], "label": True}, {},
        r"Line 1 of '.*' has a completion and a label \(KTO\)",
    ),
    "pairs with other first messages": (
        PreferenceDataModule, {"chosen": [user("1+1?"), said("2")], "rejected": [user("1+2?"), said("3")]}, {},
        r"'chosen' and 'rejected' must hold chats that begin with the same user or system message",
    ),
    "a pair whose chats are not the prompt's": (
        PreferenceDataModule, {"prompt": "2+2?", "chosen": TALK[:2], "rejected": [TALK[0], said("3")]}, {},
        r"'chosen' must begin with the prompt's messages, .*2\+2\?.* set prompt_column to a name that no column",
    ),
    "two answers in a row": (
        SFTDataModule, {"messages": [user("1+1?"), said("2"), said("5")]}, MESSAGES,
        r"'messages' must continue with an assistant message, never two in a row",
    ),
    "a chat that the user ends": (
        SFTDataModule, {"messages": TALK[:3]}, MESSAGES, "must end with an assistant message",
    ),
    "another speaker of ShareGPT": (
        SFTDataModule, {"messages": [{"from": "human", "value": "1"}, {"from": "function_call", "value": "{}"}]},
        MESSAGES, r"Line 1 of '.*': message 2: 'from' must be one of human, gpt, .*'function_call'",
    ),
    "parts of another type": (
        PromptDataModule, {"question": [user([{"type": "audio", "audio": "a.wav"}])], "answer": "2"}, {},
        r"Line 1 of '.*': message 1 must have parts of the types text and image, got \{'type': 'audio'",
    ),
    "a path to nothing": (
        PromptDataModule, {"question": "1+1?", "reward_model": {"style": "rule"}},
        {"columns": {"answer": "reward_model.ground_truth"}},
        r"Line 1 of '.*' has no column 'reward_model.ground_truth' for columns",
    ),
    "a prompt that is not there": (
        PreferenceDataModule, {"chosen": "2", "rejected": "3"}, {},
        r"Line 1 of '.*' has no column 'prompt' \(its columns: 'chosen', 'rejected'\).* set prompt_column to another",
    ),
    "a choice that is not there": (
        PreferenceDataModule, {"prompt": "1+1?", "chosen": "2"}, {},
        r"Line 1 of '.*' has no column 'rejected' .* set rejected_column to another",
    ),
    "a template for text beside whole chats": (
        SFTDataModule, {"messages": TALK}, {**MESSAGES, "prompt_template": "Q: {prompt}"},
        r"'messages' holds chat messages, but prompt_template='Q: \{prompt\}' needs text",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_read_is_refused_by_name(name: str, tmp_path: Path, plain_tokenizer: Any):
    kind, row, settings, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        set_up(kind, tmp_path, plain_tokenizer, row, settings)


def test_a_system_prompt_opens_whole_chats_that_have_none(tmp_path: Path, plain_tokenizer: Any):
    settings = {**MESSAGES, "system_prompt": "Add."}
    (chat,) = set_up(SFTDataModule, tmp_path, plain_tokenizer, {"messages": TALK}, settings).prompts["train"]
    assert plain_tokenizer.decode(chat.token_ids) == f"<system>Add.<|im_end|>\n{ASKED}"


def test_tokens_between_two_turns_are_those_of_a_rollout(tmp_path: Path, plain_tokenizer: Any):
    (chat,) = set_up(SFTDataModule, tmp_path, plain_tokenizer, {"messages": TALK}, MESSAGES).prompts["train"]
    assert plain_tokenizer.decode(chat.completion_ids[0]) == TALKED.removeprefix(ASKED) + "5<|im_end|>"
    read = [token_id for token_id, keep in zip(chat.completion_ids[0], chat.is_generated[0], strict=True) if not keep]
    assert plain_tokenizer.decode(read) == "\n<user>+3?<|im_end|>\n<assistant>"


def test_a_template_that_rewrites_earlier_turns_is_refused_for_several(tmp_path: Path, plain_tokenizer: Any):
    thinks = TEMPLATE.replace(
        "<{{ m.role }}>", "<{{ m.role }}>{{ '(thought)' if loop.last and loop.index > 1 else '' }}"
    )
    settings = {**MESSAGES, "chat_template": thinks}
    with pytest.raises(ValueError, match=r"rewrites history: .*\(thought\)2.* Set data.chat_template to a Jinja file"):
        set_up(SFTDataModule, tmp_path, plain_tokenizer, {"messages": TALK}, settings)


def test_calls_of_tools_and_their_results_are_kept(tmp_path: Path, plain_tokenizer: Any):
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    chat = [user("1+1?"), call, {"role": "tool", "content": "2"}, said("It is 2.")]
    template = TEMPLATE.replace(
        "{{ m.content }}", "{{ m.content }}{% for c in m.tool_calls %}!{{ c.function.name }}{% endfor %}"
    )
    settings = {**MESSAGES, "chat_template": template}
    (row,) = set_up(SFTDataModule, tmp_path, plain_tokenizer, {"messages": chat}, settings).prompts["train"]
    found = turns(row.completion_ids[0], row.is_generated[0], plain_tokenizer)
    assert found == ["!add<|im_end|>", "It is 2.<|im_end|>"]
