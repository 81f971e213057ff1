"""SimulatedCluster: servers, ranks and failures on a clock that is a number, driven by GroupScheduler and ServerFleet.

A server writes one token of each of its completions in a step. A step reads the weights and the key-values of all of
them from memory, which bounds its time; so it takes longer the more completions there are, and hardly less for one.
Weights arrive over the network; a server that is interrupted then computes the key-values of what it holds again.
"""

from __future__ import annotations

import functools
import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from benchmarks.stream_order import OrderOfScheduler
from lightrl.engines.servers.fleet import ServerFleet
from lightrl.engines.servers.server import Server as EngineServer
from lightrl.engines.sglang.client import SGLangClient

MEMORY_BYTES_PER_S = 3.35e12  # an H100's or H800's data sheet
# A line through published speeds of one request (vLLM, bf16, an A100 of 2.039e12 bytes/s): seconds of a step, by bytes
# of parameters that it reads. https://qwen.readthedocs.io/en/v2.5/benchmark/speed_benchmark.html
PUBLISHED_TOKENS_PER_S = {0.99e9: 311.55, 3.09e9: 183.33, 14.14e9: 84.28, 27.98e9: 46.30, 63.97e9: 22.13}
MEMORY_EFFICIENCY = 0.74
STEP_OVERHEAD_S = 0.0029
# Assumed
MEMORY_FRACTION = 0.85  # of the GPU's for weights and key-values
SYNC_OVERHEAD_S = 1.0  # pauses, checks and probes around the bytes
RESTART_S = 600.0  # of a host, or of the run from its checkpoint
CAUSES = ("rollout", "tail", "sync", "lost")


@dataclass(frozen=True)
class Lengths:
    """Of completions: lognormal, cut off at the cap."""

    median: float
    sigma: float
    cap: int
    prompt: int

    def draw(self, name: str) -> int:
        return max(1, min(self.cap, round(self.median * math.exp(random.Random(name).gauss(0, self.sigma)))))

    @property
    def mean(self) -> float:
        """Without the cap, which lowers it a little."""
        return self.median * math.exp(self.sigma**2 / 2)

    @functools.cached_property
    def mean_of_tokens(self) -> float:
        """The length of the completion that a token is in, on average over tokens."""
        lengths = [self.draw(f"token/{number}") for number in range(4096)]
        return sum(length**2 for length in lengths) / sum(lengths)


@dataclass(frozen=True)
class Hardware:
    """Of a server."""

    weight_bytes: float
    kv_bytes: float  # of a token
    tp: int
    memory_bytes: float  # of a GPU
    flops: float
    prefill_mfu: float
    link_bytes_per_s: float
    step_overhead_s: float = STEP_OVERHEAD_S

    @staticmethod
    def assumed() -> dict[str, float]:
        return {
            "memory_bytes_per_s": MEMORY_BYTES_PER_S, "memory_efficiency": MEMORY_EFFICIENCY,
            "memory_fraction": MEMORY_FRACTION, "step_overhead_s": STEP_OVERHEAD_S,
            "sync_overhead_s": SYNC_OVERHEAD_S, "restart_s": RESTART_S,
        }  # fmt: skip

    def step_s(self, num: int, context: float) -> float:
        """Time of one token of each of `num` completions with `context` tokens together."""
        read = (self.weight_bytes + self.kv_bytes * context) / (MEMORY_BYTES_PER_S * MEMORY_EFFICIENCY)
        computed = self.weight_bytes * num / (self.flops * self.prefill_mfu)  # 2 operations per parameter of 2 bytes
        return self.step_overhead_s + max(read, computed) / self.tp

    def prefill_s(self, tokens: float) -> float:
        return self.weight_bytes * tokens / (self.flops * self.prefill_mfu) / self.tp

    def slots(self, tokens_each: float) -> int:
        room = self.tp * self.memory_bytes * MEMORY_FRACTION - self.weight_bytes
        return max(1, int(room / (self.kv_bytes * tokens_each)))

    @property
    def sync_s(self) -> float:
        return SYNC_OVERHEAD_S + self.weight_bytes / self.link_bytes_per_s


