"""Engines that acknowledge an update and have other weights, in a real fit: each ends the run or is dropped."""

import asyncio
import os
import signal
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_sglang.process import FakeServerProcess
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException
from tiny_run import CONFIG, POLICY, Digits, TinyGRPO, make_trainer
from transformers import AutoConfig, AutoModelForCausalLM
from waits import Deadlines, until

from lightrl import LocalEngine, ModelSpec, Role, Sampling, SGLangEngine, SingleTurn, StalenessControl, WeightSync
from lightrl.callbacks.probe import MIN_MISMATCH_TOKENS, MISMATCH_NATS, Rounding, bound_nats, check_mismatch
from lightrl.engines.engine import Completion, RolloutEngine
from lightrl.errors import EngineError, WeightSyncError
from lightrl.models import LoRA
from lightrl.weights import Bucket

IGNORES = {
    "everything": "", "a layer": "layers.0.", "the embedding": "embed_tokens", "the final norm": "model.norm.weight",
}  # fmt: skip


class Faulty(LocalEngine):
    """Acknowledges each load, but keeps the first values of the parameters whose name has `ignored`."""

    probe_every_n_loads = 1

    def __init__(self, ignored: str) -> None:
        super().__init__()
        self.ignored = ignored
        self.first: dict[str, torch.Tensor] = {}
        self.num_wrong = 0  # loads in which the fault changed a value

    def load_weights(self, buckets, *, weight_version):
        sent = {name: tensor.clone() for bucket in buckets for name, tensor in bucket.tensors.items()}
        self.first = self.first or sent
        loaded = {name: self.first[name] if self.ignored in name else tensor for name, tensor in sent.items()}
        self.num_wrong += any(not torch.equal(loaded[name], sent[name]) for name in sent)
        super().load_weights([Bucket(loaded, is_last=True)], weight_version=weight_version)


def fit(folder: Path, engine: LocalEngine, *callbacks: Any, precision: Any = "32-true", **settings: Any) -> Any:
    steps = settings.pop("max_steps", 3)
    trainer = make_trainer(folder, engine=engine, callbacks=list(callbacks), max_steps=steps, precision=precision)
    trainer.fit(TinyGRPO(**settings), Digits())
    return trainer


# A part of a small step shows only in digests.
@pytest.mark.parametrize(("what", "lr"), [*((what, 1e-3) for what in IGNORES), ("everything", 1e-5)])
def test_an_update_that_is_acknowledged_and_not_loaded_ends_the_run_after_one_iteration(tmp_path, what, lr):
    engine = Faulty(IGNORES[what])
    with pytest.raises(WeightSyncError, match=r"engine has different weights from the trainer\. engine: its probe"):
        fit(tmp_path, engine, lr=lr)
    assert (engine.num_wrong, engine.weight_version) == (1, 1)


def test_the_base_without_its_adapters_ends_the_run(tmp_path):
    engine = Faulty("")
    with pytest.raises(WeightSyncError, match="different weights from the trainer"):
        fit(tmp_path, engine, policy=Role(POLICY, lora=LoRA(rank=2)), lr=1e-3)
    assert engine.num_wrong == 1


def test_servers_that_only_report_their_version_log_no_verified_fraction(tmp_path):
    engine = Faulty("no parameter")
    engine.verified_by = lambda: {"engine": "version"}
    trainer = fit(tmp_path, engine, max_steps=1)
    assert "sync/probe_abs_dlogp_nats" in trainer.callback_metrics
    assert "sync/verified_fraction" not in trainer.callback_metrics


def test_updates_in_bfloat16_with_an_engine_in_float32_are_within_the_mismatch_bound(tmp_path):
    """Both the probe and the trained tokens are computed under autocast."""
    peaked = ModelSpec(config={**CONFIG, "initializer_range": 0.4}, tokenizer="tiny_run.tokenizer", seed=3)
    engine = Faulty("no parameter")
    engine.dtype = "float32"
    trainer = fit(tmp_path, engine, policy=peaked, precision="bf16-mixed", group_size=32)
    metrics = trainer.callback_metrics
    assert float(metrics["sync/num_present_tokens"]) >= MIN_MISMATCH_TOKENS
    assert float(metrics["sync/mismatch_present_abs_dlogp_nats"]) > bound_nats(2**-23, 2.0) + MISMATCH_NATS
    assert float(metrics["sync/probe_abs_dlogp_nats"]) > bound_nats(2**-23, 2.0)


