"""Runs under top-p and top-k: the trainer's logprobs are the engine's, also in minibatches."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from tiny_run import Digits, TinyGRPO, make_trainer, train

from lightrl import Experience, FakeEngine, RLCallback, Sampling
from lightrl.engines.engine import Completion
from lightrl.errors import EngineError
from lightrl.functional import Supports

SAMPLING = Sampling(max_new_tokens=6, top_p=0.9, top_k=6, temperature=0.8)  # of a vocabulary of 8


class Compare(RLCallback):
    """How far the trainer's logprobs are from the engine's in each iteration, whose tokens it sampled."""

    def __init__(self) -> None:
        self.differences: list[float] = []
        self.support_sizes: list[float] = []

    def on_experience_ready(self, trainer: Any, module: Any, experience: Experience) -> None:
        parts = experience.microbatch_rows(20)[1]
        for part, outputs in zip(parts, module.parallel_models["policy"].forward(parts), strict=True):
            difference = (outputs.logprobs - part.behavior_logprobs)[part.loss_mask]
            self.differences.append(float(difference.abs().max()))
            rows, columns = part.loss_mask[:, 1:].nonzero(as_tuple=True)
            made = Supports.at(part.row_codes("supports"), part.lengths, part.token_ids, rows, columns)
            self.support_sizes.append(len(made.ids) / len(rows))


def test_the_trainers_logprobs_are_the_engines(tmp_path: Path) -> None:
    compare = Compare()
    train(tmp_path, TinyGRPO(sampling=SAMPLING, num_minibatches=2, lr=0.1), callbacks=[compare])
    assert len(compare.differences) >= 3
    assert max(compare.differences) <= 1e-6
    assert min(compare.support_sizes) < 6  # top-p takes some tokens, top-k two of the 8
    assert max(compare.support_sizes) <= 6


class Forgetful(FakeEngine):
    """Does not tell what it drew from."""

    async def generate(self, *args: Any, **kwargs: Any) -> list[Completion]:
        return [dataclasses.replace(item, columns={}) for item in await super().generate(*args, **kwargs)]


def test_an_engine_without_supports_is_refused_under_truncation(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"returned no supports, but top_p=0\.9 and top_k=6 truncate"):
        make_trainer(tmp_path, engine=Forgetful(), max_steps=1).fit(TinyGRPO(sampling=SAMPLING), Digits())
    make_trainer(tmp_path, engine=FakeEngine(), max_steps=1).fit(TinyGRPO(sampling=SAMPLING), Digits())
