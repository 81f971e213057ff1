"""Attention over packed rows: each trajectory alone, by every kernel, and nothing of size T × T."""

import functools
import logging
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from tiny import LargestTensor, random_experience, tiny_model
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from lightrl.experience import Experience
from lightrl.models import Outputs
from lightrl.strategies import FSDP2Strategy, LogprobSettings, SingleModel, fsdp2
from lightrl.strategies.layouts import packed_attention
from lightrl.strategies.layouts.packed_attention import PackedRows, arguments, attend, blocks, kernel_for, make_packable

CPU = torch.device("cpu")


def dense_mask(rows: PackedRows, window: int | None) -> Tensor:
    """bool [T, K]: a part's tokens see the keys before them, its prompt's among them."""
    masks = []
    for queries, keys in zip(rows.starts.diff().tolist(), rows.key_starts.diff().tolist(), strict=True):
        away = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
        masks.append((away >= 0) & (away < (window or keys)))
    return torch.block_diag(*masks).bool()


def reference(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    """[1, heads, T, D] and twice [1, heads, K, D] -> [1, T, heads, D], by a dense mask [T, K]."""
    times = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    scores = (query @ key.transpose(2, 3) * 0.3).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def heads(num_tokens: int, num_keys: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((4, num_tokens), *[(2, num_tokens if num_keys is None else num_keys)] * 2)
    made = [torch.randn(1, num, tokens, 8, generator=generator).requires_grad_() for num, tokens in sizes]
    return made[0], made[1], made[2]


def ends_of(tokens: Tensor, starts: Tensor, key_starts: Tensor) -> tuple[Tensor, Tensor]:
    """A token's own key, and the first of its trajectory: both end together."""
    after = torch.searchsorted(starts, tokens, right=True)
    return key_starts[after] - starts[after] + tokens, key_starts[after - 1]


def fake_varlen(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
    """torch 2.11's, by a dense mask."""
    assert cu_seq_q.dtype == torch.int32
    assert torch.compiler.is_compiling() or [max_q, max_k] == [cu_seq_q.diff().max(), cu_seq_k.diff().max()]
    assert window_size[1] == 0  # causal
    own, lowest = ends_of(torch.arange(len(query)), cu_seq_q, cu_seq_k)
    places = torch.arange(len(key))
    seen = (places >= lowest[:, None]) & (places <= own[:, None])
    if window_size[0] >= 0:
        seen &= own[:, None] - places <= window_size[0]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    tensors = (tensor.transpose(0, 1)[None] for tensor in (query * (scale / 0.3), key, value))
    return reference(*tensors, seen)[0] + 0 * max_q


def fake_grouped_varlen(*inputs, enable_gqa=False, **options):
    """torch 2.13's."""
    assert enable_gqa == (inputs[0].shape[1] != inputs[1].shape[1])
    return fake_varlen(*inputs, **options)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kernel", ["flash", "flash of groups", "flex", "sdpa"])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("parents", [None, (-1, -1, 0, -1, 3, 4, 3)], ids=["apart", "of a tree"])
def test_each_kernel_keeps_trajectories_apart(
    kernel: str, window: int | None, parents: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    varlen = fake_grouped_varlen if kernel == "flash of groups" else fake_varlen
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen)
    monkeypatch.setattr(packed_attention, "_compiled_flex", lambda: flex_attention)  # its reference; needs no compiler
    lengths = [100, 0, 1, 130, 30, 29, 31]
    rows = PackedRows(lengths, CPU, parents=parents)
    inputs = heads(sum(lengths), int(rows.key_starts[-1]))
    if kernel == "flex":  # forward only: torch 2.13 has no backward of it on a CPU
        inputs = tuple(tensor.detach() for tensor in inputs)
    expected = reference(*inputs, dense_mask(rows, window))
    actual = packed_attention.KERNELS[kernel.split()[0]](*inputs, rows, 0.3, window)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    if kernel == "flex":
        return
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    gradients = [torch.autograd.grad((output * weights).sum(), inputs) for output in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def test_a_completion_sees_the_keys_of_its_prompt_before_its_own() -> None:
    rows = PackedRows([2, 0, 1, 3, 2], CPU, parents=[-1, 0, 0, -1, 3])
    assert rows.keys.tolist() == [0, 1, 0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7]
    assert (rows.starts.tolist(), rows.key_starts.tolist()) == ([0, 2, 3, 6, 8], [0, 2, 5, 8, 13])
    chain = PackedRows([2, 0, 1, 3, 2], CPU, parents=[-1, 0, 0, 2, 2])
    assert chain.keys.tolist() == [0, 1, 0, 1, 2, 0, 1, 2, 3, 4, 5, 0, 1, 2, 6, 7]


@pytest.mark.parametrize("window", [None, 1, 100, 128, 300])
@pytest.mark.parametrize("parents", [None, (-1, 0, 0, -1, 3, 4)], ids=["apart", "of a tree"])
def test_the_blocks_of_flex_attention_are_those_of_a_dense_mask(
    window: int | None, parents: tuple[int, ...] | None
) -> None:
    rows = PackedRows([200, 300, 1, 12, 512, 60], CPU, parents=parents)
    mask = torch.nn.functional.pad(dense_mask(rows, window), (0, 128, 0, 128))  # torch asks beyond the end
    size = int(rows.starts[-1]), int(rows.key_starts[-1])
    dense = create_block_mask(lambda batch, head, query, key: mask[query, key], None, None, *size, device="cpu")
    (num_partial, partial), (num_full, full) = blocks(rows.starts, rows.key_starts, window)
    mine, theirs = (
        [
            [row[:count].tolist() for row, count in zip(indices[0, 0], numbers[0, 0].tolist(), strict=True)]
            for numbers, indices in parts
        ]
        for parts in (
            ((num_partial, partial), (num_full, full)),
            ((dense.kv_num_blocks, dense.kv_indices), (dense.full_kv_num_blocks, dense.full_kv_indices)),
        )
    )
    assert mine[1] == theirs[1]
    if parents is None:
        assert mine[0] == theirs[0]
    else:  # where a window ends between a prompt and its completion, a block that nobody sees may be among them
        assert all(set(some) <= set(more) for some, more in zip(theirs[0], mine[0], strict=True))


def outputs_and_gradient(
    form: Any, experience: Experience, *, compile_layers: bool | None = None, **changes: Any
) -> tuple[Tensor, Tensor]:
    model = tiny_model(**changes)
    single = SingleModel(model, LogprobSettings(), form=form, compile_layers=compile_layers)
    results: list[Tensor] = []

    def loss(part: Experience, outputs: Outputs) -> Tensor:
        results.append(outputs.logprobs.detach())
        return (outputs.logprobs * part.rewards[:, None] + outputs.entropy).sum()

    single.forward_backward([experience], loss, Tensor.backward)
    return results[0], torch.cat([item.grad.flatten() for item in model.parameters() if item.grad is not None])


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral with a window", "gemma3 hybrid"])
def test_packed_rows_give_the_numbers_of_rectangles(family: str) -> None:
    experience = random_experience()
    model = {"family": family, "dtype": torch.float64}
    packed, apart = (outputs_and_gradient(form, experience, **model) for form in ("packed", "rectangles"))
    torch.testing.assert_close(packed, apart, rtol=1e-6, atol=1e-6)  # gemma multiplies by a float32


@pytest.mark.parametrize(("num_prompt", "num_completion", "times"), [(40, 4, 1), (2, 30, 3)], ids=["once", "each time"])
def test_a_packed_row_has_each_prompt_once_where_that_saves_enough(
    num_prompt: int, num_completion: int, times: int
) -> None:
    model = tiny_model()
    single = SingleModel(model, LogprobSettings(), form="packed")
    made = random_experience(
        num_groups=2, group_size=3, prompt_tokens=(num_prompt,) * 2, completion_tokens=(num_completion,) * 2
    )
    num_tokens: list[int] = []
    model.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: num_tokens.append(inputs[0].numel())
    )
    list(single.forward([made]))
    assert num_tokens == [2 * times * num_prompt + 6 * (num_completion - 1)]


def test_no_tensor_of_a_packed_row_grows_with_its_square() -> None:
    experience = random_experience(num_groups=16, group_size=8)
    total = int(experience.lengths.sum())
    with LargestTensor() as largest:
        outputs_and_gradient("packed", experience)
    assert largest.num < total * total / 4


def test_the_first_kernel_that_works_is_taken_and_named_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> Tensor:
        raise RuntimeError("needs a newer GPU\nand more lines")

    class OutOfResources(Exception):
        """As Triton's, which is no RuntimeError."""

    def too_large(*args: Any) -> Tensor:
        raise OutOfResources("shared memory, required: 270336")

    def wrong(query: Tensor, *args: Any) -> Tensor:
        return query.transpose(1, 2) + sum(tensor.sum() for tensor in args[:2])

    kernels = {"flash": broken, "flash 2": too_large, "flex": wrong, "sdpa": packed_attention.KERNELS["sdpa"]}
    monkeypatch.setattr(packed_attention, "KERNELS", kernels)
    monkeypatch.setattr(packed_attention, "_is_tried_on", lambda device: True)
    kernel_for.cache_clear()
    with caplog.at_level(logging.DEBUG, "lightrl"):
        assert [kernel_for(CPU, torch.float32, 8, 8) for _ in range(2)] == ["sdpa", "sdpa"]
    kernel_for.cache_clear()
    (line,) = [record.message for record in caplog.records]
    assert line.startswith("attention of packed rows: sdpa, float32 on cpu (flash: needs a newer GPU; flash 2: OutOf")
    assert "OutOfResources: shared memory, required: 270336; flex: differs" in line
    assert caplog.records[0].levelname == "WARNING"


@pytest.mark.extra
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo reads it
def test_one_graph_serves_all_layers_and_microbatches_of_any_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", fake_grouped_varlen)
    monkeypatch.delitem(packed_attention.KERNELS, "flex")
    monkeypatch.setattr(packed_attention, "_is_tried_on", lambda device: True)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))  # needs no compiler
    torch.compiler.reset()
    counters.clear()
    kernel_for.cache_clear()
    for num_groups, completion_tokens in ((2, (3, 9)), (5, (2, 30)), (3, (7, 7)), (1, (1, 4))):
        experience = random_experience(num_groups=num_groups, completion_tokens=completion_tokens)
        apart, compiled = (
            outputs_and_gradient("packed", experience, compile_layers=compile_layers, num_hidden_layers=6)
            for compile_layers in (False, True)
        )
        torch.testing.assert_close(compiled, apart, rtol=1e-5, atol=1e-6)
    kernel_for.cache_clear()
    torch.compiler.reset()
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_layers_that_compute_in_bfloat16_are_packed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = packed_attention.KERNELS["sdpa"]

    def rounding_up(*given: Any) -> Tensor:
        """As a GPU's kernels round differently for other sizes."""
        output = plain(*given)
        return output.nextafter(torch.full_like(output, torch.inf))

    monkeypatch.setitem(packed_attention.KERNELS, "sdpa", rounding_up)
    monkeypatch.setattr(fsdp2, "fully_shard", lambda *_, **__: None)
    model, strategy = tiny_model(), FSDP2Strategy()
    strategy.parallel_devices = [CPU]
    strategy.precision_plugin = MixedPrecision("bf16-mixed", "cpu")
    strategy.shard(model)  # hidden states stay in float32
    assert SingleModel(model, LogprobSettings(), form="packed").packs_prefixes


def test_a_model_whose_attention_is_not_plain_is_not_packed() -> None:
    model = tiny_model("gemma2 with capped logits")
    assert not make_packable(model) or not SingleModel(model, LogprobSettings()).can_pack
    with pytest.raises(packed_attention.NotPackable, match="without s_aux"):
        attend(model, *heads(4), None, packed_rows=PackedRows([4], CPU), s_aux=torch.zeros(4))
    with pytest.raises(packed_attention.NotPackable, match="did not get the starts"):
        attend(model, *heads(4), packed_attention.no_mask(CPU))


def test_flash_attention_of_transformers_gets_the_starts_from_the_host() -> None:
    model = tiny_model()
    model.config._attn_implementation_internal = "flash_attention_2"
    told = arguments(model, PackedRows([3, 0, 2], CPU), with_states=False)
    assert told["cu_seq_lens_q"].tolist() == told["cu_seq_lens_k"].tolist() == [0, 3, 5]
    assert told["max_length_q"] == told["max_length_k"] == 3