@pytest.mark.parametrize(("dtypes", "advises"), [(["float32"], True), (["bfloat16"], False)])
def test_a_mismatch_names_the_dtypes_of_both_and_first_blames_a_difference_between_them(dtypes, advises):
    rounding = Rounding(2**-7, 2**-23, "bfloat16", dtypes)
    with pytest.raises(WeightSyncError, match=f"for bfloat16 in the trainer and {dtypes[0]} in the engine") as caught:
        check_mismatch("the current weights", 100, mean=1.0, largest=1.0, entropy=1.0, rounding=rounding)
    assert ("First set the engine's dtype to the trainer's" in str(caught.value)) == advises


@pytest.mark.parametrize(
    ("dtype", "mean_abs_logprob", "healthy", "bound"),
    [
        (torch.float32, 2.0, 1e-7, 1.14e-5),  # SGLang on the CPU
        (torch.float16, 2.0, 5e-3, 0.09375),
        (torch.bfloat16, 0.3, 0.033, 0.2),  # sampled tokens of GPU engines
        (torch.bfloat16, 12.0, 0.12, 0.40625),  # random tokens of large models
    ],
)
def test_the_bound_is_several_times_what_healthy_engines_differ_by(dtype, mean_abs_logprob, healthy, bound):
    assert bound_nats(torch.finfo(dtype).eps, mean_abs_logprob) == pytest.approx(bound, rel=0.01)
    assert bound > 3 * healthy


class NeverScores(LocalEngine):
    """Gets SIGTERM while it waits for an answer to the probe, as of servers that die at each request."""

    probe_every_n_loads = 1

    def score(self, sequences):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)


def test_sigterm_while_the_first_probe_waits_ends_the_run_at_once(tmp_path):
    with pytest.raises(SIGTERMException):
        fit(tmp_path, NeverScores())


class StaleCache(LocalEngine):
    """Scores with the current weights and generates with those of version 0, as with stale key-values."""

    def start(self, config):
        super().start(config)
        self.old = LocalEngine(threads=1)
        self.old.start(config)

    def load_weights(self, buckets, *, weight_version):
        buckets = [Bucket(bucket.tensors, bucket.is_last) for bucket in buckets]
        super().load_weights(buckets, weight_version=weight_version)
        if weight_version == 0:
            self.old.load_weights(buckets, weight_version=0)

    async def generate(self, *args, **settings):
        return [
            replace(completion, weight_versions=[self.weight_version] * len(completion.weight_versions))
            for completion in await self.old.generate(*args, **settings)
        ]

    def close(self):
        self.old.close()
        super().close()


def test_tokens_of_stale_key_values_end_the_run(tmp_path):
    with pytest.raises(WeightSyncError, match=r"tokens that it sampled with the current weights differ from"):
        fit(tmp_path, StaleCache(), lr=1e-2, group_size=32, max_steps=5)


class OneWrongAnswer(LocalEngine):
    """One completion of the iteration at version 1 comes with the logprobs of another one."""

    def __init__(self, wrong_by: float) -> None:
        super().__init__()
        self.wrong_by = wrong_by
        self.num_wrong = 0

    async def generate(self, *args, **settings):
        completions = await super().generate(*args, **settings)
        if self.weight_version == 1 and not self.num_wrong:
            self.num_wrong = 1
            wrong = [value - self.wrong_by for value in completions[0].logprobs]
            completions[0] = replace(completions[0], logprobs=wrong)
        return completions


def test_one_answer_with_other_logprobs_ends_the_run_although_the_mean_is_within_its_bound(tmp_path):
    engine = OneWrongAnswer(0.05)
    with pytest.raises(WeightSyncError, match=r"e-05 nats on average and 0\.05 at most \(bounds: 0\.001\d+ and 0\.016"):
        fit(tmp_path, engine, lr=1e-5, group_size=256)
    assert engine.num_wrong == 1


class Lying(LocalEngine):
    """From the load of version 1 on, answers as `lie` changes them; `first` is the version at which one was given."""

    def __init__(self, lie: Any) -> None:
        super().__init__()
        self.lie, self.first = lie, 10**9

    def generate_group(self, *args, **settings):
        return RolloutEngine.generate_group(self, *args, **settings)

    async def generate(self, token_ids, sampling, **settings):
        if self.weight_version < 1:
            return await super().generate(token_ids, sampling, **settings)
        self.first = min(self.first, self.weight_version)
        asked, change = self.lie
        completions = await super().generate(token_ids, replace(sampling, **asked), **settings)
        return [replace(item, **change(item)) for item in completions]


