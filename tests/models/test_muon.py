"""Muon beside AdamW: torch's two optimizers by themselves, two ranks, and a run that resumes."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_scripts import left_by, run
from tiny import tiny_model, tiny_spec
from torch import Tensor

from lightrl import GRPO
from lightrl.models.muon import MuonWithAdamW

SETTINGS: dict[str, Any] = {"lr": 0.02, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def make_optimizer(model: torch.nn.Module) -> MuonWithAdamW:
    return MuonWithAdamW(model, [{"params": list(model.parameters())}], **SETTINGS)


def gradients_of(model: Any, step: int, share: Callable[..., Tensor] = lambda parameter, whole: whole) -> None:
    """Gives each parameter a random gradient of this step."""
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = share(parameter, torch.randn(parameter.shape, generator=generator))


def updated(model: Any, optimizer: Any, num: int, share: Any = lambda parameter, whole: whole) -> dict[str, Tensor]:
    """The whole weights after `num` updates."""
    for step in range(num):
        gradients_of(model, step, share)
        optimizer.step()
    whole = {name: getattr(item, "full_tensor", lambda item=item: item)() for name, item in model.named_parameters()}
    return {name: item.detach().clone() for name, item in whole.items()}


def by_torch(num: int) -> dict[str, Tensor]:
    """torch.optim.Muon for the matrices of the layers, torch.optim.AdamW for the rest."""
    model = tiny_model()
    matrices = [item for name, item in model.named_parameters() if "layers" in name and item.dim() == 2]
    rest = [item for item in model.parameters() if all(item is not other for other in matrices)]
    shared = {"lr": SETTINGS["lr"], "weight_decay": SETTINGS["weight_decay"]}
    optimizers = [
        torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **shared),
        torch.optim.AdamW(rest, **SETTINGS),
    ]
    for step in range(num):
        gradients_of(model, step)
        for optimizer in optimizers:
            optimizer.step()
    return {name: item.detach() for name, item in model.named_parameters()}


def test_matrices_of_layers_follow_muon_and_the_rest_adamw(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model()
    with caplog.at_level(logging.INFO):
        optimizer = make_optimizer(model)
    (line,) = caplog.messages
    assert line.startswith("Muon updates 14 matrices")  # seven in each of two layers
    assert "model.embed_tokens.weight" in line
    torch.testing.assert_close(updated(model, optimizer, 3), by_torch(3), rtol=1e-5, atol=1e-7)


def test_the_log_counts_fused_experts_among_what_adamw_updates(caplog: pytest.LogCaptureFixture) -> None:
    module = torch.nn.Linear(4, 3, bias=False)
    module.experts = torch.nn.Parameter(torch.zeros(2, 4, 3))  # [E, out, in]
    with caplog.at_level(logging.INFO):
        make_optimizer(module)
    assert "1 matrices (12 parameters), AdamW the other 24, 24 of them in fused experts: experts." in caplog.text


def test_a_resumed_optimizer_continues_bit_for_bit_with_the_saved_rates() -> None:
    whole, cut = tiny_model(), tiny_model()
    optimizer, first = make_optimizer(whole), make_optimizer(cut)
    for item in (optimizer, first):
        item.param_groups[0]["lr"] = 0.001  # a schedule's
    updated(whole, optimizer, 3)
    updated(cut, first, 2)
    second = make_optimizer(cut)
    second.load_state_dict(first.state_dict())
    assert second.param_groups[0]["lr"] == 0.001
    gradients_of(cut, 2)
    second.step()
    for one, other in zip(whole.parameters(), cut.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.extra
@pytest.mark.slow
def test_two_ranks_with_shards_update_whole_matrices_and_resume(tmp_path: Path) -> None:
    run(Path(__file__).with_name("muon_run.py"), tmp_path)
    alone = tiny_model()
    optimizer = make_optimizer(alone)
    expected = {"second": updated(alone, optimizer, 2)}
    gradients_of(alone, 2)
    optimizer.step()
    expected["third"] = {name: item.detach() for name, item in alone.named_parameters()}
    for rank in left_by(2, tmp_path):
        for what, weights in expected.items():
            torch.testing.assert_close(rank[what], weights, rtol=1e-6, atol=1e-7)


def test_the_setting_chooses_the_optimizer_and_others_are_refused() -> None:
    module = GRPO(tiny_spec(), reward=len, optimizer="muon", lr=0.01)
    module.configure_model()
    optimizer = module.configure_optimizers()
    assert isinstance(optimizer, MuonWithAdamW)
    assert {group["lr"] for group in optimizer.param_groups} == {0.01}
    assert type(GRPO(tiny_spec(), reward=len).optimizer) is str
    with pytest.raises(ValueError, match="optimizer must be adamw or muon, got 'lion'"):
        GRPO(tiny_spec(), reward=len, optimizer="lion")
    with pytest.raises(ValueError, match="found no trained matrix besides embeddings and heads"):
        make_optimizer(torch.nn.Embedding(3, 2))
