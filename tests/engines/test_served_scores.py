"""A teacher or a reward model behind a server: the fake one over a real model gives what a forward here gives."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_sglang.process import FakeServerProcess
from real_servers import own_server
from tiny import random_experience, tiny_spec
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from lightrl import GRPO, PPO, Distillation, ModelSpec, Sampling
from lightrl.commands.plan import plan_text
from lightrl.engines.sglang.scoring import ServedRewards, ServedScores
from lightrl.errors import EngineError
from lightrl.experience import Experience
from lightrl.loops.score import score
from lightrl.models.model_folder import save_model
from lightrl.module import RLModule
from lightrl.strategies import LogprobSettings, ShardedExperience, SingleModel


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServerProcess]:
    folder = tmp_path_factory.mktemp("teacher")
    tiny_spec(seed=1).load_model().save_pretrained(folder)
    with FakeServerProcess(str(folder)) as started:
        yield started


def model_scores(module: RLModule, experience: Experience) -> ShardedExperience:
    """The experience with what the module's models say of it, those here and those behind servers."""
    module.configure_model()
    module.parallel_models = {
        name: SingleModel(getattr(module, name), LogprobSettings())
        for name, role in module.models().items()
        if role.spec.url is None
    }
    return score(module, experience)


def scored(teacher: ModelSpec, experience: Experience, **settings: Any) -> Experience:
    module = Distillation(tiny_spec(), teacher=teacher, sampling=Sampling(max_new_tokens=8), **settings)
    return model_scores(module, experience).local


def as_trees(experience: Experience) -> Experience:
    """Each trajectory's third token follows its first."""
    gaps = torch.zeros_like(experience.token_ids)
    gaps[:, 2] = 1
    return experience.with_tensors({"gaps": gaps})


@pytest.mark.parametrize("is_tree", [False, True], ids=["one conversation", "trees"])
@pytest.mark.parametrize("topk", [None, 5], ids=["sampled tokens", "likeliest tokens"])
def test_a_teacher_behind_a_server_says_what_it_says_here(
    topk: int | None, is_tree: bool, server: FakeServerProcess
) -> None:
    experience = random_experience(num_turns=2)
    if is_tree:
        experience = as_trees(experience)
    found = scored(ModelSpec(url=server.url), experience, teacher_topk=topk)
    expected = scored(tiny_spec(seed=1), experience, teacher_topk=topk)
    assert bool(found["teacher_logprobs"][experience.loss_mask].all())
    torch.testing.assert_close(found["teacher_logprobs"], expected["teacher_logprobs"], rtol=0, atol=1e-5)
    if topk is not None:
        assert found["teacher_topk_ids"].shape == (*experience.token_ids.shape, topk)
        assert torch.equal(found["teacher_topk_ids"], expected["teacher_topk_ids"])
        name = "teacher_topk_logprobs"
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-5)


def test_more_top_tokens_than_a_server_gives_or_outside_the_vocabulary_are_refused(server: FakeServerProcess) -> None:
    with pytest.raises(EngineError, match="Lower teacher_topk"):
        ServedScores(server.url, topk=100)(random_experience(), [])
    with pytest.raises(EngineError, match=r"returned a token id of .* has the policy's vocabulary"):
        ServedScores(server.url, topk=5, vocab_size=3)(random_experience(), [])


@pytest.mark.parametrize("head", ["vocabulary", "scalar"])
def test_what_no_loss_can_use_is_refused(head: Any, tmp_path: Path) -> None:
    model = tiny_spec(seed=1, head=head).load_model()
    torch.nn.init.constant_(model.base_model.norm.weight, 3e38)  # finite, but its products are not
    save_model(model, tmp_path)
    ask: Any = ServedScores if head == "vocabulary" else ServedRewards
    flags = {"is_embedding": True} if head == "scalar" else {}
    message = "a logprob of nan, which no loss can use" if head == "vocabulary" else r"the reward (nan|inf|-inf)\."
    with FakeServerProcess(str(tmp_path), **flags) as broken, pytest.raises(EngineError, match=f"returned {message}"):
        ask(broken.url)(random_experience(), [])


@pytest.fixture(scope="module")
def reward_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("reward")
    model = tiny_spec(seed=1, head="scalar").load_model()
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(3))
    save_model(model, folder)
    return str(folder)


@pytest.fixture(scope="module")
def scorer(reward_folder: str) -> Iterator[FakeServerProcess]:
    with FakeServerProcess(reward_folder, is_embedding=True) as started:
        yield started


def rewards(reward_model: str | ModelSpec, experience: Experience) -> Tensor:
    module = GRPO(tiny_spec(), reward_model=reward_model, group_size=3, sampling=Sampling(temperature=0.7))
    return model_scores(module, experience).rewards


def test_a_reward_model_behind_a_server_says_what_it_says_here(scorer: FakeServerProcess, reward_folder: str) -> None:
    experience = random_experience(is_scored=False, num_groups=7)  # 21 trajectories are more than one request has
    found = rewards(ModelSpec(url=scorer.url), experience)
    torch.testing.assert_close(found, rewards(reward_folder, experience), rtol=0, atol=1e-5)
    assert float((found - experience.rewards).std()) > 0.1
    assert scorer.stats()["requests"]["/classify"] == 2
    trees = as_trees(random_experience(is_scored=False, num_turns=2))
    found = rewards(ModelSpec(url=scorer.url), trees)
    torch.testing.assert_close(found, rewards(reward_folder, trees), rtol=0, atol=1e-5)


