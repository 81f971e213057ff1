"""Attention over packed rows: each trajectory alone, by every kernel, and nothing of size T × T."""

import functools
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_scripts import ROUNDING, finished
from tiny import LargestTensor, random_experience, tiny_model
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from lightrl.experience import Experience
from lightrl.models import Outputs
from lightrl.strategies import LogprobSettings, SingleModel, packed_attention
from lightrl.strategies.packed_attention import PackedRows, arguments, attend, blocks, kernel_for, make_packable

CPU = torch.device("cpu")


def reference(query: Tensor, key: Tensor, value: Tensor, documents: Tensor, window: int | None) -> Tensor:
    """[1, heads, T, D] -> [1, T, heads, D], by a dense mask."""
    places = torch.arange(query.shape[2])
    seen = (documents[:, None] == documents) & (places[:, None] >= places)
    if window is not None:
        seen &= places[:, None] - places < window
    times = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    scores = (query @ key.transpose(2, 3) * 0.3).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def heads(num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(1, num, num_tokens, 8, generator=generator).requires_grad_() for num in (4, 2, 2)]
    return made[0], made[1], made[2]


def fake_varlen(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
    """torch 2.11's, by a dense mask."""
    assert cu_seq_q.dtype == torch.int32
    assert torch.compiler.is_compiling() or max_q == max_k == cu_seq_q.diff().max()
    assert window_size[1] == 0  # causal
    window = None if window_size[0] < 0 else window_size[0] + 1
    documents = torch.searchsorted(cu_seq_q, torch.arange(len(query)), right=True)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    tensors = (tensor.transpose(0, 1)[None] for tensor in (query * (scale / 0.3), key, value))
    return reference(*tensors, documents, window)[0] + 0 * max_q


def fake_grouped_varlen(*inputs, enable_gqa=False, **options):
    """torch 2.13's."""
    assert enable_gqa == (inputs[0].shape[1] != inputs[1].shape[1])
    return fake_varlen(*inputs, **options)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kernel", ["flash", "flash of groups", "flex", "sdpa"])
@pytest.mark.parametrize("window", [None, 40])
def test_each_kernel_keeps_trajectories_apart(kernel: str, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    varlen = fake_grouped_varlen if kernel == "flash of groups" else fake_varlen
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen)
    monkeypatch.setattr(packed_attention, "_compiled_flex", lambda: flex_attention)  # its reference; needs no compiler
    lengths = [100, 0, 1, 130, 30, 29, 31]
    inputs = heads(sum(lengths))
    if kernel == "flex":  # forward only: torch 2.13 has no backward of it on a CPU
        inputs = tuple(tensor.detach() for tensor in inputs)
    rows = PackedRows(lengths, CPU)
    documents = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    expected = reference(*inputs, documents, window)
    actual = packed_attention.KERNELS[kernel.split()[0]](*inputs, rows, 0.3, window)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    if kernel == "flex":
        return
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    gradients = [torch.autograd.grad((output * weights).sum(), inputs) for output in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("window", [None, 1, 100, 128, 300])
def test_the_blocks_of_flex_attention_are_those_of_a_dense_mask(window: int | None) -> None:
    lengths = [200, 300, 1, 12, 512, 60]
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    documents = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    documents = torch.nn.functional.pad(documents, (0, 128), value=-1)  # torch asks beyond the end

    def is_seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (query >= key) & (documents[query] == documents[key])
        return seen if window is None else seen & (query - key < window)

    dense = create_block_mask(is_seen, None, None, starts[-1], starts[-1], device="cpu")
    (num_partial, partial), (num_full, full) = blocks(starts, window)
    assert num_partial.equal(dense.kv_num_blocks)
    assert num_full.equal(dense.full_kv_num_blocks)
    for number, mine, theirs in ((num_partial, partial, dense.kv_indices), (num_full, full, dense.full_kv_indices)):
        for row, count in enumerate(number[0, 0].tolist()):
            assert mine[0, 0, row, :count].tolist() == theirs[0, 0, row, :count].tolist()


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


@pytest.mark.extra
def test_no_microbatch_makes_the_host_wait_for_the_device(tmp_path: Path) -> None:
    done = finished(Path(__file__).with_name("fake_device_run.py"), tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    actual = json.loads(done.stdout.splitlines()[-1])
    assert set(actual.pop("each kind")["waits"]) >= {"_local_scalar_dense", "nonzero", "copy to the host"}  # it counts
    offloaded = actual.pop("offloaded")
    assert offloaded["is_equal"]
    assert offloaded["places"] == ["cpu"]
    assert offloaded["copies"][0] == 0 < offloaded["copies"][1]
    assert len(actual) == 6
    for algorithm, one in actual.items():
        assert one["waits"] == {}, algorithm
        assert one["difference"] < ROUNDING, algorithm


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
    told = arguments(model, PackedRows([3, 0, 2], CPU))
    assert told["cu_seq_lens_q"].tolist() == told["cu_seq_lens_k"].tolist() == [0, 3, 5]
    assert told["max_length_q"] == told["max_length_k"] == 3
