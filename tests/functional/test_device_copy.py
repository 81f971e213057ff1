"""What the host remembers of its copies to a device."""

import pytest
import torch

from lightrl.functional import on_host, to_device

DEVICE = torch.device("meta")  # has no values, so what is read is what the host remembers


def test_a_copy_is_read_from_what_it_was_made_of() -> None:
    assert on_host(to_device(torch.arange(3), DEVICE)).tolist() == [0, 1, 2]


@pytest.mark.parametrize("is_device_changed", [True, False])
def test_a_change_on_either_side_is_not_overlooked(is_device_changed: bool) -> None:
    source = torch.arange(3)
    sent = to_device(source, DEVICE)
    (sent if is_device_changed else source).add_(1)
    with pytest.raises(NotImplementedError):  # reads the device
        on_host(sent)


def test_tensors_of_inference_mode_are_copied_but_not_remembered() -> None:
    with torch.inference_mode():
        source = torch.arange(3)
        sent = to_device(source, DEVICE)
    for copy in (sent, to_device(source, DEVICE)):
        assert copy.shape == (3,)
        with pytest.raises(NotImplementedError):
            on_host(copy)
