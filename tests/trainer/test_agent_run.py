"""GRPO on an agent that talks to the policy through the openai client, from the trainer's door."""

import gc
import socket
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from tiny_run import GROUP_SIZE, Digits, TinyGRPO, make_trainer, train
from waits import comes_true

from lightrl import Prompt, Trajectory, TrajectoryLog
from lightrl.workflows import AgentWorkflow

TEMPLATE = "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"
base_urls: list[str] = []


async def two_requests(prompt: Prompt, base_url: str, api_key: str) -> float:
    """Asks with `0`, then with `1` behind the answer; the reward is the share of the digit 5 in the answers."""
    base_urls.append(base_url)
    http_client = DefaultAsyncHttpxClient(verify=False)
    messages: list[Any] = []
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client) as client:
        for question in "01":
            messages.append({"role": "user", "content": question})
            answer = await client.chat.completions.create(model="policy", messages=messages)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    said = " ".join(message["content"] for message in messages[1::2]).split()
    return said.count("5") / max(1, len(said))


class AgentRun(TinyGRPO):
    def __init__(self, agent: Any) -> None:
        super().__init__(workflow=lambda tokenizer: AgentWorkflow(tokenizer, agent, max_tokens=32))
        self.rewarded: list[Trajectory] = []

    def reward(self, trajectory: Trajectory) -> Any:
        self.rewarded.append(trajectory)
        return sum(trajectory.rewards)


@pytest.fixture(autouse=True)
def _no_port_is_left() -> Any:
    base_urls.clear()
    yield
    gc.collect()  # an unclosed connection would warn here
    for port in {urlsplit(base_url).port or 0 for base_url in base_urls}:
        with socket.socket() as tried:
            assert tried.connect_ex(("127.0.0.1", port)) != 0


def test_two_iterations_train_on_both_turns_of_the_agent_and_stamp_the_version_of_each(tmp_path: Path) -> None:
    module = AgentRun(two_requests)
    make_trainer(tmp_path, max_steps=2, limit_val_batches=1).fit(module, datamodule=Digits(chat_template=TEMPLATE))
    assert [len(experience) for experience in module.experiences] == [2 * GROUP_SIZE, 2 * GROUP_SIZE]
    for version, experience in enumerate(module.experiences):
        assert set(experience.weight_versions[experience.loss_mask].tolist()) == {version}
        assert experience.loss_mask.any(dim=1).all()
    for trajectory in module.rewarded:
        assert trajectory.metrics["turns"] == 2
        assert trajectory.token_ids[0] == 2
    # On-policy in the first update: what the engine said about the tokens is what the trainer says.
    assert module.trainer.callback_metrics["policy/kl_behavior_nats"].abs() < 1e-5


PROGRAM = """
import json, os, sys, urllib.request

body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": sys.stdin.read()}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
answer = urllib.request.urlopen(
    urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
)
print(os.environ["SERVICE_KEY"])
open("answer.txt", "w").write(json.load(answer)["choices"][0]["message"]["content"])
"""


class ProgramRun(TinyGRPO):
    """Its reward reads what the program left."""

    def __init__(self) -> None:
        def workflow(tokenizer: Any) -> AgentWorkflow:
            environment = {"SERVICE_KEY": "{env:LIGHTRL_TEST_KEY}"}
            command = [sys.executable, "-c", PROGRAM]
            return AgentWorkflow(tokenizer, command=command, environment=environment, max_tokens=32)

        super().__init__(workflow=workflow, group_size=2)
        self.workspaces: list[Path] = []

    def reward(self, trajectory: Trajectory) -> float:
        self.workspaces.append(Path(trajectory.workspace))
        answer = (self.workspaces[-1] / "answer.txt").read_text()
        assert answer == trajectory.completion
        return answer.count("5") / 6


@pytest.mark.extra
def test_a_program_is_trained_by_what_it_leaves_in_its_folder_which_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTRL_TEST_KEY", "sk-0123456789abcdef")
    module = ProgramRun()
    log = TrajectoryLog()
    train(tmp_path, module, Digits(chat_template=TEMPLATE), max_steps=2, limit_val_batches=0, callbacks=[log])
    texts = [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
    assert any(b"{env:LIGHTRL_TEST_KEY}" in text for text in texts)  # what the program printed
    assert not any(b"sk-0123456789abcdef" in text for text in texts)
    assert [len(experience) for experience in module.experiences] == [4, 4]
    assert len(set(module.workspaces)) >= 8
    for workspace in module.workspaces:
        assert comes_true(lambda folder=workspace.parent: not folder.exists())  # type: ignore[misc]