LIES: dict[str, Any] = {
    "exchanged": ({}, lambda item: {"logprobs": item.logprobs[::-1]}),
    "shifted": ({}, lambda item: {"logprobs": item.logprobs[1:] + item.logprobs[:1]}),
    "constant": ({}, lambda item: {"logprobs": [-1.0] * len(item.logprobs)}),
    "a little off": ({}, lambda item: {"logprobs": [value - 0.02 for value in item.logprobs]}),
    "one is wrong": ({}, lambda item: {"logprobs": [*item.logprobs[:-1], item.logprobs[-1] - 0.1]}),
    "at another temperature": ({"temperature": 0.7}, lambda item: {}),
    "a version from the future": ({}, lambda item: {"weight_versions": [1000] * len(item.logprobs)}),
    "a version below 0": ({}, lambda item: {"weight_versions": [-1] * len(item.logprobs)}),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_asynchronous_run_ends_before_it_trains_on_a_lie(lie, tmp_path):
    engine, module = Lying(LIES[lie]), TinyGRPO(lr=3e-2, group_size=8)
    trainer = make_trainer(tmp_path, engine=engine, callbacks=[StalenessControl(2)], max_steps=12)
    error = r"weight version (1000|-1) sampled token \d+ of a trajectory in group \d+, but .* must be from \d to \d "
    words = r"it sampled with (the current weights|weight version \d) differ from" if "version" not in lie else error
    with pytest.raises(EngineError, match=words):
        trainer.fit(module, Digits())
    assert trainer.global_step <= engine.first + 2  # what was sampled then is trained on 2 iterations later


def test_a_server_that_gives_all_requests_one_seed_ends_the_run(tmp_path):
    engine = Lying(({"seed": 7}, lambda item: {}))
    trainer = make_trainer(tmp_path, engine=engine, callbacks=[StalenessControl(2)], max_steps=12)
    with pytest.raises(EngineError, match=r"too often equal in a group for temperature=1, .* is e\^-\d\d"):
        trainer.fit(TinyGRPO(lr=0.0, group_size=32), Digits())
    assert trainer.global_step <= engine.first + 2


class SharesItsStart(SingleTurn):
    """The trajectories of a group begin with the same sampled tokens."""

    async def run_group(self, prompt, generate):
        start = await generate.for_sample(0)(prompt.token_ids)
        for sample in generate.samples:
            end = await generate.for_sample(sample)([*prompt.token_ids, *start.token_ids], max_new_tokens=1)
            both = (getattr(start, name) + getattr(end, name) for name in ("token_ids", "logprobs", "weight_versions"))
            yield sample, self.trajectory_of(prompt, Completion(*both, end.finish_reason))


def test_samples_that_trajectories_have_in_common_are_no_copies(tmp_path):
    trainer = make_trainer(tmp_path, callbacks=[StalenessControl(2)], max_steps=3)
    trainer.fit(TinyGRPO(lr=0.0, group_size=32, workflow=SharesItsStart), Digits())
    assert trainer.global_step == 3


@pytest.mark.parametrize(("max_staleness", "num_minibatches"), [(2, 1), (2, 4), (0, 4)])
def test_no_wrong_row_is_trained_on_where_all_are_compared(max_staleness, num_minibatches, tmp_path):
    engine = OneWrongAnswer(0.05)
    callbacks = [StalenessControl(max_staleness), WeightSync(verify="all")]
    trainer = make_trainer(tmp_path, engine=engine, callbacks=callbacks, max_steps=12)
    with pytest.raises(WeightSyncError, match=r"it sampled with (the current weights|weight version \d) differ from"):
        trainer.fit(TinyGRPO(lr=3e-2, group_size=8, num_minibatches=num_minibatches), Digits())
    assert engine.num_wrong == 1
    assert trainer.global_step <= 1 + max_staleness


SHORT = {"lr": 0.0, "group_size": 4, "num_minibatches": 1, "sampling": Sampling(max_new_tokens=2)}


@pytest.mark.parametrize(("max_staleness", "settings"), [(0, {}), (2, {}), (0, SHORT | {"update_epochs": 24})])
def test_right_rows_pass_where_all_are_compared(max_staleness, settings, tmp_path):
    decays = Callback()
    decays.on_policy_updated = lambda trainer, module, version: module.policy.lm_head.weight.data.mul_(0.97)
    callbacks = [StalenessControl(max_staleness), WeightSync(verify="all"), decays]
    trainer = make_trainer(tmp_path, callbacks=callbacks, max_steps=12)
    trainer.fit(TinyGRPO(**{"lr": 3e-2, "group_size": 8, "num_minibatches": 4} | settings), Digits())
    assert trainer.global_step == 12


def signed(differences: torch.Tensor) -> None:
    """Checks differences in float32 at an entropy of 2 nats."""
    rounding = Rounding(2**-23, 2**-23, "float32", ["float32"])
    sizes = differences.abs()
    check_mismatch("", 256, float(sizes.mean()), float(sizes.max()), 2.0, rounding, float(differences.mean()))


def test_a_constant_error_below_the_bound_of_roundings_is_found_by_its_sign():
    torch.manual_seed(0)
    signed(0.001 * torch.randn(256))
    with pytest.raises(WeightSyncError, match=r"signed mean is 0\.0005 \(at most 0\.00031"):
        signed(torch.full((256,), 0.0005))


class Greedy(Lying):
    """Tokens of temperature 0, with the logprobs that are theirs at temperature 1."""

    async def generate(self, token_ids, sampling, **settings):
        (found,) = await LocalEngine.generate(self, token_ids, replace(sampling, temperature=0.0), **settings)
        scores = self.score([[*token_ids, *found.token_ids]])["engine"][0][len(token_ids) :]
        return [replace(found, logprobs=scores)]


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_server_that_samples_otherwise_than_asked_ends_the_run(max_staleness, tmp_path):
    trainer = make_trainer(tmp_path, engine=Greedy(None), callbacks=[StalenessControl(max_staleness)], max_steps=12)
    with pytest.raises(EngineError, match=r"sampled are too (likely|often .*) for temperature=1, .* is e\^-\d\d"):
        trainer.fit(TinyGRPO(lr=0.0, group_size=32), Digits())
    assert trainer.global_step <= 3


class LoadsBeforeTheEnd(Lying):
    """Only the last token of a completion is of weights that came meanwhile."""

    async def generate(self, token_ids, sampling, **settings):
        version = self.weight_version
        (found,) = await LocalEngine.generate(self, token_ids, sampling, **settings)
        for _ in range(200 if version else 0):
            await asyncio.sleep(0.01 if self.weight_version == version else 0)
        return [replace(found, weight_versions=[*found.weight_versions[:-1], self.weight_version])]


def test_ends_alone_after_a_load_are_no_evidence(tmp_path):
    peaked = ModelSpec(config={**CONFIG, "initializer_range": 0.4}, tokenizer="tiny_run.tokenizer", seed=3)
    trainer = make_trainer(tmp_path, engine=LoadsBeforeTheEnd(None), callbacks=[StalenessControl(2)], max_steps=12)
    trainer.fit(TinyGRPO(peaked, lr=0.0, group_size=32, sampling=Sampling(max_new_tokens=12)), Digits(4))
    assert trainer.global_step == 12


class TwoReplicas(LocalEngine):
    """`right` has the weights; `wrong` scores as at the first load, until it is dropped."""

    probe_every_n_loads = 1

    def __init__(self) -> None:
        super().__init__()
        self.first: list[list[float]] | None = None
        self.dropped: list[str] = []

    def score(self, sequences):
        rows = super().score(sequences)["engine"]
        self.first = self.first or rows
        return {"right": rows} if self.dropped else {"right": rows, "wrong": self.first}


class DroppingReplicas(TwoReplicas):
    can_drop_replicas = True

    def drop_replica(self, name, reason):
        self.dropped.append(name)


def test_a_lone_wrong_replica_is_named(tmp_path):
    with pytest.raises(WeightSyncError) as raised:
        fit(tmp_path, TwoReplicas(), lr=1e-5)
    assert "wrong: its" in str(raised.value)
    assert "right:" not in str(raised.value)


def test_a_lone_wrong_replica_is_dropped_where_the_engine_can_do_that(tmp_path):
    engine = DroppingReplicas()
    trainer = fit(tmp_path, engine, lr=1e-5)
    assert engine.dropped == ["wrong"]
    assert trainer.weight_version == 3


@pytest.fixture
def servers(tmp_path):
    """Two fake servers of a model of the policy's shape."""
    folder = tmp_path / "model"
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG)).save_pretrained(folder)
    with ExitStack() as stack:
        made = [FakeServerProcess(folder) for _ in range(2)]
        for server in made:
            stack.callback(server.stop)
            server.start()
        yield made


