"""A tokenizer of characters with chat markers, chat templates, and conversations played on an engine."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config

from lightrl.engines.engine import Completion
from lightrl.engines.fake_engine import FakeEngine
from lightrl.trajectory import Prompt, Sampling, Trajectory
from lightrl.weights import bucketed
from lightrl.workflows.multi_turn import Environment, Step
from lightrl.workflows.workflow import Workflow

SPECIAL = ["<pad>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<unk>"]
PAD, START, END, TEXT_END, _ = range(5)
LETTERS = [*SPECIAL, "ab", *map(chr, range(32, 127)), "\n"]
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WITH_TOOLS = "{% if tools %}{{ tools | tojson + '\n' }}{% endif %}" + CHATML
TAKES_THINKING_OUT = CHATML.replace("message['content']", "message['content'].split('</think>')[-1]")
TRIMS = CHATML.replace("message['content']", "message['content'].strip()")
ONLY_USERS = "{% if messages[-1]['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}" + CHATML
WRITES_IMAGES = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<unk>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{{ '=' if m.role != 'assistant' }}{% endfor %}"
)
CONFIG = Qwen3Config(
    vocab_size=len(LETTERS),
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    max_position_embeddings=4096,
    initializer_range=0.4,
    eos_token_id=END,
)
SAMPLING = Sampling(max_new_tokens=100, stop_token_ids=(END, TEXT_END), seed=5)


def chat_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """One token per character, but `ab` is one: `a` and `b` apart are what an encoder never writes."""
    backend = Tokenizer(models.WordLevel({token: index for index, token in enumerate(LETTERS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"ab|.|\n"), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>", "<|endoftext|>"],
    )
    tokenizer.chat_template = template
    return tokenizer


def ids(text: str) -> list[int]:
    return list(chat_tokenizer()(text, add_special_tokens=False).input_ids)


def letters(text: str) -> list[int]:
    """One token per character, as a policy may write and an encoder would not."""
    return [LETTERS.index(letter) for letter in text]


def chat_prompt(question: str = "1+1?", name: str = "a", **fields: Any) -> Prompt:
    messages = [{"role": "user", "content": question}]
    text = chat_tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return Prompt(name, messages=messages, token_ids=ids(text), fields=fields)


class Scripted(Environment):
    """Answers with the steps that it was given, and keeps what it was told."""

    def __init__(self, *steps: Any) -> None:
        self.steps = list(steps)
        self.heard: list[str] = []

    async def step(self, completion: str) -> Step:
        self.heard.append(completion)
        return self.steps[len(self.heard) - 1]  # type: ignore[no-any-return]


def writes(*turns: Sequence[int]) -> FakeEngine:
    """An engine with weights whose request k writes `turns[k]`."""
    engine = FakeEngine(script=lambda prompt, sampling, sample: list(turns[len(engine.requests) - 1]))
    return started(engine)


def started(engine: FakeEngine, weight_version: int = 0, context: int = 4096) -> FakeEngine:
    engine.start(Qwen3Config(**{**CONFIG.to_dict(), "max_position_embeddings": context}))
    engine.load_weights(bucketed([("weight", torch.zeros(1))], 8), weight_version=weight_version)
    return engine


async def play(workflow: Workflow, engine: Any, prompt: Prompt, sampling: Sampling = SAMPLING) -> Trajectory:
    """As the controller does it."""
    turn = 0

    async def generate(
        token_ids: list[int], *, max_new_tokens: int | None = None, images: Sequence[str] = ()
    ) -> Completion:
        nonlocal turn
        turn += 1
        longest = min(sampling.max_new_tokens, max_new_tokens or sampling.max_new_tokens)
        drawn = replace(sampling, seed=sampling.seed + turn, max_new_tokens=longest)
        return (await engine.generate(token_ids, drawn, session=prompt.id))[0]

    return await workflow.run(prompt, generate)


def played(workflow: Workflow, engine: Any, prompt: Prompt | None = None, **kwargs: Any) -> Trajectory:
    return asyncio.run(asyncio.wait_for(play(workflow, engine, prompt or chat_prompt(), **kwargs), 600))
