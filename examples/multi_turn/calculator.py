"""Products by calculator: tokenizer, prompts, environment. From random weights a policy learns to call."""

import operator
import re

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lightrl import GRPO, Prompt, PromptDataModule
from lightrl.rollout import MultiTurn, ToolEnvironment
from lightrl.rollout.tools import calculator

CALL, CALLED = '<tool_call>{"name": "calculator", "arguments": {"expression": "', '"}}</tool_call>'  # one token each


def tokenizer() -> PreTrainedTokenizerFast:
    texts = ["<pad>", "<eos>", "<unk>", CALL, CALLED, *"0123456789*="]
    backend = Tokenizer(models.WordLevel({text: index for index, text in enumerate(texts)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(f"{re.escape(CALL)}|{re.escape(CALLED)}|."), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


class Products(PromptDataModule):
    def make_prompts(self, split: str) -> list[Prompt]:
        texts = [f"{a}*{b}" for a in range(12, 100) for b in range(2, 10) if ((a + b) % 5 == 0) == (split != "train")]
        return [Prompt(text, token_ids=tokenizer()(f"{text}=").input_ids, fields={"text": text}) for text in texts]


class Calculation(ToolEnvironment):
    """The call earns up to a half, the answer the other half: by the share of characters in their place."""

    def reset(self, prompt: Prompt) -> None:
        self.expected = [CALL + prompt.fields["text"] + CALLED, calculator(prompt.fields["text"])]

    async def step(self, completion: str):
        said, wanted = (text.replace(CALL, "(").replace(CALLED, ")") for text in (completion, self.expected.pop(0)))
        earned = 0.5 * sum(map(operator.eq, said, wanted)) / max(len(said), len(wanted))
        observation = (await super().step(completion))[0] if said == wanted and self.expected else None
        return observation, earned, observation is None


class CalculatorGRPO(GRPO):
    def configure_workflow(self) -> MultiTurn:
        return MultiTurn(self.tokenizer, lambda: Calculation([calculator]), max_turns=2, max_tokens=32)