class Request(NamedTuple):
    end: float  # steps of the server at which it is complete
    position: int
    sample: int
    length: int
    counted: EngineServer | None


@dataclass
class Server:
    """Completions that share a server's steps."""

    url: str
    host: int
    hardware: Hardware
    slots: int
    prompt: int
    running: list[Request] = field(default_factory=list)  # a heap
    steps: float = 0.0
    context: float = 0.0  # tokens of all that run
    at: float = 0.0
    paused_until: float = 0.0
    is_lost: bool = False
    stamp: int = 0  # of its next event
    busy_s: float = 0.0
    away_s: dict[str, float] = field(default_factory=lambda: {"sync": 0.0, "lost": 0.0})

    def advance(self, now: float) -> None:
        """Writes what it can until now."""
        begin = max(self.at, min(now, self.paused_until))
        self.away_s["lost" if self.is_lost else "sync"] += begin - self.at
        if self.running and now > begin:
            steps = (now - begin) / self.hardware.step_s(len(self.running), self.context)
            self.steps += steps
            self.context += steps * len(self.running)
            self.busy_s += now - begin
        self.at = now

    def next_end(self) -> float:
        if not self.running:
            return math.inf
        step_s = self.hardware.step_s(len(self.running), self.context)
        return max(self.at, self.paused_until) + max(0.0, self.running[0].end - self.steps) * step_s

    def add(self, request: Request) -> None:
        self.context += self.prompt
        heapq.heappush(self.running, request._replace(end=self.steps + request.length))

    def pop_done(self) -> list[Request]:
        done = []
        while self.running and self.running[0].end <= self.steps + 1e-6:
            done.append(heapq.heappop(self.running))
            self.context -= self.prompt + done[-1].length
        if not self.running:
            self.context = 0.0  # without rounding
        return done

    def pause(self, seconds: float) -> None:
        self.paused_until = max(self.at, self.paused_until) + seconds

    def empty(self) -> list[Request]:
        """What was under way."""
        requests, self.running, self.context = self.running, [], 0.0
        return requests


@dataclass(frozen=True)
class Outcome:
    """Of the iterations that were counted."""

    seconds_per_iteration: float
    idle: dict[str, float]  # fractions of all GPU seconds, by cause
    lost_hosts: int


