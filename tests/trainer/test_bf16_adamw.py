"""Moments in bfloat16: rounding that is right on average, AdamW in float64, shards, checkpoints."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightrl.models.bf16_adamw import MOMENTS, BF16AdamW, random_bits, rounded


def whole_parameters() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in ((8, 5), (1, 4), (8, 3, 2), ())]


def updated(parameters: Any, optimizer: Any, steps: range, shard: Any = None) -> list[list[Tensor]]:
    """Each parameter and its moments after some steps, whose gradients are multiples of 1/64."""
    for step in steps:
        for index, parameter in enumerate(parameters):
            gradient = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step)).mul(64).round() / 64
            parameter.grad = shard(gradient, index) if shard else gradient
        optimizer.step()
    return [[item.detach(), *(optimizer.state[item][name] for name in MOMENTS)] for item in parameters]


def test_the_mean_over_all_noise_is_the_number_itself() -> None:
    noise = torch.arange(2**16, dtype=torch.int32)
    for power in (-44, -40, -38, -9, 0, 37):  # the first are subnormal
        for number in 10.0**power * torch.tensor([1.2345678, -7.6543210, 2.0]):
            values = rounded(number.expand(len(noise)).contiguous(), noise)
            assert values.dtype == torch.bfloat16
            assert values.double().mean() == number.double()
    special = torch.tensor([torch.nan, torch.inf, -torch.inf])
    special[0].view(torch.int32).fill_(0x7FFFFFFF)  # a GPU's NaN
    assert torch.equal(rounded(special, noise[-1:]).nan_to_num(7), special.bfloat16().nan_to_num(7))


def test_bits_are_a_hash_of_the_element_and_look_random() -> None:
    def slow(number: int) -> int:  # lowbias32, in Python's unbounded integers
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            number = (number ^ number >> shift) * factor % 2**32
        return number ^ number >> 16

    part = random_bits(torch.zeros(2, 3), (2**18, 1), (2**20, 2**15 + 3), 0xDEADBEEF).flatten().tolist()
    indices = [row * (2**15 + 3) + column for row in (2**18, 2**18 + 1) for column in (1, 2, 3)]
    assert [bits % 2**32 for bits in part] == [slow(index % 2**32 ^ 0xDEADBEEF) for index in indices]
    draws = [random_bits(torch.zeros(2**18), (0,), (2**18,), key) for key in (1, 2, 0x80000000)]
    halves = torch.stack([half.double() for bits in draws for half in (bits & 0xFFFF, bits >> 16 & 0xFFFF)])
    halves = (halves - (2**16 - 1) / 2) / (2**16 / 12**0.5)  # mean 0 and variance 1, if uniform
    products = torch.cat([halves, torch.ones(1, 2**18)]) @ halves.T / 2**18  # of moments, of steps, and the mean
    assert (products - torch.eye(7, 6)).abs().max() < 5 / 2**9


def test_moments_follow_float64_where_rounding_to_nearest_stalls() -> None:
    num, kinds = 4096, (torch.float32, torch.bfloat16, torch.float64)
    parameters = [torch.nn.Parameter(torch.zeros(num, dtype=dtype)) for dtype in kinds]
    optimizers = [kind([item]) for kind, item in zip((BF16AdamW, *2 * [torch.optim.AdamW]), parameters, strict=True)]
    for size in (1.0, 0.1):
        for _ in range(1500):
            for optimizer, item in zip(optimizers, parameters, strict=True):
                item.grad = torch.full_like(item, size)
                optimizer.step()
        states = [optimizer.state[item] for optimizer, item in zip(optimizers, parameters, strict=True)]
        ours, stalled, exact = (state["exp_avg_sq"].double() for state in states)
        assert abs((ours / exact).mean() - 1) < 5 * 0.09 / num**0.5
        assert (ours / exact).std() < 0.09
        assert abs(stalled / exact - 1).min() > 0.3
    assert abs((states[0]["exp_avg"].double() / states[2]["exp_avg"]).mean() - 1) < 5 * 0.01 / num**0.5


def test_an_update_uses_moments_before_rounding_and_a_checkpoint_continues_bit_for_bit() -> None:
    whole, cut, others = whole_parameters(), whole_parameters(), whole_parameters()
    settings: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    adamw, (first, second) = torch.optim.AdamW(others, **settings), [BF16AdamW(cut, **settings) for _ in range(2)]
    for ours, theirs in zip(updated(cut, first, range(1)), updated(others, adamw, range(1)), strict=True):
        torch.testing.assert_close(ours[0], theirs[0], rtol=1e-6, atol=1e-7)
        for moment, exact in zip(ours[1:], theirs[1:], strict=True):
            assert 2 * moment.nbytes == exact.nbytes
            assert ((moment - exact).abs() <= 2**-7 * exact.abs()).all()
    adamw.load_state_dict(first.state_dict())  # in float32
    second.load_state_dict(adamw.state_dict())
    expected = updated(whole, BF16AdamW(whole, **settings), range(3))
    for one, other in zip(updated(cut, second, range(1, 3)), expected, strict=True):
        assert all(map(torch.equal, one, other))


def test_copies_of_a_parameter_stay_equal_as_two_stages_copies_of_tied_embeddings_must() -> None:
    copies = [torch.nn.Parameter(torch.ones(8, 5)) for _ in range(2)]
    groups = [{"params": copies[:1]}, {"params": [torch.nn.Parameter(torch.ones(3)), copies[1]]}]
    optimizer = BF16AdamW(groups)
    for step in range(5):
        for copy in copies:
            copy.grad = torch.randn(8, 5, generator=torch.Generator().manual_seed(step))
        optimizer.step()
    assert torch.equal(*copies)


@pytest.mark.parametrize("setting", ["amsgrad", "maximize"])
def test_a_state_of_another_algorithm_is_refused(setting: str) -> None:
    other = torch.optim.AdamW(whole_parameters(), **{setting: True})
    with pytest.raises(ValueError, match="has no amsgrad and no maximize"):
        BF16AdamW(whole_parameters()).load_state_dict(other.state_dict())


def test_a_rank_rounds_its_rows_as_one_process_rounds_them(request: pytest.FixtureRequest) -> None:
    (*whole, _), last = whole_parameters(), 3  # torch caches offsets, so one process can be one rank only
    dist.init_process_group("fake", store=FakeStore(), rank=last, world_size=4)
    request.addfinalizer(dist.destroy_process_group)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))

    def shard(tensor: Tensor, index: int) -> Any:
        """Shards with replicas, one of them empty; the experts are divided before FSDP2 shards them."""
        place = (mesh["inner"], [Shard(0)]) if index == 2 else (mesh, [Replicate(), Shard(0)])
        block: Any = torch.nn.Module()
        block.weight = torch.nn.Parameter(distribute_tensor(tensor.detach(), *place, src_data_rank=None))
        return (fully_shard(block, mesh=mesh["outer"]) if index == 2 else block).weight.detach()

    parts = [torch.nn.Parameter(shard(item, index)) for index, item in enumerate(whole)]
    exact = {"betas": (0.5, 0.75)}  # no processor rounds moments of such gradients in float32
    found = updated(parts, BF16AdamW(parts, **exact), range(3), shard)
    for items, others, start in zip(found, updated(whole, BF16AdamW(whole, **exact), range(3)), (4, 1, 6), strict=True):
        (weights, *moments), (expected, *rows) = (item.to_local() for item in items), (item[start:] for item in others)
        torch.testing.assert_close(weights, expected, rtol=1e-6, atol=1e-7)
        assert all(map(torch.equal, moments, rows))
