"""Spans by themselves; a traced run is in tests/callbacks/test_trace.py."""

from collections.abc import Iterator

import pytest

from lightrl.trace import Tape, in_microbatch_spans, set_tape, span


@pytest.fixture
def tape() -> Iterator[Tape]:
    tape = Tape()
    set_tape(tape)
    yield tape
    set_tape(None)


def test_a_span_measures_without_a_trace_and_is_kept_with_one(tape: Tape) -> None:
    with span("one", "step", tokens=3) as measured:
        measured.args["more"] = 1
    with pytest.raises(ValueError, match="wrong"), span("two", "step", "elsewhere"):
        raise ValueError("wrong")
    one, two = tape.take()
    assert (one.name, one.track, one.args) == ("one", "trainer", {"tokens": 3, "more": 1})
    assert one.end_ns - one.start_ns == pytest.approx(measured.seconds * 1e9)
    assert (two.track, two.args) == ("elsewhere", {"error": "ValueError"})
    set_tape(None)
    with span("three", "step") as measured:
        pass
    assert measured.seconds > 0
    assert tape.take() == []


def test_a_microbatch_leaves_forward_loss_and_backward(tape: Tape) -> None:
    loss, backward = in_microbatch_spans(lambda experience, outputs: 2.0, lambda value: None)
    for _ in range(2):
        backward(loss([1, 2, 3], None))
    events = tape.take()
    assert [event.name for event in events] == ["forward", "loss", "backward"] * 2
    assert events[0].args == {"trajectories": 3}
    assert events[3].start_ns == events[2].end_ns  # the second forward begins where the first backward ended
    set_tape(None)
    assert in_microbatch_spans(sum, print) == (sum, print)
