import json
import re
import socket
import urllib.request
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
from lightning.pytorch.callbacks import Callback
from prometheus_client.parser import text_string_to_metric_families
from scripted_run import ScriptedTrainer, ValidatedModule, batches

from lightrl.callbacks import PrometheusMetrics, RolloutMetrics
from lightrl.testing import make_groups

DOCS = Path(__file__).parents[2] / "docs"
DASHBOARD = json.loads((DOCS / "grafana.json").read_text())


class Scrape(Callback):
    """What a scrape with these headers answers after each iteration; `url` is the address."""

    def __init__(self, served: PrometheusMetrics, **headers: str) -> None:
        self.served, self.headers = served, headers
        self.answers: list[dict[str, float]] = []

    def on_train_batch_end(self, *_: Any) -> None:
        with urllib.request.urlopen(urllib.request.Request(self.served.url, headers=self.headers)) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        samples = [sample for family in families for sample in family.samples]
        self.answers.append({sample.labels["metric"]: sample.value for sample in samples})
        self.names = {sample.name for sample in samples}


def fit(*callbacks: Any) -> None:
    trainer = ScriptedTrainer(callbacks=[RolloutMetrics(), *callbacks], max_epochs=1, enable_progress_bar=False)
    trainer.fit(ValidatedModule(lambda iteration: make_groups([[1.0, float(iteration)]])), batches(2), batches(1))


def test_a_scrape_gives_the_last_iterations_metrics_under_their_own_names():
    served = PrometheusMetrics(port=0)
    scrape = Scrape(served)
    fit(served, scrape)
    first, second = scrape.answers
    assert (first["rollout/reward"], second["rollout/reward"]) == (0.5, 1.0)
    assert (first["lightrl_iteration"], second["lightrl_iteration"]) == (1, 2)
    assert second["lightrl_last_iteration_timestamp_seconds"] >= first["lightrl_last_iteration_timestamp_seconds"] > 0
    assert {"lightrl_rollout_reward", "lightrl_iteration", "lightrl_time_update_s"} <= scrape.names
    assert served.url is None  # nothing is served after the run


def test_the_token_of_the_environment_is_required(monkeypatch):
    monkeypatch.setenv("LIGHTRL_METRICS_TOKEN", "of the test")
    served = PrometheusMetrics(port=0)
    scrape = Scrape(served, Authorization="Bearer of the test")
    fit(served, scrape)
    assert scrape.answers[0]["rollout/reward"] == 0.5
    for header in ({}, {"Authorization": "Bearer another"}):
        served = PrometheusMetrics(port=0)
        with pytest.raises(HTTPError, match="401"):
            fit(served, Scrape(served, **header))
        assert served.url is None  # closed, though the run ended by an exception


def test_an_address_that_others_reach_needs_a_token(monkeypatch):
    monkeypatch.delenv("LIGHTRL_METRICS_TOKEN", raising=False)
    for host in ("0.0.0.0", "10.1.2.3", "::", "trainer-0"):
        with pytest.raises(ValueError, match="Set the variable LIGHTRL_METRICS_TOKEN"):
            PrometheusMetrics(host=host)
    assert PrometheusMetrics(host="localhost").host == "localhost"
    monkeypatch.setenv("LIGHTRL_METRICS_TOKEN", "of the test")
    assert PrometheusMetrics(host="0.0.0.0").port == 9464


def test_a_port_in_use_is_named_before_training():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"PrometheusMetrics\(port={port}, .*: Address already in use"):
            fit(PrometheusMetrics(port=port))


def test_each_curve_of_the_dashboard_is_a_metric():
    described = re.findall(r"^\| `([^`]+)` \|", (DOCS / "reference/metrics.md").read_text(), re.MULTILINE)
    described += [f"val/{name.partition('/')[2]}" for name in described]
    served = {"lightrl_" + re.sub(r"\W", "_", name) for name in described}
    served |= {"lightrl_iteration", "lightrl_last_iteration_timestamp_seconds"}
    curves = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    assert len(curves) > 20
    assert [curve for curve in curves if re.findall(r"lightrl_\w+", curve)[0] not in served] == []
