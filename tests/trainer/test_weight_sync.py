"""WeightSync in a real Trainer: probed syncs, and what happens when one goes wrong."""

from types import SimpleNamespace

import pytest
import torch
from fake_sglang.process import FakeServerProcess
from lightning.pytorch.callbacks import Callback
from tiny_run import train

from benchmarks.families import family_spec
from lightrl import FakeEngine, LocalEngine, SGLangEngine, StalenessControl, WeightSync
from lightrl.callbacks.probe import as_rows
from lightrl.callbacks.weight_sync import RankShares, to_trainer
from lightrl.errors import WeightSyncError
from lightrl.strategies import LogprobSettings, SingleModel


class WrongEngine(LocalEngine):
    """Its scores are half a nat too large."""

    def score(self, sequences):
        return {"engine": [[value + 0.5 for value in row] for row in super().score(sequences)["engine"]]}


def test_the_engine_of_a_laptop_is_probed_after_each_tenth_load(tmp_path):
    seen = []

    class Probed(LocalEngine):
        def score(self, sequences):
            seen.append(self.weight_version)
            return super().score(sequences)

    train(tmp_path, engine=Probed())
    assert seen == [0]
    engine = Probed()
    engine.probe_every_n_loads = 1
    trainer = train(tmp_path, engine=engine)
    assert seen == [0, 0, 1, 2, 3]
    assert float(trainer.callback_metrics["sync/probe_abs_dlogp_nats"]) < 1e-5
    assert "sync/verified_fraction" not in trainer.callback_metrics  # as its engine has no digests


def test_an_engine_that_says_other_logprobs_ends_the_run_with_both_numbers(tmp_path):
    message = r"engine: its probe differs by 0\.5 nats.*at most \S+e-05 for float32.*in the trainer.*in the engine"
    with pytest.raises(WeightSyncError, match=message):
        train(tmp_path, engine=WrongEngine())


def test_an_engine_without_scores_is_not_probed(tmp_path):
    assert "sync/probe_abs_dlogp_nats" not in train(tmp_path, engine=FakeEngine()).callback_metrics


def test_the_first_token_has_no_logprob_to_compare():
    assert as_rows([[9.0, -1.0, -2.0], [9.0, -3.0, -4.0]]).tolist() == [[-1.0, -2.0], [-3.0, -4.0]]


def test_no_sync_at_all_is_refused():
    with pytest.raises(ValueError, match="every_n_iterations"):
        WeightSync(every_n_iterations=0)


@pytest.fixture
def fake_server():
    server = FakeServerProcess(vocab_size=8).start()
    yield server
    server.stop()


def test_a_colocated_server_has_its_memory_while_it_generates_and_not_during_updates(tmp_path, fake_server):
    """The fake dies at a release while it runs and at a resume of what it has not released."""

    class Looks(Callback):
        def on_minibatch_start(self, trainer, module, minibatch, index, total):
            requests = fake_server.stats()["requests"]
            seen.append([requests.get(f"/{what}_memory_occupation", 0) for what in ("release", "resume")])

    seen: list[list[int]] = []
    engine = SGLangEngine(urls=[fake_server.url], placement="colocated")
    trainer = train(tmp_path, engine=engine, callbacks=[WeightSync(verify=False), Looks()])
    assert trainer.weight_version == 3
    assert seen == [[1, 0], [2, 3], [3, 6]]  # weights, graphs and cache come back one by one
    assert fake_server.stats()["requests"]["/resume_memory_occupation"] == 9


@pytest.mark.parametrize("offloads", [(), ("activations",), ("optimizer",), ("parameters",)])
def test_a_colocated_engine_leaves_the_optimizers_state_in_the_host_if_the_strategy_keeps_it_there(
    offloads, monkeypatch
):
    engine = SGLangEngine(urls=["http://127.0.0.1:1"], placement="colocated")
    released, moved = [], []
    monkeypatch.setattr(engine, "release_memory", lambda: released.append(True))
    monkeypatch.setattr("lightrl.callbacks.weight_sync.move_state", lambda *arguments: moved.append(arguments))
    device = torch.device("cuda")
    strategy = SimpleNamespace(root_device=device, offload_to_cpu=offloads)
    to_trainer(SimpleNamespace(strategy=strategy, optimizers=["adam"]), engine)
    assert released == [True]
    assert moved == ([("adam", device)] if not {"optimizer", "parameters"} & {*offloads} else [])


def test_rollouts_during_the_updates_of_a_colocated_engine_are_refused(tmp_path, fake_server):
    engine = SGLangEngine(urls=[fake_server.url], placement="colocated")
    with pytest.raises(ValueError, match=r"max_staleness must be 0 with a colocated engine, got 1"):
        train(tmp_path, engine=engine, callbacks=[StalenessControl(1)])


@pytest.mark.parametrize(
    ("make", "name"),
    [
        pytest.param(lambda: SGLangEngine(urls=["http://127.0.0.1:1"]), "experts.3.down_proj.weight", id="server"),
        pytest.param(LocalEngine, "experts.down_proj", id="in this process"),
    ],
)
def test_servers_get_the_names_of_checkpoints_and_other_engines_those_of_modules(make, name):
    model = SingleModel(family_spec("qwen3_moe").load_model(), LogprobSettings())
    engine = make()
    trainer = SimpleNamespace(engine=engine, rollout=SimpleNamespace(engine=engine), strategy=None)
    module = SimpleNamespace(parallel_models={"policy": model})
    names = {name for bucket in RankShares().buckets(trainer, module, 10_000) for name in bucket.tensors}
    assert f"model.layers.1.mlp.{name}" in names