class SimulatedCluster:
    """A run; `run` gives its outcome.

    Args:
        servers: the host of each.
        ranks: GPUs of the trainer, on the first hosts.
        update_s: seconds of an iteration's score and update, by its tokens.
        is_colocated: the servers are on the trainer's GPUs, which do one or the other.
        interrupts: completions under way go on under new weights; else a server loads them when it has none left.
        failures_per_host_s: of each host.
    """

    def __init__(
        self,
        hardware: Hardware,
        lengths: Lengths,
        *,
        servers: Sequence[int],
        ranks: int,
        is_colocated: bool,
        update_s: Callable[[float], float],
        prompts: int,
        group_size: int,
        max_staleness: int,
        interrupts: bool = True,
        failures_per_host_s: float = 0.0,
        hosts: int = 1,
        gpus_per_host: int = 8,
    ) -> None:
        slots = hardware.slots(lengths.prompt + lengths.mean)
        self.hardware, self.lengths, self.ranks, self.update_s = hardware, lengths, ranks, update_s
        self.is_colocated, self.interrupts, self.group_size = is_colocated, interrupts, group_size
        self.hosts, self.gpus_per_host, self.failures_per_host_s = hosts, gpus_per_host, failures_per_host_s
        room = max(prompts, 2 * len(servers) * slots // group_size)
        concurrent = {"max_concurrent": room} if max_staleness else {}
        self.order = OrderOfScheduler(groups_per_iteration=prompts, max_staleness=max_staleness, **concurrent)
        self.fleet = ServerFleet()
        self.servers = {
            f"http://{number}": Server(f"http://{number}", host, hardware, slots, lengths.prompt)
            for number, host in enumerate(servers)
        }
        self.now, self.version, self.lost_hosts = 0.0, 0, 0
        self._update = 0  # number of the present one, or of the restart after a failure
        self.trainer = {"busy": 0.0, "rollout": 0.0, "sync": 0.0, "lost": 0.0}
        self._doing, self._since, self._trained_tokens = "rollout", 0.0, 0.0
        self._events: list[tuple[float, int, str, Any]] = []
        self._num_events = 0
        self._lengths: dict[int, list[int]] = {}  # of the samples of groups in flight
        self._left: dict[int, int] = {}  # samples that are not done
        self._unplaced: deque[Request] = deque()
        self._random = random.Random(0)
        for url in self.servers:
            self.fleet.admit(self.fleet.join(EngineServer(SGLangClient(url))), 0)

    def run(self, *, warm_up: int, iterations: int) -> Outcome:
        if self.failures_per_host_s:
            self._at(self._random.expovariate(self.failures_per_host_s * self.hosts), "fail", None)
        self._start_groups()
        begin = self._measured()
        for target in (warm_up, warm_up + iterations):
            begin = self._measured() if target > warm_up else begin
            while self.version < target:
                self._next_event()
        end = self._measured()
        seconds = end["at"] - begin["at"]
        gpus = self.hosts * self.gpus_per_host
        busy = sum(end[name] - begin[name] for name in ("train", "decode"))
        idle = {cause: (end[cause] - begin[cause]) / (gpus * seconds) for cause in CAUSES if cause != "tail"}
        if self.is_colocated:  # while the ranks wait, servers decode, or do not
            idle["rollout"] = 0.0
        idle["tail"] = max(0.0, 1 - busy / (gpus * seconds) - sum(idle.values()))
        return Outcome(seconds / iterations, {cause: idle[cause] for cause in CAUSES}, self.lost_hosts)

    def _measured(self) -> dict[str, float]:
        """GPU seconds so far."""
        for server in self.servers.values():
            server.advance(self.now)
        self._do(self._doing)
        tp = self.hardware.tp
        away = {cause: sum(one.away_s[cause] for one in self.servers.values()) * tp for cause in ("sync", "lost")}
        ranks = 0 if self.is_colocated else self.ranks  # else counted with the servers on their GPUs
        return {
            "at": self.now,
            "train": self.trainer["busy"] * self.ranks,
            "decode": sum(one.busy_s for one in self.servers.values()) * tp,
            "rollout": self.trainer["rollout"] * ranks,
            **{cause: away[cause] + self.trainer[cause] * ranks for cause in away},
        }

    # ------------------------------------------------------------------ events

    def _at(self, time: float, kind: str, what: Any) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time, self._num_events, kind, what))

    def _next_event(self) -> None:
        time, _, kind, what = heapq.heappop(self._events)
        if kind == "server" and self.servers[what[0]].stamp != what[1]:
            return  # it has got other requests since
        self.now = time
        getattr(self, f"_on_{kind}")(what)

    def _on_server(self, what: tuple[str, int]) -> None:
        server = self.servers[what[0]]
        server.advance(self.now)
        has_finished, done = False, server.pop_done()
        for request in done:
            self.fleet.end_request(request.counted, request.length)
            self._left[request.position] -= 1
            if not self._left[request.position]:
                self.order.finish(request.position)
                has_finished = True
        if self.fleet.servers[server.url].state == "draining" and not server.running:
            server.pause(self.hardware.sync_s)
            self._at(server.paused_until, "loaded", server.url)
        self._schedule(server)
        self._place_waiting(len(done))
        if has_finished:
            self._start_groups()
            self._train()

    def _on_updated(self, number: int) -> None:
        if number != self._update:
            return  # it was lost
        self.version += 1
        self._do("sync")
        self._at(self.now + self.hardware.sync_s, "synced", number)
        for server in self.servers.values():
            server.advance(self.now)
            if server.is_lost:
                continue
            if self.interrupts or not server.running:
                server.pause(self.hardware.sync_s + self.hardware.prefill_s(server.context))
                self.fleet.admit(self.fleet.servers[server.url], self.version)
                self._schedule(server)
            else:
                self.fleet.drain(self.fleet.servers[server.url])  # it gets weights when its requests are done

    def _on_synced(self, number: int) -> None:
        if number == self._update:
            self._do("rollout")
            self._start_groups()
            self._train()

    def _on_loaded(self, url: str) -> None:
        if not self.servers[url].is_lost:
            self.fleet.admit(self.fleet.servers[url], self.version)
            self._place_waiting(self.servers[url].slots)

    def _on_fail(self, _: None) -> None:
        self._at(self.now + self._random.expovariate(self.failures_per_host_s * self.hosts), "fail", None)
        self.lost_hosts += 1
        host = self._random.randrange(self.hosts)
        has_ranks = host < -(-self.ranks // self.gpus_per_host)
        for server in self.servers.values():
            if server.host == host or has_ranks:
                server.advance(self.now)
                server.is_lost = True
                self.fleet.lose(self.fleet.servers[server.url], "its host failed")
                for request in server.empty():  # decoded again from the start
                    self.fleet.end_request(request.counted, request.length)
                    self._unplaced.append(request)
                server.stamp += 1
                server.paused_until = self.now + RESTART_S
                self._at(server.paused_until, "back", server.url)
        if has_ranks:
            was_updating = self._doing == "busy"
            self._do("lost")
            self._update += 1
            self._at(self.now + RESTART_S, "restarted" if was_updating else "synced", self._update)
        self._place_waiting(len(self._unplaced))

    def _on_back(self, url: str) -> None:
        server = self.servers[url]
        if self.now < server.paused_until:
            return  # lost again
        server.advance(self.now)
        server.is_lost = False
        self.fleet.admit(self.fleet.servers[url], self.version)
        self._place_waiting(server.slots)

    def _on_restarted(self, number: int) -> None:
        if number == self._update:
            self._begin_update()

    # ------------------------------------------------------------------ what follows

    def _do(self, what: str) -> None:
        self.trainer[self._doing] += self.now - self._since
        self._doing, self._since = what, self.now

    def _train(self) -> None:
        if self._doing == "rollout" and (taken := self.order.take(self.version)):
            # a group's prompt goes through the model once
            self._trained_tokens = sum(sum(self._lengths.pop(one)) + self.lengths.prompt for one in taken)
            self._update += 1
            self._begin_update()

    def _begin_update(self) -> None:
        self._do("busy")
        self._at(self.now + self.update_s(self._trained_tokens), "updated", self._update)

    def _start_groups(self) -> None:
        if self.order.max_staleness == 0 and self._doing != "rollout":
            return  # as in the controller
        touched: set[str] = set()
        for position in self.order.start(self.version):
            lengths = [self.lengths.draw(f"{position}/{sample}") for sample in range(self.group_size)]
            self._lengths[position], self._left[position] = lengths, self.group_size
            for sample, length in enumerate(lengths):
                self._place(Request(0.0, position, sample, length, None), touched)
        self._schedule_all(touched)

    def _place(self, request: Request, touched: set[str]) -> None:
        counted = self.fleet.choose(f"{request.position}/{request.sample}")
        url = counted.url if counted is not None else ""
        if counted is None or len(self.servers[url].running) >= self.servers[url].slots:
            self._unplaced.append(request)
            return
        server = self.servers[url]
        if url not in touched:
            server.advance(self.now)
            touched.add(url)
        self.fleet.start_request(counted, request.length)
        server.add(request._replace(counted=counted))

    def _place_waiting(self, room: int) -> None:
        touched: set[str] = set()
        for _ in range(min(room, len(self._unplaced))):
            self._place(self._unplaced.popleft(), touched)
        self._schedule_all(touched)

    def _schedule_all(self, urls: set[str]) -> None:
        for url in sorted(urls):
            self._schedule(self.servers[url])

    def _schedule(self, server: Server) -> None:
        server.stamp += 1
        end = server.next_end()
        if end < math.inf:
            self._at(end, "server", (server.url, server.stamp))
