"""call_all: every step of an end, whatever the others raise, and no error hides another."""

from __future__ import annotations

import logging
from collections.abc import Callable

log = logging.getLogger(__name__)


def call_all(*steps: Callable[[], object]) -> None:
    """Calls all steps in order, then raises the first error; further ones are logged.

    An ExitStack inside another one drops the error during which it ends: only the last one would be reported.
    """
    first: BaseException | None = None
    for step in steps:
        try:
            step()
        except BaseException as error:  # the steps after it must run; it is raised below
            if first is None:
                first = error
            else:
                log.error("Another step of the end failed too.", exc_info=error)
    if first is not None:
        raise first