def test_a_reward_model_is_asked_again_where_the_connection_is_lost(scorer: FakeServerProcess) -> None:
    experience = random_experience()
    expected = ServedRewards(scorer.url)(experience, [])
    scorer.fault("drop", "/classify")
    assert torch.equal(ServedRewards(scorer.url)(experience, []), expected)


def test_a_language_model_is_refused_as_a_reward_model_with_the_mend(server: FakeServerProcess) -> None:
    with pytest.raises(EngineError, match="add `--is-embedding`"):
        ServedRewards(server.url)(random_experience(), [])


def test_a_head_of_several_numbers_is_no_reward_model(tmp_path: Path) -> None:
    config = tiny_spec().load_config()
    config.num_labels = 3
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    with (
        FakeServerProcess(str(tmp_path), is_embedding=True) as server,
        pytest.raises(EngineError, match="3 numbers instead of 1"),
    ):
        ServedRewards(server.url)(random_experience(), [])


FOR_SCORES = {"skip_tokenizer_init": True, "max_total_tokens": 2048}


@pytest.mark.extra
@pytest.mark.real_sglang
def test_a_real_server_says_what_a_teacher_says_here(tmp_path: Path) -> None:
    tiny_spec(seed=1).load_model().save_pretrained(tmp_path / "model")
    experience = random_experience(num_turns=2)
    below = experience.with_tensors({"token_ids": experience.token_ids.clamp(max=15)})
    with own_server(tmp_path, tmp_path / "model", **FOR_SCORES) as server:
        served = ModelSpec(url=server["url"])
        plain, found = (scored(served, below, teacher_topk=topk) for topk in (None, 5))
        with pytest.raises(EngineError, match="the logprob of token 0 instead of token 16"):
            scored(served, experience)  # the last id: SGLang's own limit
    expected = scored(tiny_spec(seed=1), below, teacher_topk=5)
    assert torch.equal(found["teacher_topk_ids"], expected["teacher_topk_ids"])
    for name in ("teacher_logprobs", "teacher_topk_logprobs"):
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-4)
    torch.testing.assert_close(plain["teacher_logprobs"], expected["teacher_logprobs"], rtol=0, atol=1e-4)


@pytest.mark.extra
@pytest.mark.real_sglang
def test_a_real_server_says_what_a_reward_model_says_here(reward_folder: str, tmp_path: Path) -> None:
    experience = random_experience(is_scored=False, num_groups=7)
    with own_server(tmp_path, Path(reward_folder), is_embedding=True, **FOR_SCORES) as server:
        found = rewards(ModelSpec(url=server["url"]), experience)
    torch.testing.assert_close(found, rewards(reward_folder, experience), rtol=0, atol=1e-4)


def test_the_token_of_the_environment_is_sent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tiny_spec(seed=1).load_model().save_pretrained(tmp_path)
    with FakeServerProcess(str(tmp_path), api_key="open sesame") as server:
        with pytest.raises(EngineError, match="401"):
            ServedScores(server.url)(random_experience(), [])
        monkeypatch.setenv("LIGHTRL_SERVER_TOKEN", "open sesame")
        assert bool(ServedScores(server.url)(random_experience(), []).any())


@pytest.mark.parametrize(
    ("make", "name", "line"),
    [
        (lambda served: Distillation(tiny_spec(), teacher=served), "teacher", "teacher_logprobs"),
        (lambda served: GRPO(tiny_spec(), reward_model=served, num_minibatches=2), "reward_model", "reward_model"),
    ],
    ids=["teacher", "reward model"],
)
def test_the_plan_names_the_server_whose_model_the_run_does_not_have(make: Any, name: str, line: str) -> None:
    module = make(ModelSpec(url="http://rewards:30000"))
    module.configure_model()
    text = plan_text(module, module.data_flow())
    assert "http://rewards:30000" in text
    assert any(found.startswith(f"  {line}  ") and "server" in found.split() for found in text.splitlines())
    assert "teacher_topk" not in text
    module.on_save_checkpoint({"state_dict": module.state_dict()})
    assert not hasattr(module, name)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda spec: replace(spec, path="here"), "A model needs exactly one of path"),
        (
            lambda spec: PPO(tiny_spec(), reward=len, critic=spec).data_flow(),
            "The critic must have a path or config, got url=",
        ),
        (lambda spec: GRPO(spec, reward=len), "policy must have a path or config, because it is trained here, got"),
        (lambda spec: spec.load_model(), "needs path or config, got url="),
        (
            lambda spec: Distillation(tiny_spec(), teacher=spec, sampling=Sampling(temperature=0.7)).data_flow(),
            "computes logprobs at temperature 1",
        ),
        (
            lambda spec: Distillation(tiny_spec(), teacher=spec, sampling=Sampling(top_p=0.9)).data_flow(),
            r"top_p 1 and top_k -1, got 1, 0, 0\.9 and -1",
        ),
    ],
    ids=["two sources", "a critic", "the policy", "loading", "another temperature", "truncated draws"],
)
def test_what_a_server_cannot_be_is_refused(make: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make(ModelSpec(url="http://teacher:30000"))
