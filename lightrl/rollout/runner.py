"""TrajectoryRunner: runs a workflow for a group's trajectories, in rank 0's process or in a workflow worker.

InFlightCompletions keeps the completions of running groups, and the environments' answers to them, so that a resumed
run can continue from there. AdmissionBatch makes groups that start together reach the engine together. Rewards computes
rewards. AdmissionBatch and Rewards exist only in rank 0's process.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

from lightrl.checks.printable import count_text
from lightrl.checks.user_code import named_user_code
from lightrl.columns import registered
from lightrl.concurrency.abandon import Tasks, abandon, each_when_done, is_abandoned
from lightrl.engines.engine import Completion, RolloutEngine
from lightrl.errors import EngineError, RewardError, RolloutError
from lightrl.rewards import FailureLog, RewardResult, RewardWorker
from lightrl.rollout.group_scheduler import DropCounter
from lightrl.rollout.prompts import State
from lightrl.trace import record, span
from lightrl.trajectory import Attached, Group, Prompt, Sampling, Trajectory, sampling_seed
from lightrl.workflows.workflow import GroupResult, RunResult, TurnLog, Workflow, check_trajectory, self_cancellation

# Event-loop ticks after which every new trajectory has reached its first `generate`. One tick starts the group's task,
# and one the trajectory's or request's task. The rest allow for a workflow that first awaits something already done.
ADMISSION_TICKS = 5


@dataclass(eq=False)
class InFlightCompletions:
    """The completions of running groups, keyed by the group's seed name. Belongs to one event loop."""

    workflow: Workflow
    started: dict[int, Completion] = field(default_factory=dict)  # seed → completion from a checkpoint
    _completions: dict[str, dict[int, Completion | None]] = field(default_factory=dict)  # None: in progress
    _answers: dict[str, list[list[Any]]] = field(default_factory=dict)  # session → answers from a checkpoint
    _logs: dict[str, dict[str, TurnLog]] = field(default_factory=dict)  # seed name → session → log

    def open(self, seed_name: str) -> None:
        """Adds a training group when it starts, so that checkpoints include it."""
        self._completions.setdefault(seed_name, {})

    def close(self, seed_name: str) -> None:
        """Forgets a group that is done or given up."""
        self._completions.pop(seed_name, None)
        self._logs.pop(seed_name, None)

    def hand_over(self, seed_name: str, samples: Sequence[int], run_seed: int) -> State | None:
        """Removes and returns these samples' state from a checkpoint, for `take_over`; returns None in validation."""
        if seed_name not in self._completions:
            return None
        started: dict[int, Completion] = {}
        for sample in samples:
            seeds = (sampling_seed(run_seed, seed_name, sample, turn) for turn in itertools.count())
            started |= {seed: self.started.pop(seed) for seed in itertools.takewhile(self.started.__contains__, seeds)}
        sessions = {f"{seed_name}/{sample}" for sample in samples} & self._answers.keys()
        return {"started": started, "answers": {session: self._answers.pop(session) for session in sessions}}

    def take_over(self, seed_name: str, parts: State) -> None:
        """Opens a training group in this worker, with the result of `hand_over`."""
        self.open(seed_name)
        self.started |= parts["started"]
        self._answers |= parts["answers"]

    def completions(self, seed_name: str) -> dict[int, Completion | None]:
        """Returns the dict that callers fill with a running group's completions; in validation, a throwaway dict."""
        return self._completions.get(seed_name, {})

    def turn_log(self, seed_name: str, session: str) -> TurnLog | None:
        """Returns the log of a training rollout if a resumed run can continue it; otherwise None."""
        if seed_name not in self._completions or not self.workflow.continues:
            return None
        answers = [(method, answer, state) for method, answer, state in self._answers.pop(session, [])]
        log = self._logs.setdefault(seed_name, {})[session] = TurnLog(answers)
        return log

    def state_dict(self, unfinished: Mapping[int, Completion], states_of_workers: Sequence[State] = ()) -> State:
        """Returns the completions and answers for a checkpoint, including those in `states_of_workers`.

        `unfinished` maps seeds to the engine's completions in progress.
        """
        logs = [item for logs in self._logs.values() for item in logs.items()]
        completions: dict[int, Any] = {}
        if self.workflow.continues:
            generated = {seed: item for group in self._completions.values() for seed, item in group.items()}
            current = {**self.started, **{seed: item or unfinished.get(seed) for seed, item in generated.items()}}
            completions = {seed: item.state_dict() for seed, item in current.items() if item and len(item.token_ids)}
        answers = self._answers | {session: log.state_dict() for session, log in logs if log.answers}
        for state in states_of_workers:
            completions |= dict(state["written"])
            answers |= state["answers"]
        return {"written": [[seed, item] for seed, item in completions.items()], "answers": answers}

    def load_state_dict(self, state: State) -> None:
        self.started = {seed: Completion.from_state(item) for seed, item in state["written"]}
        self._answers = dict(state["answers"])


