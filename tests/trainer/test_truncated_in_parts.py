"""Truncated completions that go on under other weights, or in another run: each token has the support of its draw."""

import copy
import random
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny import rollout_state
from tiny_run import CONFIG, EOS, Digits, TinyGRPO, make_trainer

from lightrl import Experience, LocalEngine, ModelSpec, RLCallback, Sampling, StalenessControl
from lightrl.columns import NO_TOKEN
from lightrl.engines.engine import Completion
from lightrl.functional import Supports

POLICY = ModelSpec(config={**CONFIG, "max_position_embeddings": 128}, tokenizer="tiny_run.tokenizer", seed=3)
SAMPLING = Sampling(max_new_tokens=100, min_new_tokens=100, top_p=0.9, top_k=6, temperature=0.8, topk_logprobs=4)


class Versions(RLCallback):
    """Keeps the policy of each weight version; a slow update lets versions change during completions."""

    def __init__(self) -> None:
        self.policies: dict[int, Any] = {}

    def on_experience_ready(self, trainer: Any, module: Any, experience: Experience) -> None:
        self.policies[trainer.weight_version] = copy.deepcopy(module.policy)

    def on_minibatch_start(self, *args: Any) -> None:
        time.sleep(random.SystemRandom().uniform(0, 0.02))


def row_supports(experience: Experience, row: int) -> tuple[list[int], list[list[int]]]:
    """The positions of a row's drawn tokens and the support of each."""
    columns = experience.loss_mask[row, 1:].nonzero()[:, 0]
    rows = torch.full_like(columns, row)
    made = Supports.at(experience.row_codes("supports"), experience.lengths, experience.token_ids, rows, columns)
    assert len(made.limited) == len(columns)
    return (columns + 1).tolist(), [part.tolist() for part in made.ids.split(made.counts.tolist())]


def assert_sampled_from_its_supports(experience: Experience, policies: dict[int, Any]) -> None:
    """By a plain forward over the whole trajectory with the weights of each token's version."""
    for row in range(len(experience)):
        versions = experience.weight_versions[row].tolist()
        logits = {
            version: policies[version](input_ids=experience.token_ids[row : row + 1]).logits[0].detach()
            for version in set(versions) - {-1}
        }
        for column, support in zip(*row_supports(experience, row), strict=True):
            scores = logits[versions[column]][column - 1] / SAMPLING.temperature
            scores[EOS] = -torch.inf  # not before `min_new_tokens`
            left_out = [token for token in range(len(scores)) if token not in support]
            assert scores[support].min() >= scores[left_out].max() - 1e-5  # the likeliest tokens
            kept = scores.topk(6).values.softmax(0)[: len(support)]
            assert kept.sum() >= 0.9 - 1e-5 > kept[:-1].sum() - 2e-5  # as few as top-p needs, of the 6
            within = scores[experience.token_ids[row, column]] - scores[support].logsumexp(0)
            torch.testing.assert_close(within, experience.behavior_logprobs[row, column], atol=1e-5, rtol=0)
            likeliest = scores[support].log_softmax(0).sort(descending=True).values[:4]
            topk = experience["behavior_topk_logprobs"][row, column]
            torch.testing.assert_close(topk[: len(likeliest)], likeliest, atol=1e-5, rtol=0)
            assert topk[len(likeliest) :].tolist() == [NO_TOKEN] * (4 - len(likeliest))
            ids = experience["behavior_topk_ids"][row, column, : len(likeliest)]
            torch.testing.assert_close(scores[ids] - scores[support].logsumexp(0), likeliest, atol=1e-5, rtol=0)


def test_supports_stay_with_their_tokens_through_syncs_and_a_resume(tmp_path: Path) -> None:
    kept = Versions()
    first, second = (TinyGRPO(POLICY, sampling=SAMPLING, score_centering=True) for _ in range(2))
    for module, num, resumed in ((first, 4, None), (second, 6, tmp_path / "step=3.ckpt")):
        save = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1, filename="{step}")
        callbacks = [StalenessControl(2), kept, save]
        engine = LocalEngine(max_batch=3)
        trainer = make_trainer(tmp_path, engine=engine, callbacks=callbacks, max_steps=num, enable_checkpointing=True)
        trainer.fit(module, datamodule=Digits(), ckpt_path=resumed)
        for experience in module.experiences:
            versions = [row[row >= 0] for row in experience.weight_versions]
            assert all(len(row) == 100 for row in versions)
            assert_sampled_from_its_supports(experience, kept.policies)
    started = [Completion.from_state(item) for _, item in rollout_state(tmp_path / "step=3.ckpt")["written"]]
    started = [part for part in started if part.finish_reason == "abort" and part.token_ids]
    assert started
    assert all(part.columns["supports"] for part in started)
    rows = [
        row for experience in second.experiences for row in zip(experience.token_ids, experience.loss_mask, strict=True)
    ]
    for part in started:
        assert any(tokens[mask][: len(part.token_ids)].tolist() == list(part.token_ids) for tokens, mask in rows)
