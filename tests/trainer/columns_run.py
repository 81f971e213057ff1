"""Script of test_columns.py: runs in every layout whose engine returns a column of its own for each sampled token.

    python tests/trainer/columns_run.py FOLDER

The loss, on every rank, checks each token's value against what the engine gave. Each rank leaves the number of values
that its losses have seen, by layout, in `FOLDER/<ranks>/rank-<rank>.pt`. Nothing here but doubt_column.py declares it.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from doubt_column import DOUBT
from doubting_client import DoubtingClient, doubts
from fake_sglang import python_of_fakes
from lightning.pytorch.callbacks import ModelCheckpoint
from rank_scripts import fork_runs, leave
from sglang_run import SERVER
from tiny import rollout_state
from tiny_run import CONFIG, Digits, TinyGRPO, make_trainer

import lightrl
from lightrl import Sampling, StalenessControl
from lightrl.columns import TokenArray
from lightrl.engines import Completion
from lightrl.engines.servers.request import Answer, CompletionDraft
from lightrl.workflows import Workflow
from lightrl.workflows.multi_turn import Conversation, TurnRenderer
from lightrl.workflows.workflow import Generate

LAYERS = {**CONFIG, "num_hidden_layers": 2, "tie_word_embeddings": False}
POLICY = lightrl.ModelSpec(config={**LAYERS, "max_position_embeddings": 128}, tokenizer="tiny_run.tokenizer", seed=3)


def with_doubts(completion: Completion) -> Completion:
    values = doubts(completion.token_ids, completion.logprobs)
    return replace(completion, columns={**completion.columns, DOUBT.name: values})


class Doubting(lightrl.LocalEngine):
    async def generate(self, *args: Any, **request: Any) -> list[Completion]:
        return [with_doubts(completion) for completion in await super().generate(*args, **request)]

    async def unfinished(self) -> dict[int, Completion]:
        return {seed: with_doubts(completion) for seed, completion in (await super().unfinished()).items()}


class DoubtingServers(lightrl.SGLangEngine):
    client_type = DoubtingClient


class Turns(Workflow):
    """Two completions, and an observation between them."""

    def __init__(self, tokenizer: Any) -> None:
        self.renderer = TurnRenderer(tokenizer)

    async def run(self, prompt: lightrl.Prompt, generate: Generate) -> lightrl.Trajectory:
        conversation = Conversation(self.renderer, prompt)
        conversation.add_completion(await generate(list(conversation.token_ids)))
        conversation.add_observation(conversation.encode_observation([{"role": "user", "content": "3"}]))
        conversation.add_completion(await generate(list(conversation.token_ids)))
        return conversation.trajectory([0.0, 0.0], is_truncated=False, metrics={})


class Branches(Workflow):
    """A question, and a subagent that knows its first two tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self.renderer = TurnRenderer(tokenizer)

    async def run(self, prompt: lightrl.Prompt, generate: Generate) -> lightrl.Trajectory:
        question = list(prompt.token_ids or [])
        joined, beside = (Conversation(self.renderer, replace(prompt, token_ids=ids)) for ids in
                          (question, [*question[:2], 3, 6]))  # fmt: skip
        for conversation in (joined, beside):
            conversation.add_completion(await generate(list(conversation.token_ids)))
        joined.add_branch(beside, 2, 1)
        return joined.trajectory([0.0, 0.0], is_truncated=False, metrics={})


class Checked(TinyGRPO):
    """Counts the values that its losses have seen; each completion has as many tokens as it may have."""

    def __init__(self, num_tokens: int = 6, **settings: Any) -> None:
        sampling = Sampling(max_new_tokens=num_tokens, min_new_tokens=num_tokens)
        own = {"policy": POLICY, "sampling": sampling, "num_minibatches": 2, "microbatch_tokens": 40, "lr": 0.1}
        super().__init__(**{**own, **settings})
        self.num_seen = 0

    def loss(self, experience: lightrl.Experience, outputs: lightrl.Outputs) -> Any:
        mask = experience.loss_mask
        expected = torch.from_numpy(doubts(experience.token_ids.numpy(), experience.behavior_logprobs.numpy()))
        found = experience["doubt"]
        assert found.shape == mask.shape
        assert torch.equal(found[mask], expected[mask]), (found[mask], expected[mask])
        assert not found[~mask].any()  # tokens that were read, and padding
        self.num_seen += int(mask.sum())
        return super().loss(experience, outputs)


