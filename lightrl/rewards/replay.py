"""FailureLog: writes the trajectories on which a reward or an agent failed; replay: recomputes their rewards.

Each line is one failure: {"reason": "timeout", "message": "...", ..., "trajectory": {...}, "texts": {...}}. `replay`
also reads the trajectory log's files, whose lines also contain trajectories.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightrl.checks.bounds import check_bounds
from lightrl.checks.files import write_problem
from lightrl.errors import RewardError, RolloutError
from lightrl.rewards.hook import RewardWorker, make_reward_worker
from lightrl.rewards.parts import Reward
from lightrl.rewards.reward_result import RewardFunction, RewardResult
from lightrl.trajectory import Trajectory, encode_json, read_records

_logger = logging.getLogger(__name__)

Decode = Callable[..., Any]
_MAX_CHARS = 4000  # maximum characters of a text in a line; the problem log truncates messages to the same length


class FailureLog:
    """Writes trajectories with failed rewards to a file, and failed workflows' trajectories to `failed_rollouts.jsonl`.

    Args:
        path: the JSONL file to append to; its folder is created at the first failure.
        decode: turns a token into the text that `lightrl inspect` shows.
        max_failures: maximum number of lines per process, so that a broken reward does not fill the disk.
    """

    def __init__(self, path: str | Path, decode: Decode | None = None, *, max_failures: int = 1000) -> None:
        self.path, self._decode, self._num_left = Path(path), decode, max_failures

    def write(self, trajectory: Trajectory, error: RewardError | RolloutError) -> None:
        if self._num_left <= 0:
            return
        self._num_left -= 1
        is_reward, text, decode = isinstance(error, RewardError), str(error), self._decode
        path = self.path if is_reward else self.path.with_name("failed_rollouts.jsonl")
        reason, prompt = getattr(error, "reason", "rollout"), trajectory.prompt
        record = {  # the columns of `lightrl inspect` come first
            "iteration": trajectory.newest_version + 1, "group": trajectory.group_id, "sample": trajectory.sample,
            "length": trajectory.num_loss_tokens, "finish": f"dropped: {'reward_' * is_reward}{reason}",
            "prompt": prompt.id, "prompt_text": prompt.text(decode)[:_MAX_CHARS], "excerpt": text[:_MAX_CHARS],
            "reason": reason, "message": text, "trajectory": trajectory,
            "texts": {id_: decode([id_]) for id_ in {*trajectory.token_ids}} if decode is not None else {},
        }  # fmt: skip
        try:
            line = encode_json(record) + b"\n"
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                file.write(line)
        except (OSError, TypeError, ValueError) as problem:
            self._num_left = 0
            why = write_problem(problem, path)
            _logger.warning("Could not write %s: %s. Failures are no longer logged.", path, why)


@dataclass(frozen=True)
class ReplayRow:
    """The result of several calls to a reward on one trajectory."""

    prompt: str
    completion: str
    extracted: str | None  # the answer that the reward found in the completion, if it returns one
    reward: float | None  # from the first call; None if it failed
    metrics: dict[str, float] = field(default_factory=dict)
    latency_s: float = 0.0  # duration of the last call, after everything has been loaded
    is_deterministic: bool = True  # whether all calls returned the same result
    reason: str | None = None  # why the first call failed; `message` has the details
    message: str | None = None
    raw: str | None = None  # the completion with special tokens; None without a tokenizer


def replay(
    source: str | Path | Iterable[Trajectory],
    reward: Reward | RewardFunction,
    *,
    num: int | None = None,
    repeats: int = 2,
    timeout_s: float = 30.0,
    memory_limit_mib: int | None = 4096,
    search_paths: Sequence[str] = (),
    decode: Callable[[list[int]], str] | None = None,
) -> list[ReplayRow]:
    """Computes trajectories' rewards, for example from a JSONL file.

    Args:
        source: a file of failed rewards or from the trajectory log, or trajectories.
        reward, timeout_s, memory_limit_mib, search_paths: as in `make_reward_worker`.
        num: use only the first `num` trajectories; None for all.
        repeats: calls per trajectory, in sequence, for accurate latencies; at least 2 to test for determinism.
        decode: converts token ids to text with special tokens, for `raw` and for prompts without messages.

    Raises:
        ValueError: if a line has no trajectory, a trajectory's workspace is deleted, or the reward does not exist.
    """
    check_bounds(1, repeats=repeats)
    trajectories = _without_rewards(Path(source)) if isinstance(source, str | Path) else source
    selected = list(itertools.islice(trajectories, num))

    async def rows() -> list[ReplayRow]:
        return [await _row(trajectory, reward_worker, repeats, decode) for trajectory in selected]

    reward_worker = make_reward_worker(
        reward, timeout_s=timeout_s, memory_limit_mib=memory_limit_mib, search_paths=search_paths
    )
    try:
        reward_worker.start()
        return asyncio.run(rows())
    finally:
        reward_worker.close()


def _without_rewards(file: Path) -> Iterator[Trajectory]:
    """Yields a file's trajectories without rewards; raises ValueError if a reward needs its deleted workspace."""
    for where, _, trajectory in read_records(file):
        if trajectory.workspace is not None:
            raise ValueError(
                f"{where} cannot be replayed: its reward read the workspace {trajectory.workspace}, which has been "
                "deleted. The line's message says how it failed."
            )
        trajectory.reward = None  # `rewards` stay: they came from an environment, not from the reward function
        yield trajectory


async def _row(
    trajectory: Trajectory, reward_worker: RewardWorker, repeats: int, decode: Callable[[list[int]], str] | None
) -> ReplayRow:
    outcomes: list[RewardResult | RewardError] = []
    latency_s = 0.0
    for _ in range(repeats):
        start = time.perf_counter()
        try:
            outcomes.append(await reward_worker.compute_rewards([trajectory])[0])
        except RewardError as error:
            outcomes.append(error)
        latency_s = time.perf_counter() - start
    first = outcomes[0]
    results = [outcome.reason if isinstance(outcome, RewardError) else outcome for outcome in outcomes]
    shown: dict[str, Any] = {
        "prompt": trajectory.prompt.text(decode),
        "completion": trajectory.completion,
        "raw": None if decode is None else decode(list(trajectory.completion_ids)),
        "latency_s": latency_s,
        "is_deterministic": all(result == results[0] for result in results),
    }
    if isinstance(first, RewardError):
        return ReplayRow(**shown, extracted=None, reward=None, reason=first.reason, message=str(first))
    return ReplayRow(**shown, extracted=first.extracted, reward=first.reward, metrics=first.metrics)
