"""Moments in bfloat16: rounding that is right on average, AdamW in float64, four ranks, and a run that resumes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_scripts import left_by, run
from torch import Tensor

from lightrl.models.bf16_adamw import MOMENTS, BF16AdamW, random_bits, rounded

NUM_STEPS = 3
SHAPES: dict[str, tuple[int, ...]] = {"matrix": (8, 5), "row": (1, 4), "number": (), "experts": (8, 3, 2)}


def whole_parameters() -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def gradient_of(parameter: Tensor, step: int) -> Tensor:
    return torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))


def rows_of(rank: int) -> dict[str, Any]:
    """The rows of each parameter on this rank of four."""
    outer, inner = divmod(rank, 2)
    experts = 4 * inner + 2 * outer
    rows = {"matrix": slice(4 * inner, 4 * inner + 4), "row": slice(inner, 1), "number": ...}
    return {**rows, "experts": slice(experts, experts + 2)}


def updated(parameters: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        for parameter in parameters:
            parameter.grad = gradient_of(parameter, step).to(parameter.dtype)
        optimizer.step()


def test_the_mean_over_all_noise_is_the_number_itself() -> None:
    noise = torch.arange(2**16, dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    scales = [10.0**power for power in (-44, -40, -38, -9, 0, 9, 37)]  # the first are subnormal
    for number in torch.cat([scale * torch.randn(4, generator=generator) for scale in scales]):
        values = rounded(number.expand(len(noise)).contiguous(), noise)
        assert values.dtype == torch.bfloat16
        assert values.double().mean() == number.double()
        assert len(values.unique()) <= 2
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, 1.5])
    special[0].view(torch.int32).fill_(0x7FFFFFFF)  # a GPU's NaN
    assert torch.equal(rounded(special, noise[-1:]).isnan(), special.isnan())
    assert torch.equal(rounded(special, noise[-1:])[1:], special[1:].bfloat16())


def test_bits_are_a_hash_of_the_element_and_look_random() -> None:
    def slow(number: int) -> int:  # lowbias32, in Python's unbounded integers
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            number = (number ^ number >> shift) * factor % 2**32
        return number ^ number >> 16

    key, whole = 0xDEADBEEF, random_bits(torch.zeros(7, 5), (0, 0), (7, 5), 0xDEADBEEF)
    assert [number % 2**32 for number in whole.flatten().tolist()] == [slow(index ^ key) for index in range(35)]
    part = random_bits(torch.zeros(2, 3), (4, 1), (7, 5), key)
    assert torch.equal(part, whole[4:6, 1:4])
    assert random_bits(torch.zeros(1, 1), (2**18, 9), (2**20, 2**15), key).item() % 2**32 == slow(
        key ^ 2**33 % 2**32 + 9
    )
    num = 2**18
    draws = [random_bits(torch.zeros(num), (0,), (num,), key) for key in (1, 2, 0x80000000)]
    halves = torch.stack([half.double() for bits in draws for half in (bits & 0xFFFF, bits >> 16 & 0xFFFF)])
    halves = (halves - (2**16 - 1) / 2) / (2**16 / 12**0.5)  # mean 0 and variance 1, if uniform
    assert halves.mean(1).abs().max() < 5 / num**0.5
    products = halves @ halves.T / num  # of both moments, and of three steps
    assert (products - torch.eye(6)).abs().max() < 5 / num**0.5
    assert (halves[:, 1:] * halves[:, :-1]).mean(1).abs().max() < 5 / num**0.5  # of neighbors


@pytest.mark.parametrize("sizes", [(1.0, 1.0), (1.0, 0.1)], ids=["rises", "falls"])
def test_moments_follow_float64_where_rounding_to_nearest_stalls(sizes: tuple[float, float]) -> None:
    num, steps = 4096, 1500
    many, nearest = torch.nn.Parameter(torch.zeros(num)), torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    exact = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizers = [BF16AdamW([many]), torch.optim.AdamW([nearest]), torch.optim.AdamW([exact])]
    for size in sizes:
        for _ in range(steps):
            for optimizer in optimizers:
                (parameter,) = optimizer.param_groups[0]["params"]
                parameter.grad = torch.full_like(parameter, size)
                optimizer.step()
    (ours, stalled, true) = (next(iter(optimizer.state.values()))["exp_avg_sq"].double() for optimizer in optimizers)
    assert abs(ours.mean() / true - 1) < 5 * 0.09 / num**0.5
    assert ours.std() < 0.09 * true
    assert abs(stalled / true - 1) > 0.4
    first = optimizers[0].state[many]["exp_avg"].double()
    assert abs(first.mean() / optimizers[2].state[exact]["exp_avg"] - 1) < 5 * 0.01 / num**0.5
    assert (many.detach().double().mean() / exact.detach() - 1).abs() < 0.01


def test_updates_are_adamws_up_to_the_rounding_of_moments_that_take_half() -> None:
    ours, theirs = list(whole_parameters().values()), list(whole_parameters().values())
    settings: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    optimizer, other = BF16AdamW([{"params": ours, "lr": 0.02}], **settings), torch.optim.AdamW(theirs, **settings)
    other.param_groups[0]["lr"] = 0.02
    updated(ours, optimizer, range(1))
    updated(theirs, other, range(1))
    for one, another in zip(ours, theirs, strict=True):  # the step uses the moments before they are rounded
        torch.testing.assert_close(one, another, rtol=1e-6, atol=1e-7)
        for name in MOMENTS:
            moment, exact = optimizer.state[one][name], other.state[another][name]
            assert 2 * moment.nbytes == exact.nbytes
            assert ((moment - exact).abs() <= 2**-7 * exact.abs()).all()


def test_a_checkpoint_continues_bit_for_bit_and_fits_adamw_too() -> None:
    whole, cut = list(whole_parameters().values()), list(whole_parameters().values())
    updated(whole, BF16AdamW(whole), range(4))
    first, second = BF16AdamW(cut), BF16AdamW(cut)
    updated(cut, first, range(2))
    adamw = torch.optim.AdamW(cut)
    adamw.load_state_dict(first.state_dict())
    second.load_state_dict(adamw.state_dict())
    for item in cut:
        for name in MOMENTS:
            assert adamw.state[item][name].dtype == torch.float32
            assert second.state[item][name].dtype == torch.bfloat16
            assert torch.equal(second.state[item][name], first.state[item][name])
    updated(cut, second, range(2, 4))
    assert all(map(torch.equal, whole, cut))


def test_a_parameter_without_gradient_stays_and_a_wrong_setting_is_refused() -> None:
    moved, kept = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = BF16AdamW([moved, kept])

    def closure() -> Tensor:
        loss = (moved**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 2
    assert (moved < 1).all()
    assert torch.equal(kept, torch.ones(2))
    assert kept not in optimizer.state
    with pytest.raises(ValueError, match="Invalid beta parameter at index 1"):
        BF16AdamW([moved], betas=(0.9, 1.0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run(Path(__file__).with_name("bf16_adamw_run.py"), path := tmp_path_factory.mktemp("bf16"))
    return path


def test_ranks_round_their_rows_as_one_process_rounds_them(folder: Path) -> None:
    parameters = whole_parameters()
    optimizer = BF16AdamW(parameters.values())
    updated(list(parameters.values()), optimizer, range(NUM_STEPS))
    ranks = left_by(4, folder / "sharded")
    for name, parameter in parameters.items():
        whole = [parameter.detach(), *(optimizer.state[parameter][key] for key in MOMENTS)]
        for rank, local in enumerate(ranks):
            for one, item in zip(local[name], whole, strict=True):
                assert torch.equal(one, item[rows_of(rank)[name]])
    assert {len(local["row"][0]) for local in ranks} == {0, 1}


def test_an_offloaded_run_that_resumes_without_offload_is_the_same_bit_for_bit(folder: Path) -> None:
    for whole, resumed in left_by(2, folder):
        assert (whole["num_trained"], resumed["num_trained"]) == (4, 2)
        moments = {name: item for name, item in whole["tensors"].items() if name.endswith(MOMENTS)}
        assert moments
        assert all(item.dtype == torch.bfloat16 and item.any() for item in moments.values())
        assert whole["tensors"].keys() == resumed["tensors"].keys()
        for name, item in whole["tensors"].items():
            assert torch.equal(resumed["tensors"][name], item), name