def run(folder: Path, name: str, module: Checked | None = None, data: Any = None, **flags: Any) -> int:
    """Trains; returns how many values the losses have seen."""
    torch.set_num_threads(1)
    module = module or Checked()
    ckpt_path = flags.pop("ckpt_path", None)
    settings = {"max_steps": 2, "engine": None if data else Doubting(threads=1)} | flags
    trainer = make_trainer(folder / name, **{key: value for key, value in settings.items() if value is not None})
    trainer.fit(module, datamodule=data or Digits(), ckpt_path=ckpt_path)
    return module.num_seen


def interrupted_request() -> int:
    """A completion of three requests, the first of them in another process."""

    def answered(*token_ids: int) -> Answer:
        ids, logprobs = TokenArray(token_ids, "i"), TokenArray([-token / 8 for token in token_ids], "f")
        columns = {DOUBT.name: DOUBT.array(doubts(ids, logprobs))}
        return Answer(ids, logprobs, TokenArray([0] * len(ids), "i"), "abort", columns)

    drafts = [CompletionDraft([3, 4], Sampling(max_new_tokens=6)) for _ in range(2)]
    drafts[0].add(answered(2, 5), "there")
    begun = Completion.from_state(json.loads(json.dumps(drafts[0].completion().state_dict())))
    drafts[1].start_with(begun)
    for token_ids in ((7,), (), (6, 2, 2)):
        drafts[1].add(answered(*token_ids), "there")
    completion = drafts[1].completion()
    assert np.array_equal(completion.columns["doubt"], doubts([2, 5, 7, 6, 2, 2], completion.logprobs))
    return len(completion.token_ids)


def resumed(folder: Path) -> int:
    """Saves with groups finished and completions begun, and continues from there."""
    long = {"num_tokens": 60, "microbatch_tokens": 200}
    save = ModelCheckpoint(folder / "saved", every_n_train_steps=1, save_top_k=-1, filename="{step}")
    flags = {"enable_checkpointing": True, "engine": Doubting(threads=1, max_batch=3)}
    run(folder, "whole", Checked(**long), callbacks=[StalenessControl(2), save], max_steps=5, **flags)
    state = rollout_state(folder / "saved" / "step=1.ckpt")
    begun = [Completion.from_state(item) for _, item in state["written"]]
    assert begun
    assert all(np.array_equal(it.columns["doubt"], doubts(it.token_ids, it.logprobs)) for it in begun)
    path = folder / "saved" / "step=1.ckpt"
    flags["engine"] = Doubting(threads=1, max_batch=3)
    return run(
        folder, "resumed", Checked(**long), callbacks=[StalenessControl(2)], max_steps=3, ckpt_path=path, **flags
    )


def replayed(folder: Path) -> int:
    """Writes trajectories down, and trains on what is in the files."""
    run(folder, "log", callbacks=[lightrl.TrajectoryLog(every_n_iterations=1, table_every_n_iterations=None)])
    written = folder / "log" / "trajectories"
    lines = [json.loads(line) for file in sorted(written.glob("iteration-*.jsonl")) for line in file.open()]
    assert all(len(line["trajectory"]["doubt"]) == len(line["trajectory"]["token_ids"]) for line in lines)
    return run(folder, "from files", data=lightrl.TrajectoryDataModule(str(written)))


def on_servers(folder: Path, workers: int) -> int:
    engine = DoubtingServers(servers=1, sglang_python=python_of_fakes(folder, *SERVER))
    return run(folder, f"{workers} workers", Checked(workflow_workers=workers), engine=engine)


def train_all(folder: Path, size: int) -> None:
    layouts: dict[str, Callable[[], int]] = {
        "one turn": lambda: run(folder, "one"),
        "two turns": lambda: run(folder, "turns", Checked(workflow=Turns)),
        "branches": lambda: run(folder, "branches", Checked(workflow=Branches)),
        "resumed": lambda: resumed(folder),
        "a request": interrupted_request,
        "files": lambda: replayed(folder),
        "servers": lambda: on_servers(folder, 0),
        "workers": lambda: on_servers(folder, 2),
    }
    if size == 2:
        strategies: dict[str, Callable[[], Any]] = {
            "FSDP2": lightrl.FSDP2Strategy,
            "cp": partial(lightrl.FSDP2Strategy, cp=2),
            "pp": partial(lightrl.Parallel3DStrategy, pp=2),
        }
        layouts = {name: partial(several_ranks, folder, name, make) for name, make in strategies.items()}
    leave({name: train() for name, train in layouts.items()}, folder / str(size))


def several_ranks(folder: Path, name: str, make: Callable[[], Any]) -> int:
    return run(folder, name, Checked(workflow=Branches), devices=2, strategy=make())


if __name__ == "__main__":
    sys.exit(fork_runs([1, 2], partial(train_all, Path(sys.argv[1]))))
