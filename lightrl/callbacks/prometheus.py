"""PrometheusMetrics: serves the run's newest metrics to Prometheus; needs `pip install prometheus-client`."""

from __future__ import annotations

import hmac
import ipaddress
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from lightrl.callbacks.rl_callback import RLCallback
from lightrl.checks.bounds import check_bounds

if TYPE_CHECKING:
    import lightning as L
    from prometheus_client import CollectorRegistry, Metric

TOKEN_VARIABLE = "LIGHTRL_METRICS_TOKEN"


class PrometheusMetrics(RLCallback):
    """Serves every logged metric at `http://host:port/metrics` while `fit` runs.

    `rollout/reward` becomes `lightrl_rollout_reward{metric="rollout/reward"}`. `lightrl_iteration` counts the finished
    iterations; `lightrl_last_iteration_timestamp_seconds` is the Unix time at which the last one ended, or `fit` began.
    An alert on the age of this timestamp detects a hung run. Only rank 0 serves. docs/grafana.json is a dashboard.

    Args:
        port: 0 picks a free port; its `url` attribute contains it.
        host: address to listen on. Any address but the loopback requires a token in the environment variable
            `LIGHTRL_METRICS_TOKEN`; Prometheus sends it with `authorization: {credentials_file: …}`.

    Raises:
        ValueError: if the address is not the loopback and no token is set, or if prometheus-client is missing.
        OSError: if another process listens on the port.
    """

    def __init__(self, port: int = 9464, *, host: str = "127.0.0.1") -> None:
        check_bounds(0, 65535, port=port)
        try:
            import prometheus_client  # noqa: F401
        except ImportError as error:
            message = f"PrometheusMetrics needs prometheus-client ({error}). Run `pip install prometheus-client`."
            raise ValueError(message) from error
        self.port, self.host = port, host
        self.url: str | None = None
        self._token = os.environ.get(TOKEN_VARIABLE, "")
        if not self._token and not _is_loopback(host):
            raise ValueError(
                f"PrometheusMetrics(host={host!r}) lets others read the metrics. Set the variable {TOKEN_VARIABLE} to "
                "a token that Prometheus sends, or leave host at 127.0.0.1."
            )
        self._values: dict[str, float] = {}  # replaced as a whole, so that another thread may read it
        self._close: Callable[[], None] | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit" or not trainer.is_global_zero or self._close is not None:
            return
        from prometheus_client import CollectorRegistry, start_wsgi_server

        registry = CollectorRegistry()
        registry.register(_Collector(self))
        try:
            server, thread = start_wsgi_server(self.port, self.host, registry=registry)
        except OSError as error:
            raise OSError(f"PrometheusMetrics(port={self.port}, host={self.host!r}): {error.strerror}.") from error
        server.set_app(self._checked(registry))

        def close() -> None:
            server.shutdown()
            thread.join()
            server.server_close()

        self.url, self._close = f"http://{self.host}:{server.server_port}/metrics", close
        self._values = {"lightrl_last_iteration_timestamp_seconds": time.time()}  # also detects a hang in iteration 1

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        self._keep(trainer, lightrl_last_iteration_timestamp_seconds=time.time())

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._keep(trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")  # Lightning does not call it after an exception

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self._close is not None:
            self._close()
            self.url = self._close = None

    def metrics(self) -> Iterator[Metric]:
        """Yields a metric per Prometheus name, with a sample for each logged name that maps to it."""
        from prometheus_client.metrics_core import GaugeMetricFamily

        families: defaultdict[str, dict[str, float]] = defaultdict(dict)
        for name, value in self._values.items():
            prefix = "" if name.startswith("lightrl_") else "lightrl_"
            families[prefix + re.sub(r"\W", "_", name, flags=re.ASCII)][name] = value
        for family, values in families.items():
            gauge = GaugeMetricFamily(family, ", ".join(values), labels=["metric"])
            for name, value in values.items():
                gauge.add_metric([name], value)
            yield gauge

    def _keep(self, trainer: L.Trainer, **extra: float) -> None:
        if self._close is not None:
            logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
            self._values = {**self._values, **logged, "lightrl_iteration": float(trainer.global_step), **extra}

    def _checked(self, registry: CollectorRegistry) -> Any:
        """Returns the WSGI application, which answers only requests with the token."""
        from prometheus_client import make_wsgi_app

        serve, expected = make_wsgi_app(registry), f"Bearer {self._token}".encode()

        def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
            sent = environ.get("HTTP_AUTHORIZATION", "").encode("latin1")
            if self._token and not hmac.compare_digest(sent, expected):
                start_response("401 Unauthorized", [("WWW-Authenticate", "Bearer"), ("Content-Type", "text/plain")])
                return [b"Send the token as `Authorization: Bearer ...`.\n"]
            answer: Iterable[bytes] = serve(environ, start_response)
            return answer

        return application


class _Collector:
    def __init__(self, owner: PrometheusMetrics) -> None:
        self.collect = owner.metrics


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
