"""Makes a small model with random weights, and a tokenizer trained on the questions and answers.

    python -m examples.gsm8k.make_model --questions openai/gsm8k --to runs/gsm8k/base

`AutoModelForCausalLM.from_pretrained` and `lightrl` load the folder like a model from the hub. Fine-tune it (sft.yaml)
before reinforcement learning (grpo.yaml).
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from lightrl.data.rows import read_rows

PAD, TURN_START, TURN_END = "<|pad|>", "<|im_start|>", "<|im_end|>"
CALCULATOR_NOTES = r"<<.*?>>"  # GSM8K's answers contain notes such as `<<48/2=24>>`; sft.yaml removes them too
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer(texts: Iterable[str], *, vocab_size: int) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer with a ChatML template; each digit is one token, to help with arithmetic."""
    tokenizer = Tokenizer(models.BPE())
    words = Regex(r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=TURN_END, additional_special_tokens=[TURN_START]
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def make_model(
    tokenizer: PreTrainedTokenizerFast, *, hidden_size: int, num_layers: int, context_tokens: int, seed: int
) -> Qwen3ForCausalLM:
    """Makes a Qwen3 with random weights and tied embeddings."""
    num_heads = max(1, hidden_size // 32)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 3,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=max(1, num_heads // 2),
        head_dim=32,
        max_position_embeddings=context_tokens,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model


def texts_of(source: str) -> Iterator[str]:
    for row in read_rows(source, name="main"):
        yield str(row["question"])
        yield re.sub(CALCULATOR_NOTES, "", str(row["answer"]))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", required=True, help="GSM8K's train split: a local file, or openai/gsm8k")
    parser.add_argument("--to", required=True, type=Path, help="the folder to write")
    parser.add_argument("--vocab-size", type=int, default=1024)
    parser.add_argument("--hidden-size", type=int, default=128, help="a multiple of 32")
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--context-tokens", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    tokenizer = make_tokenizer(texts_of(options.questions), vocab_size=options.vocab_size)
    model = make_model(
        tokenizer,
        hidden_size=options.hidden_size,
        num_layers=options.num_layers,
        context_tokens=options.context_tokens,
        seed=options.seed,
    )
    tokenizer.save_pretrained(options.to)
    model.save_pretrained(options.to)
    print(f"{model.num_parameters() / 1e6:.2f} M parameters, {len(tokenizer)} tokens -> {options.to}")


if __name__ == "__main__":
    main()
