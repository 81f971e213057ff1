"""VersionProbe on tiny models that Adam trains in float32 and an engine serves: no false alarm, each old version found.

N = 62 tokens; the engine is a LocalEngine, and its faults are what it would score with the weights of another version.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from lightrl import LocalEngine
from lightrl.callbacks.probe import probe_sequences
from lightrl.callbacks.version_probe import MIN_CHANGED, SentSample, VersionProbe, as_row
from lightrl.weights import bucketed

Syncs = list[tuple[Tensor, Tensor, SentSample]]  # the trainer's scores, the engine's, what was sent


@functools.cache
def healthy(dtype: str, lr: float, num: int, hidden: int = 16, init: float = 0.2) -> Syncs:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3", vocab_size=8, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=1, head_dim=8,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64, initializer_range=init,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    sequences = probe_sequences(8, num=2, num_tokens=32)
    engine = LocalEngine(threads=1, dtype=dtype)
    engine.start(config)
    syncs: Syncs = []

    def logprobs(ids: Tensor) -> Tensor:
        return model(ids).logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]

    for version in range(num + 1):
        sent = SentSample()
        engine.load_weights(sent.watch(bucketed(model.named_parameters(), 2**20)), weight_version=version)
        with torch.no_grad():
            trainer = logprobs(torch.tensor(sequences)).flatten().double()
        syncs.append((trainer, as_row(engine.score(sequences)["engine"]), sent))
        (-(logprobs(torch.randint(8, (4, 16))) * torch.randn(4, 1)).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.close()
    return syncs


def judged(syncs: Syncs, dtype: str, engine: list[Tensor] | None = None) -> list[Any]:
    probe = VersionProbe()
    return [
        probe.judge(
            version, trainer, score if engine is None else engine[version], sent,
            trainer_eps=2**-23, engine_dtype=getattr(torch, dtype),
        )
        for version, (trainer, score, sent) in enumerate(syncs)
    ]  # fmt: skip


def first_problem(verdicts: list[Any]) -> tuple[int, str]:
    return next((version, verdict.problem) for version, verdict in enumerate(verdicts) if verdict.problem)


CASES = [("bfloat16", 1e-5, 400), ("bfloat16", 1e-3, 200), ("float16", 1e-6, 200), ("float32", 1e-6, 200)]


@pytest.mark.parametrize(("dtype", "lr", "num"), CASES)
def test_a_thousand_healthy_syncs_raise_no_false_alarm(dtype: str, lr: float, num: int) -> None:
    verdicts = judged(healthy(dtype, lr, num), dtype)
    assert not [verdict.problem for verdict in verdicts if verdict.problem]
    if dtype == "float32":
        assert all(verdict.has_version for verdict in verdicts[1:])


@pytest.mark.parametrize(("dtype", "lr", "num"), CASES)
def test_an_ignored_update_is_found_once_enough_weights_have_changed(dtype: str, lr: float, num: int) -> None:
    syncs = healthy(dtype, lr, num)
    sent = [sample for _, _, sample in syncs]
    enough = next(
        version for version in range(1, num + 1)
        if sent[version].num_changed(sent[0], getattr(torch, dtype)) >= MIN_CHANGED
    )  # fmt: skip
    version, problem = first_problem(judged(syncs, dtype, [syncs[0][1]] * len(syncs)))
    assert version == enough
    assert "are those of version 0" in problem


def test_a_bfloat16_engine_that_ignores_updates_of_lr_1e_6_is_found_in_the_first_sync() -> None:
    syncs = healthy("bfloat16", 1e-6, 4, 64, 0.02)  # 22,000 parameters
    assert first_problem(judged(syncs, "bfloat16", [syncs[0][1]] * len(syncs)))[0] <= 2


@pytest.mark.parametrize("behind", [1, 2])
def test_an_engine_that_is_behind_from_the_middle_on_is_found_at_once(behind: int) -> None:
    syncs = healthy("float32", 1e-6, 200)
    engine = [syncs[version if version < 50 else version - behind][1] for version in range(len(syncs))]
    version, problem = first_problem(judged(syncs, "float32", engine))
    assert version == 50
    assert f"are those of version {50 - behind}" in problem


def test_an_update_applied_twice_is_found() -> None:
    syncs = healthy("float32", 1e-6, 200)
    engine = [syncs[0][1], 2 * syncs[1][1] - syncs[0][1]]
    assert first_problem(judged(syncs[:2], "float32", engine)) == (
        1,
        "of the change since version 0 its scores show 200%",
    )


def test_where_the_trainer_does_not_move_nothing_is_decided() -> None:
    syncs = healthy("float32", 1e-6, 200)
    assert [(verdict.has_version, verdict.problem) for verdict in judged([syncs[0]] * 3, "float32")] == [
        (False, "")
    ] * 3


def test_the_sample_of_what_was_sent_is_a_copy() -> None:
    weight = torch.zeros(64, 64)
    first, second = SentSample(), SentSample()
    list(first.watch(bucketed([("weight", weight)], 2**20)))
    weight += 1
    list(second.watch(bucketed([("weight", weight)], 2**20)))
    assert second.num_changed(first, torch.bfloat16) == pytest.approx(64 * 64)
