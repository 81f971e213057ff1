"""The command line parsed, and nothing built; or everything built, and nothing run."""

from typing import Any

from lightrl.commands.cli import LightRLCLI


class _ParsedError(Exception):
    pass


class _ParsingOnly(LightRLCLI):
    def before_instantiate_classes(self) -> None:
        raise _ParsedError(self.config)


class BuiltError(Exception):
    """Of a module and its trainer."""


class BuildingOnly(LightRLCLI):
    def before_fit(self) -> None:
        raise BuiltError(self.model, self.trainer)


def parsed(*args: str) -> Any:
    """The settings of `lightrl <args>`, the command's level left out."""
    try:
        _ParsingOnly(args)
    except _ParsedError as done:
        return done.args[0][args[0]]
    raise AssertionError("the command line was not parsed")
