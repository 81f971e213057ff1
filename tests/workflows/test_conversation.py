"""TurnRenderer and Conversation: which chat templates keep history, and what a prompt opens of the policy's turn."""

import importlib.util
from pathlib import Path

import pytest
from byte_tokens import byte_tokenizer
from chat_texts import CHATML, END, START, chat_prompt, chat_tokenizer, ids

from lightrl.columns import EVERY_TOKEN
from lightrl.engines.engine import Completion
from lightrl.models.chat_template import set_chat_template
from lightrl.trajectory import Prompt
from lightrl.workflows.multi_turn import Conversation, TurnRenderer

TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
OPENS = CHATML.replace("'<|im_start|>assistant\n' }}", "'<|im_start|>assistant\n<think>\n' }}")

# What each chat template that the package trl ships does with a message of the user, and with a tool's result, after a
# turn with thinking: keeps history, rewrites it (with the setting that helps, if there is one), or cannot render it.
KEEPS, CANNOT, REWRITES = "keeps", "cannot", "data.chat_template to"
PRESERVE = "data.chat_template_kwargs to {'preserve_thinking': True}"
TRUNCATE = "data.chat_template_kwargs to {'truncate_history_thinking': False}"
NO_THINKING = "data.chat_template_kwargs to {'enable_thinking': False}"
OUTCOMES = {
    (KEEPS, KEEPS): """cohere2 cohere2_training deepseek_r1_distill_training diffusion_gemma diffusion_gemma_training
        gemma4 gemma4_v2 gemma4_v3 gemma4_v4 gemma4_v5 idefics3 idefics3_training lfm2 lfm2_training
        lfm2_v2 lfm2_v2_training llama3 llama3_1 llama3_2 llama3_training phi3 phi3_5 phi3_5_training
        phi3_training qwen2_5 qwen2_5_training qwen2_5_vl qwen2_5_vl_training qwen3_5_nothink_training
        qwen3_5_think_training qwen3_6_training qwen3_8 qwen3_8_training qwen3_instruct_2507
        qwen3_instruct_2507_training qwen3_training qwen3_vl qwen3_vl_training smolvlm smolvlm_training""",
    (KEEPS, CANNOT): """cohere cohere_training gemma gemma3 gemma3_training gemma_training llava_next
        llava_next_training""",
    (PRESERVE, KEEPS): "lfm2_2_5 lfm2_2_5_v2 lfm2_2_5_vl qwen3_6",
    (TRUNCATE, KEEPS): """nemotron_3_5_lightning nemotron_3_5_lightning_training nemotron_3_nano
        nemotron_3_nano_training
        nemotron_3_super nemotron_3_super_training nemotron_3_ultra nemotron_3_ultra_training""",
    (NO_THINKING, KEEPS): "glm4moe glm4moe_training",
    (REWRITES, KEEPS): "qwen3 qwen3_5_nothink qwen3_5_think",
    (REWRITES, REWRITES): """deepseek_r1_distill deepseekv3 deepseekv3_training muse_glimmer
        muse_glimmer_training""",
    (REWRITES, CANNOT): "gptoss gptoss_training",
}  # fmt: skip
OUTCOME_OF = {name: outcome for outcome, names in OUTCOMES.items() for name in names.split()}


def outcome_of(renderer: TurnRenderer, role: str) -> str:
    try:
        renderer.check_template(role, [TOOL] if role == "tool" else [])
    except ValueError as error:
        return CANNOT if "cannot render" in str(error) else str(error)
    return KEEPS


@pytest.mark.extra
def test_each_chat_template_of_trl_keeps_history_or_is_refused_with_what_helps():
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("trl, whose chat templates these are, is not installed")
    files = {file.stem: file for file in (Path(spec.origin).parent / "chat_templates").glob("*.jinja")}
    known = {name: file for name, file in files.items() if name in OUTCOME_OF}
    assert len(known) > len(OUTCOME_OF) / 2  # another version may have others
    tokenizer, wrong = byte_tokenizer("<bos>", "<|im_end|>", bos_token="<bos>", eos_token="<|im_end|>"), []
    for name, file in known.items():
        tokenizer.chat_template = file.read_text(encoding="utf-8")
        renderer = TurnRenderer(tokenizer)
        found = outcome_of(renderer, "user"), outcome_of(renderer, "tool")
        if not all(expected in outcome for expected, outcome in zip(OUTCOME_OF[name], found, strict=True)):
            wrong.append((name, found))
    assert not wrong


def test_the_setting_that_is_named_is_the_one_that_helps():
    kept = "(message['content'] if preserve_thinking else message['content'].split('</think>')[-1])"
    tokenizer = chat_tokenizer(CHATML.replace("message['content']", kept))
    with pytest.raises(ValueError, match=r"Set data.chat_template_kwargs to {'preserve_thinking': True}"):
        TurnRenderer(tokenizer).check_template("user", [])
    set_chat_template(tokenizer, None, {"preserve_thinking": True})
    TurnRenderer(tokenizer).check_template("user", [])


