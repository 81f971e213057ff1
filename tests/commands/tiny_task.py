"""A task small enough to run through the whole command: a tokenizer and prompts, as in a user's own file."""

from typing import Any

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from lightrl import Prompt, PromptDataModule, RLCallback, SingleTurn


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *"0123456789"])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>")


class WithEnvironment(SingleTurn):
    def __init__(self, tokenizer: PreTrainedTokenizerFast, environment: dict[str, str]) -> None:
        super().__init__(tokenizer)
        if "GITHUB_TOKEN" not in environment:
            raise ValueError("environment needs GITHUB_TOKEN")


class Digits(PromptDataModule):
    def __init__(self, batch_size: int = 2) -> None:
        super().__init__(None, batch_size=batch_size)

    def make_prompts(self, split: str) -> list[Prompt]:
        return [Prompt(id=f"{split}-{index}", token_ids=[2 + index]) for index in range(8)]


class Keeps(RLCallback):
    """Keeps its arguments, which may be anything."""

    def __init__(
        self,
        anything: Any = None,
        untyped=None,
        table: dict | None = None,
        values: dict[str, Any] | None = None,
        items: list[Any] | None = None,
        texts: dict[str, str] | None = None,
        command: list[str] | None = None,
        inner: RLCallback | None = None,
        **others: Any,
    ) -> None:
        self.given = {"anything": anything, "untyped": untyped, "table": table, "values": values, "items": items}
        self.given |= {"texts": texts, "command": command, "inner": inner, **others}
