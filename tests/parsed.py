"""The command line parsed, and nothing built."""

from typing import Any

from lightrl.commands.cli import LightRLCLI


class _ParsedError(Exception):
    pass


class _ParsingOnly(LightRLCLI):
    def before_instantiate_classes(self) -> None:
        raise _ParsedError(self.config)


def parsed(*args: str) -> Any:
    """The settings of `lightrl <args>`, the command's level left out."""
    try:
        _ParsingOnly(args)
    except _ParsedError as done:
        return done.args[0][args[0]]
    raise AssertionError("the command line was not parsed")
