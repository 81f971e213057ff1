"""The border of user code, which raises anything: rewards, chat templates, tools, modules named in a configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def user_code(translate: Callable[[BaseException], Exception], *unchanged: type[Exception]) -> Iterator[None]:
    """What is raised inside leaves as the error that `translate` makes of it.

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