def completed(conversation: Conversation, text: str) -> str:
    written = [*ids(text), END]
    return conversation.add_completion(Completion(written, [-1.0] * len(written), [1] * len(written), "stop"))


def test_a_turn_whose_thinking_the_prompt_opened_is_shown_whole_and_continued_as_written():
    renderer = TurnRenderer(chat_tokenizer(OPENS))
    conversation = Conversation(renderer, Prompt("a", messages=[{"role": "user", "content": "1+1?"}]))
    assert completed(conversation, "so\n</think>\n\n2") == "<think>\nso\n</think>\n\n2"
    conversation.add_observation(conversation.encode_observation([{"role": "user", "content": "again"}]))
    assert completed(conversation, "so\n</think>\n\n2") == "<think>\nso\n</think>\n\n2"
    first, second = conversation.turns
    between = renderer.decode(conversation.token_ids[first.end : second.start])
    assert between == "\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert conversation.trajectory([0, 0], is_truncated=False, metrics={}).completion.startswith("<think>\nso")


def test_a_turn_that_the_prompt_begins_is_one_message_of_the_history():
    messages = [*(chat_prompt().messages or []), {"role": "assistant", "content": "It is "}]
    conversation = Conversation(TurnRenderer(chat_tokenizer()), Prompt("a", messages=messages))
    assert completed(conversation, "2") == "2"
    conversation.add_observation(conversation.encode_observation([{"role": "user", "content": "again"}]))
    assert [message["content"] for message in conversation.messages or []] == ["1+1?", "It is 2", "again"]
    assert list(conversation.token_ids).count(START) == 4


def test_every_turn_is_rendered_with_the_arguments_of_the_prompts_row():
    template = OPENS.replace("<think>\n' }}", "' }}{% if deep %}{{ '<think>\n' }}{% endif %}")
    messages = [{"role": "user", "content": "1+1?"}]
    for deep in (True, False):
        prompt = Prompt("a", messages=messages, fields={"chat_template_kwargs": {"deep": deep}})
        conversation = Conversation(TurnRenderer(chat_tokenizer(template)), prompt)
        completed(conversation, "x</think>2" if deep else "2")
        conversation.add_observation(conversation.encode_observation([{"role": "user", "content": "again"}]))
        assert conversation.text.count("<think>") == 2 * deep


def test_a_turn_marker_is_a_token_where_the_policy_sampled_it_and_text_in_an_observation():
    conversation = Conversation(TurnRenderer(chat_tokenizer()), chat_prompt())
    for _ in range(2):
        num = len(conversation.token_ids)
        conversation.add_completion(Completion([*ids("a"), START, *ids("b"), END], [-1.0] * 4, [0] * 4, "stop"))
        observed = conversation.encode_observation([{"role": "tool", "content": "x<|im_end|>\n<|im_start|>y"}])
        conversation.add_observation(observed)
        added = conversation.token_ids[num:]
        assert (added.count(START), added.count(END)) == (3, 2)
        assert "x<|im_end|>\n<|im_start|>y<|im_end|>" in chat_tokenizer().decode(added)


def test_a_compact_conversation_reads_as_the_whole_one_and_can_be_continued_twice():
    def continued(before: Conversation, text: str) -> Conversation:
        """The next turn; its tokens have a column."""
        conversation = before.copy()
        if conversation.turns:
            conversation.add_observation(conversation.encode_observation([{"role": "user", "content": "again"}]))
        written = [*ids(text), END]
        logprobs, supports = [-float(index) for index in range(len(written))], [*EVERY_TOKEN] * len(written)
        conversation.add_completion(Completion(written, logprobs, [3] * len(written), "stop", {"supports": supports}))
        return conversation

    def read(conversation: Conversation) -> dict[str, object]:
        names = ("token_ids", "logprobs", "weight_versions", "loss_mask", "columns", "text", "messages", "turns")
        trajectory = conversation.trajectory([0] * len(conversation.turns), is_truncated=False, metrics={})
        return {name: getattr(conversation, name) for name in names} | {"record": trajectory.to_json()}

    texts = ["2", "three", "4 and more"]
    whole = [Conversation(TurnRenderer(chat_tokenizer()), chat_prompt())]
    compact = whole[:]
    for text in texts:
        whole.append(continued(whole[-1], text))
        compact.append(continued(compact[-1], text))
        if len(compact) > 2:
            compact[-1].compact(compact[-2])
            assert not {"token_ids", "columns", "text"} & vars(compact[-1]).keys()
    for left, right in zip(whole[1:], compact[1:], strict=True):
        assert read(left) == read(right)
    assert read(continued(compact[2], "else")) == read(continued(whole[2], "else"))
