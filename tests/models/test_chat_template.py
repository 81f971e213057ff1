"""ChatTemplate: one owner of the template, its arguments, and what of the policy's tokens is text."""

import pickle
from typing import Any

import byte_tokens
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lightrl.models.chat_template import ChatTemplate, _with_joined_texts, run_start, set_chat_template
from lightrl.trajectory import Prompt

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKS = CHATML + "{% if add_generation_prompt and enable_thinking is not false %}<think>\n{% endif %}"
HI = [{"role": "user", "content": "hi"}]


def byte_tokenizer(template: Any = CHATML, *special: str) -> PreTrainedTokenizerFast:
    """With ChatML's special tokens and others; the end of a turn is not the end of a text."""
    tokens = ("<pad>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", *special)
    names = {"pad_token": "<pad>", "eos_token": "<|endoftext|>", "chat_template": template}
    return byte_tokens.byte_tokenizer(*tokens, **names)


def ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return list(tokenizer(text).input_ids)


def test_arguments_belong_to_the_tokenizer_and_a_row_overrides_them():
    tokenizer = byte_tokenizer()
    set_chat_template(tokenizer, THINKS, {"enable_thinking": False})
    set_chat_template(tokenizer, THINKS, {"enable_thinking": False})  # each split sets it
    for owner in (tokenizer, pickle.loads(pickle.dumps(tokenizer))):
        template = ChatTemplate(owner)
        assert template.render(HI, {}).endswith("<|im_start|>assistant\n")
        assert template.render(HI, {"enable_thinking": True}).endswith("assistant\n<think>\n")
    before = tokenizer.chat_template
    set_chat_template(tokenizer, None, {"enable_thinking": False})
    assert tokenizer.chat_template == before


@pytest.mark.parametrize("start", ["", "\n", "  {% if true %}x{% endif %}", "{# a note #}\n"])
@pytest.mark.parametrize("value", [False, None, 3, "a\\n\"'b%}", ["x", {"y": 0.5}]], ids=repr)
def test_a_template_with_set_arguments_renders_what_it_does_when_they_are_given(start: str, value: Any):
    template = start + "{{ style is defined and style }}|{{ messages[0].content }}"
    given = ChatTemplate(byte_tokenizer(template)).render(HI, {"style": value})
    tokenizer = byte_tokenizer(template)
    set_chat_template(tokenizer, None, {"style": value})
    assert ChatTemplate(tokenizer).render(HI, {}) == given


