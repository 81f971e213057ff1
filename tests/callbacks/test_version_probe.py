"""VersionProbe on tiny models that Adam trains in float32 and an engine serves: no false alarm, each old version found.

B = 2 sequences, N = 62 tokens; the engine is a LocalEngine, or the fake server's model with adapters beside it, and its
faults are what it would score with the weights of another version.
"""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import pytest
import torch
from fake_sglang.model import EmbeddedModel
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from lightrl import LocalEngine
from lightrl.callbacks.probe import probe_sequences
from lightrl.callbacks.version_probe import MIN_CHANGED, SentSample, VersionProbe, as_rows
from lightrl.models.lora import LoRA, is_adapter, peft_name
from lightrl.weights import bucketed
from lightrl.weights.shared_memory import payload_of

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
            trainer = logprobs(torch.tensor(sequences)).double()
        syncs.append((trainer, as_rows(engine.score(sequences)["engine"]), sent))
        (-(logprobs(torch.randint(8, (4, 16))) * torch.randn(4, 1)).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.close()
    return syncs


@functools.cache
def served(dtype: str, lr: float, num: int) -> Syncs:
    """As `healthy`, of adapters that a server keeps beside their base."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3", vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=8,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.1,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        server = EmbeddedModel(folder, dtype=dtype)
    LoRA(rank=2).add_to(model)
    adapters = {name: parameter for name, parameter in model.named_parameters() if is_adapter(name)}
    optimizer = torch.optim.AdamW(adapters.values(), lr=lr, weight_decay=0.0)
    sequences = probe_sequences(61, num=2, num_tokens=32)
    syncs: Syncs = []

    def logprobs(ids: Tensor) -> Tensor:
        return model(ids).logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]

    for _ in range(num + 1):
        sent = SentSample()
        list(sent.watch(bucketed(adapters.items(), 2**20)))
        payload = payload_of({peft_name(name): parameter.detach() for name, parameter in adapters.items()})
        server.load_adapter("policy", {"r": 2, "lora_alpha": 32}, payload, None, None)
        with torch.no_grad():
            trainer = logprobs(torch.tensor(sequences)).double()
        syncs.append((trainer, as_rows([server.score(row, "policy") for row in sequences]), sent))
        server.unload_adapter("policy")
        (-(logprobs(torch.randint(61, (4, 16))) * torch.randn(4, 1)).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    server._engine.close()
    return syncs


def judged(syncs: Syncs, dtype: str, engine: list[Tensor] | None = None, *, repeats: bool = False) -> list[Any]:
    probe = VersionProbe()
    return [
        probe.judge(
            version, trainer, score if engine is None else engine[version], sent,
            trainer_eps=2**-23, engine_dtype=getattr(torch, dtype), repeats=repeats,
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


def test_the_base_of_served_adapters_which_only_the_first_sync_sends_is_not_compared() -> None:
    adapter, base = ("layer.lora_A.default.weight", torch.zeros(2, 64)), ("layer.weight", torch.zeros(64, 64))
    first, second = SentSample(), SentSample()
    list(first.watch(bucketed([adapter, base], 2**20)))
    list(second.watch(bucketed([(adapter[0], adapter[1] + 1)], 2**20)))
    assert second.num_changed(first, torch.bfloat16) == 2 * 64


SERVED = [
    ("bfloat16", 1e-4), ("bfloat16", 1e-6), ("bfloat16", 1e-7), ("float16", 1e-5), ("float16", 1e-7), ("float32", 1e-7),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "lr"), SERVED)
def test_healthy_served_adapters_raise_no_false_alarm_even_where_their_answers_do_not_change(
    dtype: str, lr: float
) -> None:
    syncs = served(dtype, lr, 40)
    assert not [verdict.problem for verdict in judged(syncs, dtype, repeats=True) if verdict.problem]
    if (dtype, lr) == ("bfloat16", 1e-7):
        assert sum(torch.equal(syncs[v][1], syncs[v - 1][1]) for v in range(1, 41)) > 10


@pytest.mark.parametrize(("dtype", "lr"), [("bfloat16", 1e-4), ("float16", 1e-5)])
def test_old_adapters_under_a_new_name_are_found_by_their_unchanged_answer(dtype: str, lr: float) -> None:
    syncs = served(dtype, lr, 40)
    engine = [syncs[version if version != 30 else 29][1] for version in range(len(syncs))]
    version, problem = first_problem(judged(syncs, dtype, engine, repeats=True))
    assert version == 30
    assert "bit for bit those of version 29" in problem


UNCHANGED = [
    pytest.param({"num_steps": 3}, True, id="1 in C(68, 6), 9e-9"),
    pytest.param({"num_steps": 2}, False, id="1 in C(66, 4), 1.4e-6"),
    pytest.param({"num_steps": 4, "first": 2}, True, id="C(16, 8) in C(78, 8), 5e-7"),
    pytest.param({"num_steps": 3, "first": 2}, False, id="C(12, 6) in C(74, 6), 5e-6"),
    pytest.param({"num_steps": 3, "last_step": 0.1}, False, id="a smaller step, C(60, 6) in C(122, 6), 0.01"),
    pytest.param({"num_steps": 3, "last_step": 0.0}, False, id="no step"),
    pytest.param({"num_steps": 3, "num_parameters": MIN_CHANGED - 1}, False, id="too few parameters"),
    pytest.param({"num_steps": 3, "repeats": False}, False, id="an engine that does not repeat itself"),
]


@pytest.mark.parametrize(("settings", "is_fault"), UNCHANGED)
def test_an_unchanged_answer_is_a_fault_if_its_chance_is_below_one_in_a_million(
    settings: dict[str, Any], is_fault: bool
) -> None:
    verdicts = judged(steps(**settings), "float32", repeats=settings.get("repeats", True))
    assert [bool(verdict.problem) for verdict in verdicts] == [False] * (len(verdicts) - 1) + [is_fault]


def steps(
    num_steps: int, *, first: int = 1, last_step: float = 1.0, num_parameters: int = 2 * MIN_CHANGED, **_: Any
) -> Syncs:
    """Of 2 sequences of 31 tokens, from number `first` on, whose scores change in each step but the last."""
    syncs: Syncs = []
    for version in range(num_steps + 2):
        place = version if version <= num_steps else num_steps + last_step
        sent = SentSample()
        list(sent.watch(bucketed([("weight", torch.full((num_parameters,), place))], 2**20)))
        engine = torch.full((2, 31), -1.0, dtype=torch.float64)
        engine[:, first - 1 :] += 1e-9 * min(version, num_steps)
        syncs.append((torch.full((2, 31), -1.0 + 1e-9 * place, dtype=torch.float64), engine, sent))
    return syncs
