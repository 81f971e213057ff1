"""An asynchronous run against the real SGLang on this machine's CPU: resumed, it goes on."""

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from real_servers import LikesLowTokens, fit, tiny_config
from tiny import rollout_state

import lightrl
from lightrl import ModelSpec, Prompt, PromptDataModule, RLCallback, SGLangEngine, StalenessControl, Trajectory
from lightrl.engines import Timeouts
from lightrl.engines.engine import Completion
from lightrl.testing import QUIET
from lightrl.trajectory import Sampling

pytestmark = [
    pytest.mark.real_sglang,
    pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path., callbacks:UserWarning"),
]
CHANCE = random.SystemRandom()


@pytest.mark.parametrize(
    ("transport", "placement", "max_staleness"),
    [
        pytest.param("disk", "separate", 2, id="through disk"),
        pytest.param("distributed", "separate", 2, id="through gloo", marks=pytest.mark.extra),
        pytest.param("tensor", "separate", 2, id="through shared memory", marks=pytest.mark.extra),
        pytest.param("disk", "colocated", 0, id="colocated", marks=pytest.mark.extra),
    ],
)
def test_a_run_trains_against_it_and_every_sync_is_verified(
    transport: str, placement: str, max_staleness: int, real_server: dict[str, Any], tmp_path: Path
) -> None:
    timeouts = Timeouts(sync_s=60)
    engine = SGLangEngine(urls=[real_server["url"]], transport=transport, placement=placement, timeouts=timeouts)
    trainer, rewards = fit(engine, tiny_config(), tmp_path, max_steps=6, max_staleness=max_staleness)
    metrics = trainer.callback_metrics
    assert trainer.weight_version == engine.weight_version == 6
    assert float(metrics["sync/probe_abs_dlogp_nats"]) < 1e-5
    assert float(metrics["sync/verified_fraction"]) == 1.0
    assert float(metrics["staleness/max_versions"]) <= max_staleness
    assert rewards[-1] > rewards[0]
    assert sorted(engine.last_sync.versions.values()) == [6]  # type: ignore[union-attr]
    assert list(engine.last_sync.verified_by.values()) == ["digests"]  # type: ignore[union-attr]
    if max_staleness == 0:
        assert float(metrics["sync/max_mismatch_abs_dlogp_nats"]) < 1e-4


class Jittery(LikesLowTokens):
    """Its rewards take times that nobody can repeat."""

    def __init__(self) -> None:
        policy = ModelSpec(config=tiny_config().to_dict(), tokenizer="tiny.char_tokenizer", seed=1)
        sampling = Sampling(max_new_tokens=200, min_new_tokens=200)  # long enough for weights to change meanwhile
        super().__init__(policy, lr=1e-3, group_size=4, sampling=sampling, decoupled=True)
        self.trained: list[list[int]] = []
        self.rows: list[tuple[list[int], list[int], list[float]]] = []  # token ids, versions, logprobs

    async def reward(self, trajectory: Trajectory) -> float:  # type: ignore[override]
        await asyncio.sleep(CHANCE.uniform(0, 0.02))
        return super().reward(trajectory)

    def on_experience_ready(self, experience: lightrl.Experience) -> None:
        self.trained.append(list(dict.fromkeys(experience.group_ids.tolist())))
        for index, mask in enumerate(experience.loss_mask):
            fields = (experience.token_ids, experience.weight_versions, experience.behavior_logprobs)
            self.rows.append(tuple(values[index][mask].tolist() for values in fields))  # type: ignore[arg-type]


class Prompts(PromptDataModule):
    def make_prompts(self, split: str) -> list[Prompt]:
        return [Prompt(f"p{number}", token_ids=[number + 3, 5, 8]) for number in range(8)]


class Slow(RLCallback):
    """An update takes a while, so that weights change within completions."""

    def on_minibatch_start(self, *args: Any) -> None:
        time.sleep(CHANCE.uniform(0, 0.05))


def fit_jittery(server: dict[str, Any], folder: Path, *, ckpt_path: Path | None = None, **flags: Any) -> Jittery:
    engine = SGLangEngine(urls=[server["url"]], timeouts=Timeouts(sync_s=60))
    callbacks = [StalenessControl(2, rollout_timeout_s=60), Slow(), *flags.pop("callbacks", ())]
    module = Jittery()
    settings = {"max_steps": 4, "num_sanity_val_steps": 0, "limit_val_batches": 0, "default_root_dir": folder}
    trainer = lightrl.Trainer(engine=engine, callbacks=callbacks, **{**QUIET, **settings, **flags})
    trainer.fit(module, datamodule=Prompts(None, batch_size=2), ckpt_path=ckpt_path)
    return module


@pytest.mark.extra
def test_a_resumed_run_continues_what_was_in_flight(real_server: Any, tmp_path: Path) -> None:
    save = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    fit_jittery(real_server, tmp_path / "first", max_steps=8, callbacks=[save], enable_checkpointing=True)
    for step in range(1, 8):
        ckpt_path = tmp_path / f"step={step}.ckpt"
        parts = [Completion.from_state(item) for _, item in rollout_state(ckpt_path)["written"]]
        if "abort" in {part.finish_reason for part in parts}:  # begun and not done
            break
    else:
        pytest.fail("no checkpoint has a completion that was begun and not done")
    resumed = fit_jittery(real_server, tmp_path / "resumed", max_steps=step + 3, ckpt_path=ckpt_path)
    assert resumed.trained == [[2 * iteration, 2 * iteration + 1] for iteration in range(step, step + 3)]
    for part in parts:
        begun = tuple(list(values) for values in (part.token_ids, part.weight_versions, part.logprobs))
        length = len(part.token_ids)
        (row,) = (row for row in resumed.rows if tuple(values[:length] for values in row) == begun)
        assert len(row[0]) > length if part.finish_reason == "abort" else len(row[0]) == length
        assert all(version >= step for version in row[1][length:])
