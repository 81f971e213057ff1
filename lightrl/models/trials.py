"""Caches trials of models on the meta device, which a search over layouts would otherwise repeat for each layout."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Trial = Callable[Concatenate[Any, Arguments], Result]


def once_per_config(trial: Trial[Arguments, Result]) -> Trial[Arguments, Result]:
    """Runs `trial(config, …)` once for equal arguments, then returns its result or raises its ValueError again."""
    results: dict[Any, Result | ValueError] = {}

    @functools.wraps(trial)
    def run_once(config: PretrainedConfig, /, *args: Arguments.args, **named: Arguments.kwargs) -> Result:
        key = (type(config), config.to_json_string(use_diff=False), args, *sorted(named.items()))
        if key not in results:
            try:
                results[key] = trial(config, *args, **named)
            except ValueError as error:
                results[key] = error
        if isinstance(result := results[key], ValueError):
            raise result.with_traceback(None)
        return result

    return run_once
