"""After each test of the trainer nothing of it runs any more."""

from collections.abc import Iterator

import pytest
from tiny_run import our_threads


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert our_threads() == []
