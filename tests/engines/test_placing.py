"""Which devices an engine gets beside a trainer, before anything starts."""

from typing import Any

import pytest
import torch

from lightrl.engines import FakeEngine, LocalEngine, SGLangEngine
from lightrl.engines.servers.processes.command import gpus_of_servers, visible

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("num", "trainer", "placement", "expected"),
    [(2, [0, 1], "separate", [2, 3]), (2, [2], "separate", [0, 1]), (1, [2, 3], "colocated", [2])],
    ids=["next to the trainer's", "around them", "on the trainer's"],
)
def test_servers_get_gpus_that_fit_their_placement(num: int, trainer: Any, placement: Any, expected: Any):
    assert gpus_of_servers(num, available=4, trainer=trainer, placement=placement) == expected


def test_servers_without_a_gpu_on_the_machine_are_given_none() -> None:
    assert gpus_of_servers(2, available=0, trainer=[], placement="separate") is None


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ("separate", r"need 3 GPUs .* besides the trainer's \[0, 1\], but there are only 2 of 4.*to colocated"),
        ("colocated", r"need 3 GPUs .* of the trainer, but there are only 2 of 4.*to separate"),
    ],
)
def test_gpus_that_do_not_suffice_are_refused(placement: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gpus_of_servers(3, available=4, trainer=[0, 1], placement=placement)


def test_a_server_gets_the_device_names_that_this_process_got(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-a,7")
    assert visible([1, 2]) == ["GPU-a", "7"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible([1, 2]) == ["1", "2"]


def test_a_local_engine_decodes_on_the_trainers_gpu_unless_device_is_set(caplog: pytest.LogCaptureFixture) -> None:
    assert LocalEngine().place([CPU]) == "on cpu"
    assert LocalEngine().place([GPU]) == "on cuda:1"
    assert LocalEngine(device="cpu").place([GPU]) == "on cpu"
    assert LocalEngine().place([torch.device("mps")]) == "on cpu"
    assert "its sampler needs float64, which mps lacks" in caplog.text


def test_the_place_of_servers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert FakeEngine().place([CPU]) == ""
    assert SGLangEngine(urls=["http://host:1"]).place([GPU]) == "on servers that run elsewhere"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert SGLangEngine(servers=2).place([CPU]) == "2 servers with tp=1 on the CPU, separate"
    planned = SGLangEngine(servers=1).place([GPU])
    assert planned == "1 server with tp=1 on GPUs, of which this machine has none, separate"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    text = SGLangEngine(servers=1, tp=2).place([torch.device("cuda", 0), GPU])
    assert text == "1 server with tp=2 on cuda:2, cuda:3, separate"