def test_servers_are_verified_by_digests_and_by_the_probe(tmp_path, servers):
    engine = SGLangEngine(urls=[server.url for server in servers])
    metrics = fit(tmp_path, engine, lr=1e-5, group_size=32).callback_metrics
    assert float(metrics["sync/verified_fraction"]) == 1.0
    assert float(metrics["sync/probe_abs_dlogp_nats"]) < 1e-5
    assert float(metrics["sync/mismatch_present_abs_dlogp_nats"]) < 1e-5
    assert engine.last_sync.verified_by == {server.url: "digests" for server in servers}


def test_a_sync_that_fails_once_is_tried_again_where_the_only_server_kept_its_weights(tmp_path, servers, caplog):
    class FailsOnce(Callback):
        def on_weights_synced(self, trainer, module, weight_version):
            if weight_version == 0:
                servers[0].fault("error", "/update_weights_from_disk", count=1)

    engine = SGLangEngine(urls=[servers[0].url])
    trainer = fit(tmp_path, engine, FailsOnce(), lr=1e-5, max_steps=2)
    assert trainer.weight_version == engine.weight_version == 2
    (warning,) = [record.message for record in caplog.records if "Retrying" in record.message]
    assert "Weight version 1 reached no server" in warning
    assert f"{servers[0].url} serves version 0 again" in warning


