"""A tokenizer with one token per byte."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def byte_tokenizer(*special: str, **settings: object) -> PreTrainedTokenizerFast:
    """Special tokens, then a token per byte; `settings` are transformers', such as `eos_token`."""
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **settings)
