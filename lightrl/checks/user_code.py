"""The border of user code, which raises anything: rewards, chat templates, tools, modules named in a configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from lightrl.errors import LightRLError, RolloutError


@contextmanager
def user_code(translate: Callable[[BaseException], Exception], *unchanged: type[Exception]) -> Iterator[None]:
    """Replaces each error raised inside by the one that `translate` makes of it.

    Args:
        translate: gets the exception; SystemExit too, but no cancellation and no Ctrl-C.
        unchanged: exceptions that leave as they are.
    """
    try:
        yield
    except unchanged:
        raise
    except (Exception, SystemExit) as error:  # user code raises anything
        raise translate(error) from error


def named_user_code(
    name: str, *, on: str = "", error_type: type[LightRLError] = RolloutError
) -> AbstractContextManager[None]:
    """Replaces each error raised inside, but for ours, by an `error_type` that names the code and `on` what it ran."""
    return user_code(lambda error: error_type(f"{name} raised {error!r}{on and f' on {on}'}."), LightRLError)
