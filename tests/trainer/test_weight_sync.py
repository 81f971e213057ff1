"""WeightSync in a real Trainer: probed syncs, loads in the background, and what happens when either goes wrong."""

import threading

import pytest
import torch
from tiny_run import POLICY, Digits, TinyGRPO, make_trainer

from lightrl import FakeEngine, StalenessControl, WeightSync
from lightrl.callbacks.probe import compare, probe_sequences
from lightrl.errors import WeightSyncError


class ScoringEngine(FakeEngine):
    """Keeps the weights that it is given and scores with them."""

    def __init__(self, error_nats: float = 0.0, **settings) -> None:
        super().__init__(**settings)
        self.error_nats = error_nats
        self.held: dict[str, torch.Tensor] = {}
        self.threads: list[str] = []
        self.num_scored = 0

    def load_weights(self, buckets, *, weight_version):
        buckets = list(buckets)
        self.held = {name: tensor.clone() for bucket in buckets for name, tensor in bucket.tensors.items()}
        super().load_weights(buckets, weight_version=weight_version)
        self.threads.append(threading.current_thread().name)

    @torch.no_grad()
    def score(self, token_ids):
        self.num_scored += 1
        model = POLICY.load_model()
        model.load_state_dict(self.held, strict=False)
        logprobs = model(torch.tensor([token_ids])).logits[0].log_softmax(-1)
        pairs = zip(logprobs[:-1], token_ids[1:], strict=True)
        return [0.0, *(float(row[token]) + self.error_nats for row, token in pairs)]


def fit(folder, engine, *callbacks):
    module, trainer = TinyGRPO(), make_trainer(folder, engine=engine, callbacks=list(callbacks))
    trainer.fit(module, Digits())
    return module, trainer


def test_the_probe_is_logged_and_near_zero_after_each_sync(tmp_path):
    engine = ScoringEngine()
    _, trainer = fit(tmp_path, engine)
    assert float(trainer.callback_metrics["sync/probe_abs_dlogp_nats"]) < 1e-5
    assert engine.num_scored == 2 * 4  # versions 0 to 3
    assert float(trainer.callback_metrics["sync/mismatch_k3_nats"]) >= 0


def test_an_engine_that_says_other_logprobs_ends_the_run_with_both_numbers(tmp_path):
    with pytest.raises(WeightSyncError, match=r"differs by 0\.5 nats.*trainer gives.*engine.*max_probe_nats=0\.001"):
        fit(tmp_path, ScoringEngine(error_nats=0.5))


def test_a_bound_may_be_given(tmp_path):
    _, trainer = fit(tmp_path, ScoringEngine(error_nats=0.5), WeightSync(max_probe_nats=1.0))
    assert float(trainer.callback_metrics["sync/probe_abs_dlogp_nats"]) == pytest.approx(0.5, abs=1e-4)


def test_an_engine_without_scores_is_not_probed(tmp_path):
    _, trainer = fit(tmp_path, FakeEngine())
    assert "sync/probe_abs_dlogp_nats" not in trainer.callback_metrics


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_load_in_the_background_ends_with_the_weights_of_a_blocking_one(tmp_path, max_staleness):
    engine = ScoringEngine()
    module, _ = fit(tmp_path, engine, WeightSync(blocking=False), StalenessControl(max_staleness))
    assert engine.loaded_versions == [0, 1, 2, 3]
    assert set(engine.threads) == {"lightrl-weight-load"}
    trained = dict(module.policy.named_parameters())
    assert all(torch.equal(engine.held[name], trained[name]) for name in trained)


def test_an_error_of_a_load_in_the_background_ends_the_run(tmp_path):
    with pytest.raises(WeightSyncError, match="fails the load of version 2"):
        fit(tmp_path, FakeEngine(fail_loads=[2]), WeightSync(blocking=False))


def test_probe_sequences_are_the_same_in_every_run():
    first = probe_sequences(100, num=3, num_tokens=8)
    assert first == probe_sequences(100, num=3, num_tokens=8)
    assert [len(sequence) for sequence in first] == [8, 8, 8]
    assert len({tuple(sequence) for sequence in first}) == 3


def test_the_first_token_has_no_logprob_to_compare():
    assert compare([[9.0, -1.0, -2.0]], [[0.0, -1.5, -2.5]]) == pytest.approx(0.5)


@pytest.mark.parametrize("settings", [{"probe": 5}, {"probe_tokens": 1}, {"bucket_mib": 0}])
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        WeightSync(**settings)
