"""The command line parsed, and nothing built; or everything built, and nothing run."""

from typing import Any

import pytest

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


def printed_config(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """What `lightrl <args> --print_config` prints."""
    with pytest.raises(SystemExit) as done:
        parsed(*args, "--print_config")
    assert done.value.code == 0
    return capsys.readouterr().out