@dataclass(eq=False)
class TrajectoryRunner:
    """Runs the workflow for groups with this process's engine. Belongs to one event loop."""

    engine: RolloutEngine  # has been started
    workflow: Workflow

    def __post_init__(self) -> None:
        self.in_flight = InFlightCompletions(self.workflow)

    async def run_group(
        self, prompt: Prompt, samples: Sequence[int], sampling: Sampling, run_seed: int, seed_name: str
    ) -> AsyncGenerator[GroupResult, None]:
        """Yields each sample's trajectory, or the error that drops it, when it is done; sets no deadline.

        Args:
            sampling: settings for every turn; this method adds the seed.
            run_seed, seed_name: together with sample and turn, determine everything that is sampled.

        Raises:
            EngineError: from the engine.
        """
        sampling = self.workflow.sampling_of(prompt, sampling)
        generate = _GroupGenerate(self.engine, self.in_flight, prompt, samples, sampling, run_seed, seed_name)
        missing = dict.fromkeys(samples)
        name = f"{type(self.workflow).__name__}.run_group"
        error: RolloutError | RewardError
        try:
            with named_user_code(name, on=f"prompt {prompt.id!r}"):
                async with contextlib.aclosing(self.workflow.run_group(prompt, generate)) as results:
                    async for sample, result in results:
                        if sample not in missing:
                            raise RolloutError(f"{name} yielded an unrequested sample {sample!r} of {prompt.id!r}.")
                        del missing[sample]
                        is_checked = self.workflow.samples_apart  # lightrl's own `run_group` checked or built it
                        yield sample, result if is_checked else self._check(result, prompt)
                error = RolloutError(f"{name} ended without a trajectory for prompt {prompt.id!r}.")
        except (RolloutError, RewardError) as raised:
            error = raised
        except asyncio.CancelledError:
            if is_abandoned(asyncio.current_task()):
                raise
            error = self_cancellation(name, prompt)
        for sample in missing:
            yield sample, error

    def _check(self, result: object, prompt: Prompt) -> RunResult:
        if isinstance(result, RolloutError | RewardError):
            return result
        try:
            return check_trajectory(result, self.workflow, prompt)
        except RolloutError as error:
            return error

    def end_group(self, seed_name: str) -> None:
        self.in_flight.close(seed_name)

    async def states_of_workers(self) -> list[State]:
        """Returns an empty list, because all completions in flight belong to this process."""
        return []


@dataclass(eq=False)
class _GroupGenerate:
    """Calls the policy for the trajectories in one group; see `GroupGenerate`."""

    engine: RolloutEngine
    in_flight: InFlightCompletions
    prompt: Prompt
    samples: Sequence[int]
    sampling: Sampling
    run_seed: int
    seed_name: str

    def for_sample(self, sample: int) -> _TurnGenerate:
        return _TurnGenerate(self, sample, f"{self.seed_name}/{sample}")

    async def for_all(self, token_ids: list[int]) -> AsyncGenerator[tuple[int, Completion | RolloutError], None]:
        """Yields each sample's completion when it is done; continues or reuses completions from a checkpoint."""
        seeds = {sample: sampling_seed(self.run_seed, self.seed_name, sample, 0) for sample in self.samples}
        in_flight = self.in_flight.completions(self.seed_name)
        futures: dict[int, asyncio.Future[Completion]] = {}
        unfinished: dict[int, Completion | None] = {}  # sample → partial completion from a checkpoint, or None
        for sample, seed in seeds.items():
            in_flight[seed] = None
            started = self.in_flight.started.pop(seed, None)
            if started is None or started.finish_reason == "abort":
                unfinished[sample] = started
            else:
                futures[sample] = asyncio.get_running_loop().create_future()
                futures[sample].set_result(started)
        start_ns = time.perf_counter_ns()
        if unfinished:
            request: dict[str, Any] = {**self.prompt.attached()}
            if self.engine.continues_completions and any(unfinished.values()):
                request["started"] = [*unfinished.values()]
            samplings = [self.sampling.with_seed(seeds[sample]) for sample in unfinished]
            generating = self.engine.generate_group(token_ids, samplings, session=self.seed_name, **request)
            futures |= zip(unfinished, generating, strict=True)
        async with contextlib.aclosing(each_when_done(futures)) as done:
            async for sample, generated in done:
                record("generate", "generate", "generations", start_ns, session=f"{self.seed_name}/{sample}")
                completion = in_flight[seeds[sample]] = generated.result()
                try:
                    yield sample, check_completion(completion, self.sampling, 0, self.prompt)
                except RolloutError as error:
                    yield sample, error