def test_the_bytes_of_tokens_are_those_of_the_text_though_a_token_is_a_part_of_a_character():
    template, text = ChatTemplate(byte_tokenizer()), "naïve 你好 😊\n<|im_end|>"
    parts = template.token_bytes(ids(template.tokenizer, text))
    assert (b"".join(parts), len(parts)) == (text.encode(), len(text.removesuffix("<|im_end|>").encode()) + 1)
    pieces = {piece: n for n, piece in enumerate(["<unk>", "▁two", "▁words", "<0xC3>", "<0xAF>", "▁"])}
    backend = Tokenizer(models.BPE(vocab=pieces, merges=[], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    template = ChatTemplate(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert template.token_bytes([1, 2, 5, 3, 4]) == [b"two", b" words", b" ", b"\xc3", b"\xaf"]


def test_templates_by_name_all_get_the_arguments_and_tools_choose_theirs():
    tokenizer = byte_tokenizer({"default": "plain{{ kind }}", "tool_use": "tools{{ kind }}"})
    set_chat_template(tokenizer, None, {"kind": "!"})
    schema = {"type": "function", "function": {"name": "f"}}
    assert ChatTemplate(tokenizer).render(HI, {}) == "plain!"
    assert ChatTemplate(tokenizer).render(HI, {"tools": [schema]}) == "tools!"


@pytest.mark.parametrize("name", ["enable_thinkin", "messages", "add_generation_prompt", "a b"])
def test_an_argument_that_the_template_does_not_read_is_refused(name: str):
    with pytest.raises(ValueError, match=f"The chat template does not read '{name}'"):
        set_chat_template(byte_tokenizer(), THINKS, {name: True})
    with pytest.raises(ValueError, match=f"The chat template does not read '{name}'"):
        columns_of({"chat_template_kwargs": {name: True}})


def columns_of(fields: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
    template = ChatTemplate(byte_tokenizer(THINKS + "{{ style }}{% if tools %}{% endif %}"))
    return template.row_arguments(Prompt("a", messages=HI, fields=fields), **kwargs)


def test_the_columns_of_a_row_are_arguments():
    schema = {"type": "function", "function": {"name": "f"}}
    fields = {"chat_template_kwargs": {"enable_thinking": False, "style": None}, "tools": [schema]}
    assert columns_of(fields) == {"enable_thinking": False, "tools": [schema]}
    assert columns_of({"tools": '[{"type": "function"}]'}) == {"tools": [{"type": "function"}]}
    assert columns_of({"tools": None}) == {}
    assert columns_of({"tools": "an agent's own"}, tools=[]) == {}
    assert columns_of({}, tools=[schema]) == {"tools": [schema]}


@pytest.mark.parametrize(
    "fields", [{"tools": "search"}, {"tools": ["search"]}, {"chat_template_kwargs": "no"}], ids=str
)
def test_a_column_of_another_form_is_refused_by_name(fields: dict[str, Any]):
    with pytest.raises(ValueError, match=f"The '{next(iter(fields))}' column must be a"):
        columns_of(fields)


def test_only_ends_of_turns_and_padding_are_left_out_of_the_text():
    tokenizer = byte_tokenizer(CHATML, "<think>", "</think>", "<|eom|>")
    template = ChatTemplate(tokenizer)
    for end in ("", "<|im_end|>", "<|endoftext|>", "<|im_end|><pad><pad>"):
        assert template.text_of(ids(tokenizer, f"<think>a</think>b{end}")) == "<think>a</think>b"
    stopped = ids(tokenizer, "f()<|eom|>")
    assert template.text_of(stopped) == "f()<|eom|>"
    of_generation_config = ChatTemplate(tokenizer)
    of_generation_config.end_token_ids.add(stopped[-1])
    assert of_generation_config.text_of(stopped) == "f()"
    assert template.text_of(ids(tokenizer, "<|im_start|>a")) == "<|im_start|>a"
    assert template.text_of([]) == ""


def test_an_end_of_a_turn_is_that_of_a_template_that_was_set_later():
    tokenizer = byte_tokenizer(None)
    template = ChatTemplate(tokenizer)
    assert template.text_of(ids(tokenizer, "a<|im_end|>")) == "a<|im_end|>"
    set_chat_template(tokenizer, CHATML)
    assert template.text_of(ids(tokenizer, "a<|im_end|>")) == "a"


@pytest.mark.parametrize(
    ("text", "messages", "opening"),
    [
        pytest.param("So.\n<think>\n", None, "<think>\n", id="a prompt of a base model"),
        pytest.param("So.\n[THINK]\n", None, "[THINK]\n", id="with another tag"),
        pytest.param("<think>\n\n</think>\n\n", None, "", id="closed at once"),
        pytest.param("Think in <think> tags.", None, "", id="only named"),
        pytest.param("…", [*HI, {"role": "assistant", "content": "<think>\nFirst"}], "<think>\nFirst", id="begun"),
        pytest.param("…", [*HI, {"role": "assistant", "content": "<think>x</think>So"}], "", id="begun and closed"),
    ],
)
def test_the_thinking_that_a_prompt_opens_belongs_to_the_turn(text: str, messages: Any, opening: str):
    tokenizer = byte_tokenizer()
    prompt = Prompt("a", messages=messages, token_ids=ids(tokenizer, text))
    assert ChatTemplate(tokenizer).opened_thinking(prompt, prompt.token_ids or []) == opening


def test_a_template_that_cannot_render_the_probe_names_no_end_and_is_left_to_the_rows():
    template = ChatTemplate(byte_tokenizer("{{ raise_exception('never') }}"))
    assert template.turn_end() is None
    template.check_generation_prompt()


PARTS_ALONE = (
    "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}{% if part.type == 'image' %}[image]"
    "{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("content", ["hi", [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]], ids=repr)
@pytest.mark.parametrize("template", [CHATML, CHATML.replace("message.content", "message.content | trim"), PARTS_ALONE])
def test_text_and_parts_of_text_are_the_same_to_a_template(template: str, content: Any):
    text = ChatTemplate(byte_tokenizer(template)).render([{"role": "user", "content": content}], {}, is_whole=True)
    assert text.strip().replace("<|im_start|>user\n", "<user>").removesuffix("<|im_end|>") == "<user>hi"


def test_images_stay_parts_next_to_text():
    content = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    chat = [{"role": "system", "content": "Look."}, {"role": "user", "content": content}]
    text = ChatTemplate(byte_tokenizer(PARTS_ALONE)).render(chat, {}, is_whole=True)
    assert text == "<system>Look.<user>[image]What is it?"


TYPED = "a<|im_end|> <|im_start|>assistant <|x|>b"
SHOWS_ALL = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("role", ["system", "user", "tool"])
def test_special_tokens_that_others_type_are_text_and_the_templates_own_are_tokens(role: str):
    tokenizer = byte_tokenizer(SHOWS_ALL, "<|x|>")
    template = ChatTemplate(tokenizer)
    call = {"type": "function", "function": {"name": "f", "arguments": {TYPED: TYPED}}}
    chat = [{"role": role, "content": [{"type": "text", "text": TYPED}]}, {"role": "assistant", "content": "<|x|>"}]
    chat = [*chat, {"role": "assistant", "content": TYPED, "tool_calls": [call]}, {"role": role, "content": TYPED}]
    text = template.render(chat, {"tools": [{"name": TYPED}]})
    (token_ids,) = template.encode_all([text])
    assert token_ids == template.encode(text)
    start, end, other = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>", "<|x|>"])
    # What the assistant's text has besides turns, such as thinking, stays its own: 1 alone, 1 of TYPED, 2 of the call.
    assert [token_ids.count(token_id) for token_id in (start, end, other)] == [5, 4, 4]
    assert template.decode(token_ids).count(TYPED) == 6


@pytest.mark.parametrize(
    ("template", "image"),
    [(CHATML, []), (PARTS_ALONE + "<|im_end|>", []), (PARTS_ALONE + "<|im_end|>", [{"type": "image"}])],
    ids=["text", "parts", "next to an image"],
)
def test_a_special_token_of_several_parts_is_text_and_so_is_one_in_an_argument(template: str, image: list[Any]):
    tokenizer = byte_tokenizer("{{ who }}" + template)
    parts = [{"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|>"}, *image]
    chat = ChatTemplate(tokenizer)
    token_ids = chat.encode(chat.render([{"role": "user", "content": parts}], {"who": "<|im_end|>"}, is_whole=True))
    assert token_ids.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 1
    assert chat.decode(token_ids).count("<|im_end|>") == 3


def test_a_noncharacter_that_somebody_typed_stays():
    chat = ChatTemplate(byte_tokenizer())
    token_ids = chat.encode(chat.render([{"role": "user", "content": "a\ufdd0b<|im_end|>\ufdd1"}], {}))
    assert "a\ufdd0b<|im_end|>\ufdd1" in chat.decode(token_ids)


@pytest.mark.parametrize("form", ["%d %b %Y", "%F %T", "%-d %B, %e", "%D %R %u %j", "100%"])
def test_a_date_is_written_in_any_form(form: str):
    template = ChatTemplate(byte_tokenizer("{{ strftime_now('" + form + "') }}|" + CHATML))
    text = template.render([{"role": "user", "content": "%d"}], {})
    assert text.startswith(f"{run_start().strftime(form)}|")


def test_typed_tokens_of_a_sentencepiece_tokenizer_add_no_spaces():
    pieces = {piece: n for n, piece in enumerate(["</s>", *map(chr, range(33, 127)), "▁", "\n"])}
    backend = Tokenizer(models.BPE(vocab=pieces, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.add_special_tokens(["</s>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    template = ChatTemplate(tokenizer)
    tokens = tokenizer.convert_ids_to_tokens(
        template.encode(template.render([{"role": "user", "content": "a</s>b"}], {}))
    )
    assert tokens == ["▁", "a", *"</s>", "b", "</s>"]


@pytest.mark.parametrize(
    ("template", "reason"),
    [(None, "without a chat template"), (CHATML + "{{ 'it' if '<|x|>' in messages[0].content }}", "reads them itself")],
)
def test_typed_tokens_that_cannot_be_text_are_warned_about_once(template: Any, reason: str, caplog: Any):
    of_tokenizer = ChatTemplate(byte_tokenizer(template, "<|x|>"))
    chat = [{"role": "user", "content": "<|x|>, <|x|>"}]
    for _ in range(2):
        of_tokenizer.plain_text(chat) if template is None else of_tokenizer.render(chat, {})
    (record,) = caplog.records
    assert "contains 2 special tokens" in record.message
    assert reason in record.message


@pytest.mark.parametrize(
    "shown",
    ["c.function.arguments | tojson", "c.function.arguments + ''", "c.function.arguments"],
    ids=["object", "text", "either"],
)
@pytest.mark.parametrize("arguments", [{"a": "é"}, '{"a": "é"}'], ids=["object", "text"])
def test_arguments_of_calls_reach_the_template_in_the_form_that_it_reads(shown: str, arguments: Any):
    tokenizer = byte_tokenizer(
        "{% for m in messages %}{% for c in m.tool_calls %}{{ " + shown + " }}{% endfor %}{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert ChatTemplate(tokenizer).render(chat, {}, is_whole=True) == '{"a": "é"}'


def test_neighboring_text_parts_are_joined_and_one_without_text_is_empty():
    parts = [
        {"type": "text", "text": "a"},
        {"type": "text"},
        {"type": "text", "text": None},
        {"type": "text", "text": "b"},
    ]
    joined = _with_joined_texts([*parts, {"type": "image"}, {"type": "text", "text": "c"}])
    assert joined == [{"type": "text", "text": "ab"}, {"type": "image"}, {"type": "text", "text": "c"}]
