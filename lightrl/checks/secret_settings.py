"""Names of secrets, and settings without their values: a run's files are shared, its environment is not."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

_WORDS = "key|token|(api|access)_?(key|token)s?|pass(w(or)?ds?|phrase)?|auth(orization)?|(secret|credential|cookie)s?"
# Any part of a variable's name is one of these words: AWS_ACCESS_KEY_ID, SSH_AUTH_SOCK. NUM_TOKENS is no secret.
_VARIABLE = re.compile(rf"(?!(max|min|num)_(.*_)?tokens?$)(.*_)?({_WORDS}|keys|tokens)(_.*)?")
# The end of a setting's name is: hf_token, but neither token_file nor max_new_tokens, eos_token or prompt_key.
_TOKENS = "is|per|bos|eos|pad|unk|sep|cls|mask|start|stop|end|image|video|audio"
_KEYS = "prompt|input|output|answer|label|target|text|message|messages|image|images|reward|sort|group|column|dict"
_SETTING = re.compile(rf"(?!(.*_)?(({_TOKENS})_token|({_KEYS})_key)$)(.*_)?({_WORDS})(_?\d+)?")
_PLACEHOLDER = re.compile(r"(Bearer )?\{\w+\}")  # filled while the run runs


def is_secret(name: str) -> bool:
    """Whether a setting, a header or a variable holds a secret, by the last part of its dotted name."""
    name = re.sub(r"-|(?<=[a-z])(?=[A-Z])", "_", name.rpartition(".")[2])
    return (_VARIABLE if name.isupper() else _SETTING).fullmatch(name.lower()) is not None


def without_secrets(settings: Any, instead: str | None = None) -> Any:
    """A copy without secrets at any depth, or with `instead` for each; numbers and placeholders (`{api_key}`) stay."""
    if isinstance(settings, Namespace):
        return type(settings)(**without_secrets(vars(settings), instead))
    if isinstance(settings, Mapping):
        texts = {name: str(value) for name, value in settings.items() if not isinstance(value, int | float | None)}
        hidden = {name for name in texts if is_secret(str(name)) and not _PLACEHOLDER.fullmatch(texts[name])}
        public = {name: instead if name in hidden else without_secrets(settings[name], instead) for name in settings}
        # The name is left out too: null is invalid where a mapping must hold text.
        return {name: value for name, value in public.items() if name not in hidden or instead is not None}
    if isinstance(settings, list | tuple):
        return type(settings)(without_secrets(value, instead) for value in settings)
    return settings
