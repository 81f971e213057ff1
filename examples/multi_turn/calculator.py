"""Products of two numbers: prompts, the calculator tool, and demonstrations, 1 in 4 of which calls the tool."""

import random

from examples.countdown.tokenizer import tokenizer
from lightrl import Prompt, PromptDataModule, SFTDataModule, Trajectory
from lightrl.workflows.tools import ToolCall, ToolEnvironment, calculator

characters = tokenizer()


def parse(completion: str) -> list[ToolCall]:
    return [ToolCall("calculator", {"expression": completion[1:]})] if completion.startswith(":") else []


def tools() -> ToolEnvironment:
    return ToolEnvironment([calculator], parser=parse)


def is_right(trajectory: Trajectory) -> float:
    return float(trajectory.completion == trajectory.prompt.fields["answer"])


class Products(PromptDataModule):
    def make_prompts(self, split: str) -> list[Prompt]:
        pairs = [(a, b) for a in range(12, 100) for b in range(2, 10) if a * b >= 100]
        products = {f"{a}*{b}": str(a * b) for a, b in pairs if ((a + b) % 5 == 0) == (split != "train")}
        return [demonstration(text, f"{text}=", answer) for text, answer in products.items()]


class Demonstrations(SFTDataModule):
    def make_prompts(self, split: str) -> list[Prompt]:
        """Makes demonstrations for each product, such as `17*6=`: three guesses, the call `:17*6`, and its result."""
        demonstrations = []
        for product in Products(batch_size=1).make_prompts(split):
            text, answer = product.id, product.fields["answer"]
            guesses = [str(random.Random(f"{text} {n}").randint(100, 299)) for n in range(3)]
            turns = [*guesses, f":{text}"]
            demonstrations += [demonstration(f"{text} {n}", f"{text}=", turn) for n, turn in enumerate(turns)]
            result = f"{text}=:{text}<eos>{answer}"
            demonstrations += [demonstration(f"{text} copy {n}", result, answer) for n in range(4)]
        return demonstrations


def demonstration(name: str, text: str, answer: str) -> Prompt:
    return Prompt(name, token_ids=characters(text).input_ids, fields={"answer": answer})
