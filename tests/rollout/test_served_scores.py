"""A teacher behind a server: the fake one over a real model gives what the trainer's own forward gives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import random_experience, tiny_spec
from torch import Tensor

from lightrl import GRPO, Distillation, ModelSpec, Sampling
from lightrl.errors import EngineError
from lightrl.experience import Experience
from lightrl.loops.score import score
from lightrl.plan import plan_text
from lightrl.rollout import FakeServerProcess
from lightrl.rollout.sglang.scoring import ServedScores
from lightrl.strategies import LogprobSettings, SingleModel


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServerProcess]:
    folder = tmp_path_factory.mktemp("teacher")
    tiny_spec(seed=1).load_model().save_pretrained(folder)
    with FakeServerProcess(str(folder)) as started:
        yield started


def teacher_logprobs(teacher: ModelSpec, experience: Experience) -> Tensor:
    module = Distillation(tiny_spec(), teacher=teacher, sampling=Sampling(max_new_tokens=8))
    module.configure_model()
    settings = LogprobSettings()
    module.parallel_models = {
        role: SingleModel(getattr(module, role), settings) for role, spec in module.models().items() if spec.url is None
    }
    return score(module, experience)["teacher_logprobs"]


def test_a_teacher_behind_a_server_says_what_it_says_here(server: FakeServerProcess) -> None:
    experience = random_experience()
    found = teacher_logprobs(ModelSpec(url=server.url), experience)
    expected = teacher_logprobs(tiny_spec(seed=1), experience)
    assert bool(found[experience.loss_mask].all())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_the_token_of_the_environment_is_sent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tiny_spec(seed=1).load_model().save_pretrained(tmp_path)
    with FakeServerProcess(str(tmp_path), api_key="open sesame") as server:
        with pytest.raises(EngineError, match="401"):
            ServedScores(server.url)(random_experience(), [])
        monkeypatch.setenv("LIGHTRL_SERVER_TOKEN", "open sesame")
        assert bool(ServedScores(server.url)(random_experience(), []).any())


def test_the_plan_names_the_server_and_a_checkpoint_leaves_its_model_out() -> None:
    module = Distillation(tiny_spec(), teacher=ModelSpec(url="http://teacher:30000"))
    module.configure_model()
    text = plan_text(module, module.data_flow())
    assert "http://teacher:30000" in text
    assert next(line for line in text.splitlines() if line.startswith("  teacher_logprobs")).split()[1] == "server"
    checkpoint: dict[str, Any] = {"state_dict": module.state_dict()}
    module.on_save_checkpoint(checkpoint)
    assert not hasattr(module, "teacher")


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda spec: replace(spec, path="here"), "expected exactly one of them"),
        (lambda spec: replace(spec, head="scalar"), "a server is asked for logprobs only"),
        (lambda spec: GRPO(tiny_spec(), reward=len, reward_model=spec), "a server is asked for logprobs only"),
        (lambda spec: GRPO(spec, reward=len), "policy has url"),
        (lambda spec: spec.load_model(), "Give its path"),
        (
            lambda spec: Distillation(tiny_spec(), teacher=spec, sampling=Sampling(temperature=0.7)).data_flow(),
            "scores tokens at temperature 1",
        ),
    ],
    ids=["two sources", "a scalar head", "a reward model", "the policy", "loading", "another temperature"],
)
def test_what_a_server_cannot_be_is_refused(make: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make(ModelSpec(url="http://teacher:30000"))
