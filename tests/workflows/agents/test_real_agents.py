"""The real Claude Code and Codex fix a file in a folder, with a scripted policy, and are trained."""

import asyncio
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from agent_cases import generate_with
from chat_texts import started
from installed_agents import install, record
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from waits import comes_true

import lightrl
from lightrl import GRPO, FakeEngine, ModelSpec, Prompt, PromptDataModule, Sampling, Trajectory
from lightrl.errors import RolloutError
from lightrl.testing import QUIET
from lightrl.workflows import AgentWorkflow
from lightrl.workflows.agent_workflow import endpoint

pytestmark = [
    pytest.mark.extra,
    pytest.mark.slow,
    pytest.mark.skipif(install.program("claude") is None, reason="scripts/agents/install.py has not installed them"),
]
AGENTS = ("claude", "codex")
SPECIAL = ("<unk>", "<|im_start|>", "<|im_end|>")
END = SPECIAL.index("<|im_end|>")
WORDS = [*SPECIAL, *AGENTS, "assistant", *map(chr, range(32, 127)), "\n"]
TEMPLATE = (
    "{{ tools | tojson }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{{ '<|im_start|>assistant\n<think>' }}"
)
CONFIG = {
    "model_type": "qwen3", "vocab_size": len(WORDS), "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 16384,
    "tie_word_embeddings": True, "eos_token_id": END, "pad_token_id": 0,
}  # fmt: skip


def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each line that it reads, most of them unknown; the policy writes letters."""
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"<\|im_start\|>|<\|im_end\|>|\n|[^\n<]+|<"), "isolated")
    backend.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="<|im_end|>")
    made.chat_template = TEMPLATE
    return made


def says(prompt: list[int], sampling: Sampling, sample: int) -> list[int]:
    """Thinks, and does the task with the tools of the program; half of the policies repair it wrongly."""
    name = next(name for name in AGENTS if WORDS.index(name) in prompt)
    turn = prompt.count(WORDS.index("assistant")) - 1
    calls = record.calls_of(name, Path())
    text = "Two.</think>Done."
    if turn < len(calls):
        called = json.dumps({"name": calls[turn][0], "arguments": calls[turn][1]})
        if sampling.seed % 2:
            called = called.replace("number / 2", "number / 4").replace("|/ 2|", "|/ 4|")
        text = f"Two.</think><tool_call>{called}</tool_call>"
    return [*(WORDS.index(letter) for letter in text), END]


class Folders:
    """Runs each agent in a folder of its own, and counts those that run at once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.num_running = self.most_running = 0

    async def run(self, prompt: Prompt, base_url: str, api_key: str) -> float:
        folder = Path(tempfile.mkdtemp(dir=self.root))
        name, work = prompt.fields["agent"], folder / "work"
        work.mkdir()
        for file, text in record.FILES.items():
            (work / file).write_text(text)
        root_url = base_url.removesuffix("/v1")
        command, environment = install.start_command(name, root_url, api_key, folder / "home", f"{record.TASK}\n{name}")
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        with (folder / "output.txt").open("wb") as output:
            running = await asyncio.create_subprocess_exec(
                *command, cwd=work, env=environment, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
            try:
                assert await running.wait() == 0, (folder / "output.txt").read_text()
            finally:
                self.num_running -= 1
                if running.returncode is None:
                    os.killpg(running.pid, signal.SIGKILL)
                    await running.wait()
        assert "Done." in (folder / "output.txt").read_text()
        return float("/ 2" in (work / "half.py").read_text())


class Tasks(PromptDataModule):
    def make_prompts(self, split: str) -> list[Prompt]:
        return [Prompt(f"{split}-{name}", token_ids=[WORDS.index(name)], fields={"agent": name}) for name in AGENTS]


class AgentGRPO(GRPO):
    def __init__(self, agent: Any) -> None:
        super().__init__(
            ModelSpec(config=CONFIG, tokenizer="test_real_agents.tokenizer", seed=3),
            group_size=4,
            sampling=Sampling(max_new_tokens=400),
            lr=1e-2,
            workflow=lambda made: AgentWorkflow(made, agent, max_tokens=16_000, agent_timeout_s=240),
        )
        self.trained: list[Trajectory] = []
        self.experiences: list[lightrl.Experience] = []
        self.weights: list[torch.Tensor] = []

    def reward(self, trajectory: Trajectory) -> Any:
        self.trained.append(trajectory)
        return (trajectory.rewards or [0.0])[-1]

    def on_experience_ready(self, experience: lightrl.Experience) -> None:
        self.experiences.append(experience)
        self.weights.append(torch.cat([value.detach().flatten() for value in self.policy.parameters()]).clone())


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder outside of the system's temporary one, where Codex would not put its programs."""
    folder = Path(tempfile.mkdtemp(prefix="lightrl-agents-", dir=Path.home()))
    yield folder
    shutil.rmtree(folder)


def running_below(root: Path) -> list[list[str]]:
    """The commands of all processes that work in this folder."""
    found = []
    for process in psutil.process_iter(["cwd", "cmdline"]):
        if (process.info["cwd"] or "").startswith(str(root)):
            found.append(process.info["cmdline"])
    return found


def test_eight_real_agents_at_once_are_trained_for_three_iterations_and_leave_nothing(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "WAITING_S", 0.2)  # so that the programs' streams wait
    folders = Folders(root)
    module = AgentGRPO(folders.run)
    engine = FakeEngine(script=says, seconds_per_token=0.005)
    flags = {"default_root_dir": tmp_path, "max_steps": 3, "num_sanity_val_steps": 0, "limit_val_batches": 0}
    lightrl.Trainer(engine=engine, **(QUIET | flags)).fit(module, datamodule=Tasks(None, batch_size=2))
    assert folders.most_running == 8
    assert [len(experience) for experience in module.experiences] == [8, 8, 8]
    assert len(module.trained) == 24
    for trajectory in module.trained:
        assert len(trajectory.turns) == 4, trajectory.prompt.id
        assert trajectory.metrics["rows"] == 1
    rewards = [(trajectory.rewards or [0.0])[-1] for trajectory in module.trained]
    assert 0 < sum(rewards) < 24
    assert comes_true(lambda: not running_below(root))
    assert not torch.equal(module.weights[0], module.weights[-1])


@pytest.mark.parametrize("name", AGENTS)
def test_a_real_agent_with_a_wrong_key_drops_its_trajectory_with_the_reason(name: str, root: Path) -> None:
    async def agent(prompt: Prompt, base_url: str, api_key: str) -> float:
        return await Folders(root).run(prompt, base_url, "wrong")

    workflow = AgentWorkflow(tokenizer(), agent, max_tokens=16_000, agent_timeout_s=120)
    with pytest.raises(RolloutError, match="API key is wrong"):
        asyncio.run(workflow.run(Prompt("a", token_ids=[3], fields={"agent": name}), generate_with(FakeEngine())))
    assert comes_true(lambda: not running_below(root))


@pytest.mark.parametrize("name", AGENTS)
def test_a_real_agent_that_waits_at_its_deadline_is_ended_with_all_its_processes(name: str, root: Path) -> None:
    engine = started(FakeEngine(seconds_per_token=3600.0), context=16_384)
    workflow = AgentWorkflow(tokenizer(), Folders(root).run, max_tokens=16_000, agent_timeout_s=8)
    with pytest.raises(RolloutError, match="did not finish within 8 s"):
        asyncio.run(workflow.run(Prompt("a", token_ids=[3], fields={"agent": name}), generate_with(engine)))
    assert len(engine.requests) == 1
    assert engine.num_running == 0
    assert comes_true(lambda: not running_below(root))
