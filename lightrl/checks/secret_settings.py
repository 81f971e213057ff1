"""Finds secrets in settings by their names and by a few patterns, and removes them from files that a run shares.

When in doubt, it removes a setting: a leak is worse. It judges unknown kinds of keys, like `chosen_key`, by the value.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

_WORDS = "pass(w(or)?ds?|phrase)?|pwd|auth(orization)?|bearer|jwt|dsn|(secret|credential|cookie)s?"
_OWNERS = "api|access|secret|private|auth|bearer|refresh|session|server|admin|client|encryption|signing|ssh|license"
_SERVICES = "hub|hf|wandb|openai|anthropic|aws|azure|google|github|gitlab"
# A variable is secret if part of its name is one of these words: AWS_ACCESS_KEY_ID, SSH_AUTH_SOCK, but not NUM_TOKENS.
_VARIABLE = re.compile(rf"(?!pwd$|(max|min|num)_(.*_)?tokens?$)(.*_)?({_WORDS}|(api|access)?(key|token)s?)(_.*)?")
# A setting is secret if its name ends with one of these words: hf_token, but neither token_file nor max_new_tokens.
_SETTING = re.compile(rf"(key|token|(.*_)?(({_OWNERS}|{_SERVICES})_?(key|token)s?|{_WORDS}))(_?\d+)?")
_BY_VALUE = re.compile(r".*_(key|token)(_?\d+)?=(?=.*\d)[\w.~+/=-]{16,}")  # acme_key=..., not chosen_key=chosen
_PLACEHOLDER = re.compile(r"(Bearer )?\{(env:)?\w+\}")  # filled in during the run
_USER = re.compile(r"(?<=://)[^\s/?#@:{}'\"]*:[^\s/?#{}'\"]*@|(?<=http://|ttps://)[^\s/?#{}'\"]+@")  # in a URL
_ARGUMENT = re.compile(r"([\w.-]+) *[:=] *(\S.*)")  # an argument or a header


def is_secret(name: str, value: str = "") -> bool:
    """Whether a setting, header or environment variable is secret, judging by its value and the end of its name."""
    name = re.sub(r"-|(?<=[a-z])(?=[A-Z])", "_", name.rpartition(".")[2].lstrip("-"))
    pattern, lower = _VARIABLE if name.isupper() else _SETTING, name.lower()  # variables are in capitals
    match = pattern.fullmatch(lower) or _BY_VALUE.fullmatch(f"{lower}={value}")
    return match is not None and not _PLACEHOLDER.fullmatch(value)


def without_secrets(settings: Any, instead: str | None = None) -> Any:
    """Returns a copy of the settings without secrets, or with `instead` in their place, at any depth.

    Also removes users and passwords from URLs, and secret headers (`Authorization: ...`) and arguments (`--api-key`,
    `...`) from lists. Keeps numbers and placeholders (`{api_key}`).
    """
    if isinstance(settings, Namespace):
        return type(settings)(**without_secrets(vars(settings), instead))
    if isinstance(settings, Mapping):
        texts = {name: str(value) for name, value in settings.items() if not isinstance(value, int | float | None)}
        hidden = {name for name in texts if is_secret(str(name), texts[name])}
        public = {name: instead if name in hidden else without_secrets(settings[name], instead) for name in settings}
        # Remove the name as well: null is invalid in a mapping whose values must be strings.
        return {name: value for name, value in public.items() if name not in hidden or instead is not None}
    if isinstance(settings, list | tuple):
        words = [item if isinstance(item, str) else "" for item in settings]
        arguments = enumerate(map(_ARGUMENT.fullmatch, words))
        secret = {n for n, argument in arguments if argument and is_secret(*argument.groups())}
        for n, (flag, value) in enumerate(pairwise(words)):
            if flag.startswith("-") and value[:1] not in ("", "-") and is_secret(flag, value):
                secret |= {n, n + 1}
        items = [instead if n in secret else without_secrets(item, instead) for n, item in enumerate(settings)]
        return type(settings)(item for n, item in enumerate(items) if n not in secret or instead is not None)
    return _USER.sub("", settings) if type(settings) is str else settings