@dataclass(eq=False)
class _TurnGenerate:
    """Calls the policy for one trajectory, turn by turn."""

    group: _GroupGenerate
    sample: int
    session: str

    def __post_init__(self) -> None:
        self.num_turns = 0
        self.turn_log: TurnLog | None = self.group.in_flight.turn_log(self.group.seed_name, self.session)

    async def __call__(
        self,
        token_ids: list[int],
        *,
        max_new_tokens: int | None = None,
        grammar: str = "",
        **attached: Unpack[Attached],
    ) -> Completion:
        group, turn = self.group, self.num_turns
        self.num_turns += 1
        seed = sampling_seed(group.run_seed, group.seed_name, self.sample, turn)
        longest = min(group.sampling.max_new_tokens, max_new_tokens or group.sampling.max_new_tokens)
        shortest = min(group.sampling.min_new_tokens, longest)
        sampling = replace(group.sampling, seed=seed, max_new_tokens=longest, min_new_tokens=shortest, grammar=grammar)
        if grammar:
            group.engine.check_sampling(sampling)
        in_flight = group.in_flight.completions(group.seed_name)
        in_flight[seed] = None
        with span("generate", "generate", "generations", session=self.session, prompt=len(token_ids)):
            completion = await self._generate(token_ids, sampling, group.prompt.attached(**attached))
        in_flight[seed] = completion
        return check_completion(completion, sampling, turn, group.prompt)

    async def _generate(self, token_ids: list[int], sampling: Sampling, attached: Attached) -> Completion:
        """Returns the engine's completion; continues a partial completion from a checkpoint if there is one."""
        engine = self.group.engine
        request: dict[str, Any] = {**attached}
        started = self.group.in_flight.started.pop(sampling.seed, None)
        if started is not None and started.finish_reason != "abort":
            return started
        if started is not None and engine.continues_completions and not sampling.grammar:
            request["started"] = started
        (completion,) = await engine.generate(token_ids, sampling, session=self.session, **request)
        return completion


def check_completion(completion: Completion, sampling: Sampling, turn: int, prompt: Prompt) -> Completion:
    """Returns the completion; raises EngineError if it is malformed, and RolloutError if it was aborted."""
    lengths = [len(values) for values in (completion.token_ids, completion.logprobs, completion.weight_versions)]
    if len(set(lengths)) > 1:
        raise EngineError(
            f"The engine returned {count_text(lengths[0], 'token id')}, {count_text(lengths[1], 'logprob')} and "
            f"{count_text(lengths[2], 'weight version')} for turn {turn} of prompt {prompt.id!r}. Each token needs "
            "one of each."
        )
    for column in registered():
        is_required = column.required_if and getattr(sampling, column.required_if) and completion.token_ids
        if is_required and column.name not in completion.columns:
            reason = column.requirement(sampling)
            raise EngineError(f"The engine returned no {column.name}, but {reason} in Completion.columns.")
    if completion.finish_reason == "abort":
        raise RolloutError(f"The engine aborted turn {turn} of prompt {prompt.id!r}.")
    return completion


@dataclass(eq=False)
class AdmissionBatch:
    """Pauses the engine inside `async with admission.batch():`, so that it admits all requests together."""

    engine: RolloutEngine  # has been started
    resuming: set[asyncio.Task[None]] = field(default_factory=set)  # must not be cancelled
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @contextlib.asynccontextmanager
    async def batch(self) -> AsyncIterator[None]:
        """Waits for the previous batch and for the engine's pause; resumes the engine at the end or if cancelled."""
        async with self._lock:
            try:
                await self.engine.pause()
                yield
                for _ in range(ADMISSION_TICKS):
                    await asyncio.sleep(0)
            finally:
                resuming = asyncio.get_running_loop().create_task(self.engine.resume())
                self.resuming.add(resuming)
                resuming.add_done_callback(self.resuming.discard)
                try:
                    await asyncio.shield(resuming)
                except asyncio.CancelledError:
                    await asyncio.wait({resuming})
                    raise


