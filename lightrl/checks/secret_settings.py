"""Names of secrets, and settings without their values: a run's files are shared, its environment is not."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

_WORDS = "token|key|api_?keys?|(api|auth|access|secret)_(key|token)s|secrets?|passw(or)?ds?|passphrase|pass"
_WORDS += "|credentials?|auth|authorization|cookies?"
# A variable's name, any part of it: AWS_ACCESS_KEY_ID, SSH_AUTH_SOCK; but NUM_TOKENS
_VARIABLE = re.compile(rf"(?!(max|min|num)_(.*_)?tokens?$)(.*_)?({_WORDS}|keys|tokens)(_.*)?")
# A setting's name, only its end: api_key, but api_key_variable, max_new_tokens; and not what a tokenizer calls a token
# or a row of the data a key: eos_token, prompt_key
_TOKENS = "is|per|bos|eos|pad|unk|sep|cls|mask|start|stop|end|image|video|audio"
_KEYS = "prompt|input|output|answer|label|target|text|message|messages|image|images|reward|sort|group|column|dict"
_SETTING = re.compile(rf"(?!(.*_)?(({_TOKENS})_token|({_KEYS})_key)$)(.*_)?({_WORDS})(_?\d+)?")
_PLACEHOLDER = re.compile(r"(Bearer )?\{\w+\}")  # filled while the run runs


def is_secret(name: str) -> bool:
    """Whether a setting, a header or a variable holds a secret, by the last part of its dotted name."""
    name = re.sub(r"-|(?<=[a-z])(?=[A-Z])", "_", name.rpartition(".")[2])
    return (_VARIABLE if name.isupper() else _SETTING).fullmatch(name.lower()) is not None


def without_secrets(settings: Any, instead: str | None = None) -> Any:
    """A copy of settings that leaves out secrets at any depth; placeholders such as `{api_key}` and numbers stay.

    A secret is left out with its name: where a mapping must hold text, null would make the settings invalid.

    Args:
        settings: sections, lists and values.
        instead: value for each secret in place of leaving it out.
    """
    if isinstance(settings, Mapping | Namespace):
        public: dict[Any, Any] = {}
        for name, value in (settings if isinstance(settings, Mapping) else vars(settings)).items():
            if not is_secret(str(name)) or _is_public(value):
                public[name] = without_secrets(value, instead)
            elif instead is not None:
                public[name] = instead
        return type(settings)(**public) if isinstance(settings, Namespace) else public
    if isinstance(settings, list | tuple):
        values = [without_secrets(value, instead) for value in settings]
        return tuple(values) if isinstance(settings, tuple) else values
    return settings


def _is_public(value: object) -> bool:
    is_placeholder = isinstance(value, str) and _PLACEHOLDER.fullmatch(value) is not None
    return value is None or isinstance(value, int | float) or is_placeholder
