from __future__ import annotations

from pathlib import Path

import pytest
from tiny import tiny_spec

from lightrl.algorithms import GRPO, PPO, AdaptiveKL, Distillation
from lightrl.commands.plan import plan_mermaid, plan_text, run
from lightrl.models import Role, RoleMesh

ROOT = Path(__file__).parents[2]


def test_the_drawing_has_every_call_and_the_keys_between_them() -> None:
    module = PPO(tiny_spec(), reward=len, reference=AdaptiveKL(0.1, tiny_spec()))
    drawn = plan_mermaid(module.data_flow())
    assert drawn.splitlines()[0] == "flowchart LR"
    assert '  reference_logprobs["reference_logprobs<br/>reference on trainer"]' in drawn
    assert '  generate -- "token_ids" --> values' in drawn
    assert '  advantages -- "returns" --> critic_update' in drawn


def test_the_text_says_roles_and_where_calls_run() -> None:
    text = plan_text(module := PPO(tiny_spec(), reward=len, lr=0.5), module.data_flow())
    assert "  critic         random qwen3: trained, lr 0.5, one number per position" in text
    assert "  reward         reward processes" in text
    assert "reference" not in text


def test_a_critic_that_warms_up_first_hides_no_update() -> None:
    graph = PPO(tiny_spec(), reward=len, critic_warmup_iterations=10).data_flow()
    assert [call.name for call in graph.of_kind("train")] == ["policy_update", "critic_update"]


def test_a_moving_reference_is_not_called_frozen() -> None:
    fixed, moving = (
        PPO(tiny_spec(), reward=len, reference=AdaptiveKL(0.1, tiny_spec(), decay=decay)) for decay in (None, 0.9)
    )
    assert "  reference      random qwen3: frozen" in plan_text(fixed, fixed.data_flow())
    assert "  reference      random qwen3: follows the policy" in plan_text(moving, moving.data_flow())


def test_the_text_says_which_ranks_a_role_has() -> None:
    critic = Role(tiny_spec(), mesh=RoleMesh(4, 2, tp=2))
    text = plan_text(module := PPO(tiny_spec(), reward=len, critic=critic), module.data_flow())
    assert "one number per position, ranks 4 to 5, tp 2" in text


def test_a_teachers_likeliest_tokens_are_keys_of_the_plan() -> None:
    module = Distillation(tiny_spec(), teacher=tiny_spec(seed=1), teacher_topk=8)
    text = plan_text(module, module.data_flow())
    assert "-> teacher_logprobs, teacher_topk_ids, teacher_topk_logprobs" in text
    assert '-- "teacher_logprobs, teacher_topk_ids, teacher_topk_logprobs" --> policy_update' in plan_mermaid(
        module.data_flow()
    )
    plain = Distillation(tiny_spec(), teacher=tiny_spec(seed=1))
    assert "teacher_topk" not in plan_text(plain, plain.data_flow())


def test_settings_prune_the_graph() -> None:
    plain = GRPO(tiny_spec(), reward=len)
    assert [call.name for call in plain.data_flow().calls] == ["generate", "reward", "advantages", "policy_update"]
    assert [call.name for call in plain.data_flow(from_file=True).calls] == ["advantages", "policy_update"]


def test_the_command_prints_the_plan_of_an_example(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert run(["--config", "examples/ppo/sync.yaml"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("PPO: 6 calls per iteration")
    text, _, drawn = out.partition("\n\ndrawing: paste what follows into https://mermaid.live")
    assert "flowchart" not in text
    assert drawn.splitlines()[2] == "flowchart LR"
    assert "flowchart LR" in out


def test_a_run_from_a_trajectory_file_generates_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    recorded = ["--data", "TrajectoryDataModule", "--data.path", "runs/quickstart/trajectories"]
    assert run(["--config", "examples/quickstart/grpo.yaml", *recorded]) == 0
    out = capsys.readouterr().out
    assert "policy_update" in out
    assert "generate" not in out
