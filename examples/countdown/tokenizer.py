"""The countdown example's tokenizer: one token per character."""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def tokenizer() -> PreTrainedTokenizerFast:
    texts = ["<pad>", "<eos>", "<unk>", *"0123456789+-*/ =:"]
    backend = Tokenizer(models.WordLevel({text: index for index, text in enumerate(texts)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