@dataclass(eq=False)
class Rewards:
    """Computes rewards; trajectories that finish together share a request. Belongs to the controller's event loop."""

    reward_worker: RewardWorker  # has been started
    drops: DropCounter  # counts trajectories with a failed reward
    tasks: Tasks  # ends the run if the worker fails
    workflow: Workflow  # cleans up after each trajectory
    failures: FailureLog | None = None
    metrics: Collection[str] = ()  # names that each reward must report
    _unsent: list[tuple[Trajectory, asyncio.Future[bool]]] = field(default_factory=list, init=False)
    _deferred: dict[int, tuple[Trajectory, asyncio.Future[bool]]] = field(default_factory=dict, init=False)  # by id()
    _results: dict[asyncio.Future[bool], asyncio.Future[RewardResult]] = field(default_factory=dict, init=False)

    def compute(self, trajectory: Trajectory) -> asyncio.Future[bool]:
        """Sets a trajectory's reward; the future gives False if the reward failed. The worker enforces a deadline."""
        loop = asyncio.get_running_loop()
        is_kept: asyncio.Future[bool] = loop.create_future()
        if trajectory.workspace is not None:
            is_kept.add_done_callback(lambda _: self.workflow.clean_up(trajectory))
        if not self._unsent:
            loop.call_soon(self._send)  # after the other trajectories that finish in this tick
        self._unsent.append((trajectory, is_kept))
        return is_kept

    def log_failed(self, error: RolloutError | RewardError, group_id: int, sample: int) -> None:
        """Logs the trajectory that a workflow had recorded before it failed."""
        if self.failures is not None and (failed := getattr(error, "trajectory", None)) is not None:
            failed.group_id, failed.sample = group_id, sample
            self.failures.write(failed, error)

    def defer(self, trajectory: Trajectory) -> None:
        """Starts computing a reward; `wait_for` waits for it."""
        self._deferred[id(trajectory)] = (trajectory, self.compute(trajectory))

    async def wait_for(self, groups: Sequence[Group], on_reward: Callable[[], None]) -> None:
        """Requests missing rewards of these groups, and waits until all rewards are set or one fails the run.

        Removes trajectories with a failed reward from their groups. Calls `on_reward` for each trajectory. Raises
        RolloutError if too many rewards failed.
        """
        waiting: dict[int, asyncio.Future[bool]] = {}
        for item in (item for group in groups for item in group.trajectories):
            if item.reward is not None:
                self._deferred.pop(id(item), None)
                on_reward()
                continue
            if id(item) not in self._deferred:
                self.defer(item)
            waiting[id(item)] = self._deferred[id(item)][1]
            waiting[id(item)].add_done_callback(lambda _: on_reward())
        if not waiting:
            return
        done, _ = await asyncio.wait(waiting.values(), return_when=asyncio.FIRST_EXCEPTION)
        for is_kept in done:
            is_kept.result()  # raises if the reward worker failed
        num_expected = sum(self.drops.settings.size_of(group.prompt) for group in groups)
        for key, is_kept in waiting.items():
            del self._deferred[key]
            self.drops.count_trajectory(num_expected, is_failed=not is_kept.result())
        self.drops.begin_iteration()
        for group in groups:
            group.trajectories = [item for item in group.trajectories if item.reward is not None]

    def cancel(self, rewards: Iterable[asyncio.Future[bool]]) -> None:
        for is_kept in rewards:
            if (result := self._results.pop(is_kept, None)) is not None:
                result.cancel()
            abandon([is_kept])

    def close(self) -> None:
        self.cancel(is_kept for _, is_kept in [*self._unsent, *self._deferred.values()])

    def _send(self) -> None:
        unsent = [(trajectory, is_kept) for trajectory, is_kept in self._unsent if not is_kept.done()]
        self._unsent = []
        start_ns = time.perf_counter_ns()
        try:
            computing = self.reward_worker.compute_rewards([trajectory for trajectory, _ in unsent])
        except Exception as error:  # noqa: BLE001  # the waiting tasks raise it
            self.tasks.fail(error)
            for _, is_kept in unsent:
                is_kept.set_exception(error)
            return
        for (trajectory, is_kept), result in zip(unsent, computing, strict=True):
            self._results[is_kept] = result
            result.add_done_callback(functools.partial(self._on_result, trajectory, is_kept, start_ns))

    def _on_result(
        self, trajectory: Trajectory, is_kept: asyncio.Future[bool], start_ns: int, result: asyncio.Future[RewardResult]
    ) -> None:
        """Sets the reward, or drops the trajectory if its reward failed; any other error ends the run."""
        if self._results.pop(is_kept, None) is None or result.cancelled() or is_kept.cancelled():
            is_kept.cancel()
            return
        record("reward", "reward", "rewards", start_ns)
        error = result.exception()
        if error is None:
            result.result().apply_to(trajectory)
            if lacking := sorted({*self.metrics} - trajectory.metrics.keys()):
                problem = f"The reward of a trajectory for prompt {trajectory.prompt.id!r} lacks {lacking}; it has"
                error = RewardError(f"{problem} {sorted(trajectory.metrics)}. Return all of them.", reason="invalid")
        if isinstance(error, RewardError | RolloutError):
            self.drops.drop_failed(error, trajectory.prompt)
            if self.failures is not None and isinstance(error, RewardError):
                self.failures.write(trajectory, error)
        elif error is not None:
            self.tasks.fail(error)
            is_kept.set_exception(error)
            return
        is_kept.set_result(error is None)