@pytest.mark.extra
def test_a_sync_that_fails_twice_ends_the_run(tmp_path, servers):
    class Fails(Callback):
        def on_weights_synced(self, trainer, module, weight_version):
            servers[0].fault("error", "/update_weights_from_disk", count=1)
            servers[0].fault("error", "/update_weights_from_disk", count=1, skip=1)  # of the version before

    with pytest.raises(WeightSyncError, match=r"Weight version 1 reached no server.* serves version 0 again"):
        fit(tmp_path, SGLangEngine(urls=[servers[0].url]), Fails(), lr=1e-5)
    assert num_loads(servers[0]) == 5  # version 0, then twice 1 and 0


class Doubtful(SGLangEngine):
    """One of its servers scores as another model would, after version 1."""

    wrong = ""

    def score(self, sequences):
        scores = super().score(sequences)
        if self.weight_version == 1:
            self.wrong = min(scores)
            scores[self.wrong] = [[value - 1 for value in row] for row in scores[self.wrong]]
        return scores


def num_loads(server: FakeServerProcess) -> int:
    return server.stats()["requests"]["/update_weights_from_disk"]


class WaitsForReturn(Callback):
    def __init__(self, servers: list[FakeServerProcess]) -> None:
        self.servers = {server.url: server for server in servers}

    def on_weights_synced(self, trainer, module, weight_version):
        if weight_version == 1:
            wrong = trainer.engine.wrong
            asyncio.run(until(lambda: num_loads(self.servers[wrong]) == 3))  # versions 0 and 1, and 1 again
            asyncio.run(until(lambda: wrong in trainer.engine.fleet.urls("routable")))


def test_a_server_with_other_scores_is_dropped_and_comes_back_with_the_weights(tmp_path, servers, caplog):
    engine = Doubtful(urls=[server.url for server in servers], timeouts=Deadlines(probe_interval_s=0.5))
    trainer = fit(tmp_path, engine, WaitsForReturn(servers), lr=1e-5, max_steps=2)
    (warning,) = [record.message for record in caplog.records if record.message.startswith("Dropping")]
    assert f"Dropping {engine.wrong} after the weight sync: its probe differs by 1 nats per token" in warning
    assert engine.last_sync.verified_by == {server.url: "digests" for server in servers}
    assert float(trainer.callback_metrics["sync/verified_fraction"]) == 1.0
    assert {server.url: num_loads(server) for server in servers} == {
        server.url: 4 if server.url == engine.wrong else 3 for server in servers
    }
