"""Processor time per turn of 1,000 multi-turn conversations at once, on one controller, with an engine that sleeps.

    python -m benchmarks.workflows [--quick]

The engine is FakeEngine: each turn sleeps 0.5 s and then writes its tokens at once, so the process computes only the
workflow, the controller, the chat template and the tokenizer. Processor time is that of the whole process, all threads.
With perfect concurrency the wall time would be turns × 0.5 s.

Rows of the table:
    engine_only   the same requests without a workflow: FakeEngine's own cost, to be subtracted
    token_ids     an async environment, no chat template: the observation is encoded as is
    chat          an async environment and a ChatML template: rendered, and checked against history, in each turn
    thread        the same with a sync environment, whose calls each have their own thread
    tool          the same with a tool call in each turn but the last: parsed, checked, run in a thread
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config

from benchmarks.report import Report
from lightrl.engines import FakeEngine
from lightrl.rewards import RewardResult
from lightrl.rollout import RolloutController, RolloutSettings
from lightrl.rollout.prompts import Prompts
from lightrl.trajectory import Prompt, Sampling, Trajectory
from lightrl.weights import bucketed
from lightrl.workflows import Environment, MultiTurn, ToolEnvironment
from lightrl.workflows.environment import Step
from lightrl.workflows.tools import calculator

VOCABULARY = ["<pad>", "<|im_start|>", "<|im_end|>", "<unk>", *map(chr, range(32, 127)), "\n"]
END = 2
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "12*34"}}</tool_call>'
QUESTION = "What is twelve times thirty-four? Think, try, and say it. " * 4


class Asked(Environment):
    """Asks again, this many times."""

    def __init__(self, num_turns: int) -> None:
        self.left = num_turns

    async def step(self, completion: str) -> Step:
        self.left -= 1
        return "That is not right. Try again.", float(self.left == 0), self.left == 0


class AskedInThread(Environment):
    def __init__(self, num_turns: int) -> None:
        self.left = num_turns

    def step(self, completion: str) -> Step:
        self.left -= 1
        return "That is not right. Try again.", float(self.left == 0), self.left == 0


class Questions(Prompts):
    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer

    def __getitem__(self, position: int) -> Prompt:
        messages = [{"role": "user", "content": f"{position}: {QUESTION}"}]
        text = messages[0]["content"]
        if self.tokenizer.chat_template:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        token_ids = self.tokenizer(text, add_special_tokens=False).input_ids
        return Prompt(f"p{position}", messages=messages, token_ids=token_ids)


class InstantRewards:
    """Returns the environment's rewards immediately."""

    def start(self) -> None: ...

    def compute_rewards(self, trajectories: Sequence[Trajectory]) -> list[asyncio.Future[RewardResult]]:
        futures = [asyncio.get_running_loop().create_future() for _ in trajectories]
        for trajectory, future in zip(trajectories, futures, strict=True):
            future.set_result(RewardResult(sum(trajectory.rewards or [])))
        return futures

    def close(self) -> None: ...


def make_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({text: index for index, text in enumerate(VOCABULARY)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r".|\n"), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"]
    )
    tokenizer.chat_template = template
    return tokenizer


def make_engine(completion: list[int], delay_s: float) -> FakeEngine:
    engine = FakeEngine(script=lambda prompt, sampling, sample: completion, delay_s=delay_s)
    engine.start(Qwen3Config(vocab_size=len(VOCABULARY), max_position_embeddings=32768))
    engine.load_weights(bucketed([("weight", torch.zeros(1))], 8), weight_version=0)
    return engine


def measure(play: Callable[[], Any]) -> tuple[float, float]:
    """Wall and processor seconds."""
    wall, processor = time.perf_counter(), time.process_time()
    play()
    return time.perf_counter() - wall, time.process_time() - processor


def engine_only(engine: FakeEngine, prompt: list[int], sampling: Sampling, sessions: int, turns: int) -> None:
    async def session(number: int) -> None:
        token_ids = list(prompt)
        for turn in range(turns):
            drawn = dataclasses.replace(sampling, seed=turn)
            (completion,) = await engine.generate(token_ids, drawn, session=str(number))
            token_ids += completion.token_ids

    async def main() -> None:
        await asyncio.gather(*(session(number) for number in range(sessions)))

    asyncio.run(main())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="100 conversations of 3 turns")
    options = parser.parse_args(arguments)
    sessions, turns, delay_s = (100, 3, 0.1) if options.quick else (1000, 6, 0.5)
    chat, plain = make_tokenizer(CHATML), make_tokenizer(None)
    answer = chat("It must be four hundred and eight, I think.", add_special_tokens=False).input_ids
    call = chat(CALL, add_special_tokens=False).input_ids
    sampling = Sampling(max_new_tokens=128, stop_token_ids=(END,))
    limits = {"max_turns": turns, "max_tokens": 16384}
    report = Report("workflows", sessions=sessions, turns=turns, delay_s=delay_s, tokens_per_turn=len(answer) + 1)

    prompt = Questions(chat)[0].token_ids or []
    engine = make_engine([*answer, END], delay_s)
    wall_s, engine_s = measure(lambda: engine_only(engine, prompt, sampling, sessions, turns))
    report.add("engine_only", wall_s=wall_s, cpu_s=engine_s, cpu_ms_per_turn=1e3 * engine_s / sessions / turns)

    cases: dict[str, tuple[MultiTurn, list[int]]] = {
        "token_ids": (MultiTurn(plain, lambda: Asked(turns), **limits), answer),
        "chat": (MultiTurn(chat, lambda: Asked(turns), **limits), answer),
        "thread": (MultiTurn(chat, lambda: AskedInThread(turns), **limits), answer),
        "tool": (MultiTurn(chat, lambda: ToolEnvironment([calculator]), **limits), call),
    }
    for name, (workflow, completion) in cases.items():
        controller = RolloutController(
            make_engine([*completion, END], delay_s),
            workflow,
            InstantRewards(),
            RolloutSettings(group_size=10, groups_per_iteration=sessions // 10),
            sampling=sampling,
            prompts=Questions(workflow.template.tokenizer),
        )
        try:
            groups: list[Any] = []
            wall_s, cpu_s = measure(lambda run=controller, to=groups: to.extend(run.take(0)))  # type: ignore[misc]
        finally:
            controller.close()
        played = sum(len(trajectory.turns) for group in groups for trajectory in group.trajectories)
        assert played == sessions * turns, played
        report.add(
            name,
            wall_s=wall_s,
            wall_over_ideal=wall_s / (turns * delay_s),
            cpu_s=cpu_s,
            cpu_ms_per_turn=1e3 * cpu_s / played,
            cpu_ms_per_turn_beside_engine=1e3 * (cpu_s - engine_s) / played,
            tokens=sum(len(item.token_ids) for group in groups for item in group.trajectories),
        )
    report.finish()


if __name__ == "__main__":
    main()
