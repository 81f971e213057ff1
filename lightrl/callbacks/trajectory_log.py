"""TrajectoryLog: what the policy wrote, as JSONL to read and replay, and periodically as a table."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import shutil
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor

from lightrl.callbacks.loggers import log_table
from lightrl.callbacks.rl_callback import RLCallback
from lightrl.checks.bounds import check_bounds, check_effect
from lightrl.checks.files import write_problem
from lightrl.checks.printable import escape_unprintable
from lightrl.dataflow import follows_from_trajectories
from lightrl.experience import Experience
from lightrl.strategies import ranks_of
from lightrl.trajectory import JsonMapping, JsonObject, Trajectory, encode_json

if TYPE_CHECKING:
    import lightning as L

    from lightrl.module import RLModule
    from lightrl.rollout.rl_trainer import RLTrainer
    from lightrl.trajectory import Group

log = logging.getLogger(__name__)

_WIDTH_WITHOUT_TERMINAL = 120  # characters
_SEARCHED = 2000  # characters of a text that `lightrl inspect` searches; the middle of longer texts is cut
_SEARCHED_OF_TURN = 100  # at least, however many turns there are
_CELL = 4000  # characters of a prompt or completion in a logger's table
_ROWS_AT_ONCE = 256  # rows of a per-token field in one collective


class _Tokenizer(Protocol):
    def decode(self, token_ids: list[int]) -> str: ...


class TrajectoryLog(RLCallback):
    """Writes trajectories of every n-th iteration to `<run folder>/trajectories/iteration-000012.jsonl`.

    Each line is one complete trajectory, so an iteration can be read, filtered with `jq`, replayed and trained on
    (`lightrl.trajectory.read_trajectories`):

        {"iteration": 12, "weight_version": 12, "advantage": 0.87, "reward": 1.0, ..., "trajectory": {"prompt": ...}}

    `advantage` is the mean over the trajectory's loss tokens; `advantages` has one per token if they differ, and
    `trainer_logprobs` are the trainer's before the update. `tokens.jsonl` has the text of each token id that occurred.
    A file is moved into place when it is complete, and a resumed run replaces the iterations that it repeats. If the
    disk is full or read-only, a warning is logged, the log stops and the run continues.

    Args:
        every_n_iterations: 1 keeps everything that a run trained on.
        max_per_iteration: at most this many trajectories of an iteration; None keeps all, which a replay needs.
        table_every_n_iterations: how often a table is printed and logged to Weights & Biases, MLflow, TensorBoard and
            Comet as `samples`, with each part of the reward; None for never.
        table_rows: trajectories in the table, from the highest advantage to the lowest.
        score_per_iteration: how many of an iteration's first trajectories get the trainer's logprobs, by an extra
            forward on every rank. Logprobs that the update needs anyway are written without it.
    """

    def __init__(
        self,
        every_n_iterations: int = 10,
        max_per_iteration: int | None = None,
        table_every_n_iterations: int | None = 50,
        table_rows: int = 4,
        score_per_iteration: int = 0,
    ) -> None:
        check_bounds(0, score_per_iteration=score_per_iteration)
        check_bounds(1, every_n_iterations=every_n_iterations, max_per_iteration=max_per_iteration)
        check_bounds(1, table_every_n_iterations=table_every_n_iterations, table_rows=table_rows)
        if table_every_n_iterations is None:
            check_effect("without table_every_n_iterations", table_rows=(table_rows, 4))
        self.every_n_iterations = every_n_iterations
        self.max_per_iteration = max_per_iteration
        self.table_every_n_iterations = table_every_n_iterations
        self.table_rows = table_rows
        self.score_per_iteration = score_per_iteration
        self._known_ids: set[int] = set()  # token ids in tokens.jsonl
        self._folder: Path | None = None  # None writes nothing
        self._trajectories: list[Trajectory] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        run_folder = trainer.log_dir or trainer.default_root_dir  # on all ranks: it is a collective
        writes = trainer.is_global_zero and not cast("RLTrainer", trainer).fast_dev_run
        self._folder = Path(run_folder) / "trajectories" if writes else None
        self._known_ids = set()

    def on_rewards_ready(self, trainer: RLTrainer, module: RLModule, groups: list[Group]) -> None:
        self._trajectories = [trajectory for group in groups for trajectory in group.trajectories]

    def on_experience_ready(self, trainer: RLTrainer, module: RLModule, experience: Experience) -> None:
        trajectories, self._trajectories = self._trajectories, []
        iteration = trainer.global_step
        is_due = iteration % self.every_n_iterations == 0
        prints = self.table_every_n_iterations is not None and iteration % self.table_every_n_iterations == 0
        if not prints and not is_due:
            return
        # On all ranks, because these are collectives.
        advantages = _mean_advantages(experience, len(trajectories))
        num = len(trajectories) if self.max_per_iteration is None else min(len(trajectories), self.max_per_iteration)
        per_token: list[list[float]] = []
        scores: list[list[float]] = []
        if is_due:
            keep_answers(module, experience, trajectories)
            scores = self._trainer_logprobs(trainer, module, experience, trajectories[:num])
            if len(experience) == len(trajectories) and _varies(experience):
                per_token = [row.tolist() for row in _rows_of_all(experience, "advantages", num)]
        if not trainer.is_global_zero:
            return
        tokenizer = getattr(module, "tokenizer", None)
        if is_due and self._folder is not None:
            stamp = {"iteration": iteration, "weight_version": trainer.weight_version}
            version = trainer.weight_version
            records = _records(trajectories[:num], advantages[:num], per_token, scores, version, tokenizer)
            self._write(iteration, [{**stamp, **record} for record in records], tokenizer)
        if prints:
            rows = pick_rows(trajectories, advantages, self.table_rows)
            width = shutil.get_terminal_size((_WIDTH_WITHOUT_TERMINAL, 0)).columns
            module.print(printable_on_stdout(f"iteration {iteration}\n{format_table(rows, tokenizer, width)}"))
            samples = [_sample(*row, tokenizer, trainer.weight_version) for row in rows]
            log_table(trainer.loggers, "samples", samples, iteration)

    def _trainer_logprobs(
        self, trainer: RLTrainer, module: RLModule, experience: Experience, trajectories: Sequence[Trajectory]
    ) -> list[list[float]]:
        """Returns [b][T] of the first trajectories, before the update; empty if none are due. Collective."""
        if proximal := _rows_of_all(experience, "proximal_logprobs", len(trajectories)):
            return [row.tolist() for row in proximal]
        num = min(self.score_per_iteration, len(trajectories))
        if num == 0:
            return []
        ranks = ranks_of(trainer.strategy)
        holders = ranks.of_role("policy")
        if ranks.size == 1:
            experience = experience.select(list(range(num)))
        else:  # all ranks compute the same rows, whose tokens only some ranks have
            texts = ranks.broadcast_json([item.to_text() for item in trajectories[:num]] if ranks.is_main else None)
            experience = Experience.from_trajectories([Trajectory.from_text(text) for text in texts])
        rows: list[list[float]] = [[]] * num
        if holders.is_here:
            order, parts = experience.microbatch_rows(module.microbatch_tokens)
            with torch.no_grad(), trainer.precision_plugin.forward_context():
                outputs = module.parallel_models["policy"].forward([part.to(module.device) for part in parts])
                for numbers, output in zip(order, outputs, strict=True):  # a generator: computes one after the other
                    for row, logprobs in zip(numbers, output.logprobs.float().cpu().tolist(), strict=True):
                        rows[row] = logprobs
        return cast("list[list[float]]", ranks.broadcast_json(rows)) if holders.size < ranks.size else rows

    def _write(self, iteration: int, records: Sequence[JsonMapping], tokenizer: _Tokenizer | None) -> None:
        assert self._folder is not None
        path = self._folder / f"iteration-{iteration:06d}.jsonl"
        unfinished = path.with_suffix(".jsonl.tmp")
        content = b""
        try:
            content = b"".join(encode_json(record) + b"\n" for record in records)
            self._folder.mkdir(parents=True, exist_ok=True)
            unfinished.write_bytes(content)
            unfinished.replace(path)
            self._write_tokens([record["trajectory"] for record in records], tokenizer)
        except (OSError, TypeError, ValueError) as error:
            self._folder = None
            with contextlib.suppress(OSError):
                unfinished.unlink()  # frees the partial file's space
            log.warning(
                "The trajectory log cannot write %s: %s. It stops and the run continues. Prompts must be JSON and the "
                "disk must have space; a larger TrajectoryLog.every_n_iterations writes less.",
                path,
                write_problem(error, path, len(content)),
            )

    def _write_tokens(self, trajectories: Iterable[Trajectory], tokenizer: _Tokenizer | None) -> None:
        """Appends the texts of new token ids, one `[id, text]` per line."""
        if tokenizer is None or self._folder is None:
            return
        new = {id_ for trajectory in trajectories for id_ in trajectory.token_ids} - self._known_ids
        self._known_ids |= new
        lines = [json.dumps([id_, tokenizer.decode([id_])]) + "\n" for id_ in sorted(new)]
        with (self._folder / "tokens.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(lines)


def _rows_of_all(experience: Experience, name: str, num: int) -> list[Tensor]:
    """Gathers a per-token field of the first `num` trajectories from all ranks, [T, ...] each. Collective."""
    part = experience.local
    local = part[name] if name in part.tensors() else None
    if local is None:
        return []
    held = experience.local_rows
    rows: list[Tensor] = []
    for start in range(0, num, _ROWS_AT_ONCE):
        end = min(start + _ROWS_AT_ONCE, num)
        values = local.new_zeros(end - start, int(experience.lengths[start:end].max()), *local.shape[2:], device="cpu")
        here = (held >= start) & (held < end)
        width = min(local.shape[1], values.shape[1])
        values[held[here] - start, :width] = local[here.to(local.device)][:, :width].cpu()
        rows += experience.total(values)
    return rows


def _varies(experience: Experience) -> bool:
    """Whether the advantages of a trajectory's tokens differ. Collective."""
    local = experience.local
    if local.advantages is None:
        return False
    most = local.advantages.where(local.loss_mask, -torch.inf).amax(1)
    least = local.advantages.where(local.loss_mask, torch.inf).amin(1)
    return bool(experience.total((most > least).sum().float().cpu()))


def _records(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[float | None],
    per_token: Sequence[Sequence[float]],
    trainer_logprobs: Sequence[Sequence[float]],
    weight_version: int,
    tokenizer: _Tokenizer | None,
) -> Iterator[JsonObject]:
    """Yields a record for each trajectory: the columns of a table first, the trajectory, and per-token numbers."""
    prompt_texts: dict[str, str] = {}  # prompt id → text
    for row, (trajectory, advantage) in enumerate(zip(trajectories, advantages, strict=True)):
        prompt = trajectory.prompt
        if prompt.id not in prompt_texts:
            prompt_texts[prompt.id] = _without_middle(prompt.text(getattr(tokenizer, "decode", None)))
        record: JsonObject = {
            **_numbers(trajectory, advantage, weight_version),
            "group": trajectory.group_id,
            "sample": trajectory.sample,
            "prompt": prompt.id,
            "finish": trajectory.finish_reason,
            "prompt_text": prompt_texts[prompt.id],
            "excerpt": _text_of_turns(trajectory, tokenizer),
            "trajectory": trajectory,
        }
        num = len(trajectory.token_ids)
        if per_token:
            own = [round(value, 6) for value in per_token[row][:num]]
            if len({value for value, trains in zip(own, trajectory.loss_mask, strict=True) if trains}) > 1:
                record["advantages"] = own
        if row < len(trainer_logprobs):
            record["trainer_logprobs"] = [round(value, 6) for value in trainer_logprobs[row][:num]]
        yield record


def _numbers(trajectory: Trajectory, advantage: float | None, weight_version: int) -> dict[str, float | None]:
    oldest = trajectory.oldest_version
    return {
        "advantage": advantage,
        "reward": trajectory.reward,
        "length": trajectory.num_loss_tokens,
        "staleness": weight_version - oldest if oldest >= 0 else None,
    }


def _sample(
    trajectory: Trajectory, advantage: float | None, tokenizer: _Tokenizer | None, weight_version: int
) -> JsonObject:
    """Returns a row of a logger's table; escapes lone surrogates, which UTF-8 cannot encode."""
    texts = {
        "prompt": trajectory.prompt.text(getattr(tokenizer, "decode", None)),
        "completion": _completion_text(trajectory, tokenizer),
    }
    cells = {name: shorten(text, _CELL, keep_start=0.5) for name, text in texts.items()}
    printable = {name: text.encode("utf-8", "backslashreplace").decode() for name, text in cells.items()}
    numbers = _numbers(trajectory, advantage, weight_version)
    return {**printable, "reward": numbers["reward"], **trajectory.metrics, **numbers}


def keep_answers(module: RLModule, experience: Experience, trajectories: Sequence[Trajectory]) -> None:
    """Stores the outputs of calls outside the trainer in `Trajectory.call_outputs`, for a replay. Collective."""
    calls = module.data_flow(from_file=True).of_kind("infer")  # without the reward, which trajectories already have
    for key in [key for call in calls if follows_from_trajectories(call) for key in call.outputs]:
        if experience.local[key].dim() == 1:
            for trajectory, value in zip(trajectories, experience[key].tolist(), strict=True):
                trajectory.call_outputs[key] = value
            continue
        rows = zip(trajectories, experience.lengths.tolist(), strict=True)
        for (trajectory, length), values in zip(rows, _rows_of_all(experience, key, len(trajectories)), strict=True):
            trajectory.call_outputs[key] = values[:length].numpy()


def pick_rows(
    trajectories: Sequence[Trajectory], advantages: Sequence[float | None], num: int
) -> list[tuple[Trajectory, float | None]]:
    """Selects at most `num` trajectories, evenly spaced from the highest advantage to the lowest; ties by reward."""
    rows = sorted(
        zip(trajectories, advantages, strict=True),
        key=lambda row: (row[1] if row[1] is not None else 0.0, row[0].reward or 0.0),
        reverse=True,
    )
    if len(rows) <= num or num == 1:
        return rows[:num]
    return [rows[round(index * (len(rows) - 1) / (num - 1))] for index in range(num)]


def format_table(
    rows: Iterable[tuple[Trajectory, float | None]], tokenizer: _Tokenizer | None = None, width: int = 120
) -> str:
    """Formats prompt, completion, reward and advantage of each trajectory, one line each, at most `width` columns wide.

    A prompt that is too long loses its beginning, a completion its middle; unprintable characters are escaped. Special
    tokens are shown if the tokenizer decodes them, since a strict reward sees them.
    """
    cells = [
        (
            escape_unprintable(trajectory.prompt.text(getattr(tokenizer, "decode", None))),
            escape_unprintable(_completion_text(trajectory, tokenizer)),
            "" if trajectory.reward is None else f"{trajectory.reward:.3g}",
            "" if advantage is None else f"{advantage:+.3g}",
        )
        for trajectory, advantage in rows
    ]
    header = ("prompt", "completion", "reward", "advantage")
    numbers_width = len("  reward  advantage") + 2
    text_width = max(width - numbers_width, 20)
    column_widths = [max([len(header[column]), *(num_columns(row[column]) for row in cells)]) for column in (0, 1)]
    prompt_width = min(column_widths[0], max(text_width // 2, text_width - column_widths[1]))
    completion_width = min(column_widths[1], text_width - prompt_width)
    lines = []
    for prompt, completion, reward, advantage in [header, *cells]:
        left = pad(shorten(prompt, prompt_width, keep_start=0.0), prompt_width)
        right = pad(shorten(completion, completion_width, keep_start=0.5), completion_width)
        lines.append(f"{left}  {right}  {reward:>6}  {advantage:>9}")
    return "\n".join(lines)


def _mean_advantages(experience: Experience, num: int) -> list[float | None]:
    """Returns one per trajectory; None if the experience has no advantages, or other rows than the rollout."""
    local = experience.local
    if local.advantages is None or len(experience) != num:
        return [None] * num
    masked = local.advantages.where(local.loss_mask, 0.0)
    means = torch.zeros(num)
    means[experience.local_rows] = masked.sum(dim=1) / local.loss_mask.sum(dim=1).clamp(min=1)
    return cast("list[float | None]", experience.total(means).tolist())


def _text_of_turns(trajectory: Trajectory, tokenizer: _Tokenizer | None) -> str:
    """Returns what the policy generated and what its environment answered, one line each."""
    if tokenizer is None or len(trajectory.turns) < 2:
        return _without_middle(trajectory.completion)
    bounds = [bound for turn in trajectory.turns for bound in (turn.start, turn.end)]
    num = max(_SEARCHED_OF_TURN, _SEARCHED // len(bounds))
    parts = [list(trajectory.token_ids[start:end]) for start, end in itertools.pairwise(bounds)]
    return "\n".join(_without_middle(tokenizer.decode(ids[:num] + ids[num:][-num:]), num) for ids in parts)


def _without_middle(text: str, num: int = _SEARCHED) -> str:
    return text if len(text) <= num else f"{text[: num // 2]} … {text[-num // 2 :]}"


def _completion_text(trajectory: Trajectory, tokenizer: _Tokenizer | None) -> str:
    if tokenizer is not None and trajectory.completion_ids:
        return tokenizer.decode(list(trajectory.completion_ids))
    return trajectory.completion


def num_columns(text: str) -> int:
    """Returns the text's terminal columns: East Asian wide letters take two, combining marks none."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(letter) else 1 + (unicodedata.east_asian_width(letter) in "WF") for letter in text
    )


def shorten(text: str, width: int, *, keep_start: float) -> str:
    """Cuts text to `width` columns, with … for the omitted part; `keep_start` is the start's share of the columns."""
    if num_columns(text) <= width:
        return text
    text = text[: 2 * width] + text[-2 * width :] if len(text) > 4 * width else text
    num_start = int((width - 1) * keep_start)
    start, end = _cut(text, num_start), _cut(text[::-1], width - 1 - num_start)[::-1]
    return f"{start}…{end}"


def _cut(text: str, width: int) -> str:
    """Returns the longest beginning that fits."""
    used = 0
    for index, letter in enumerate(text):
        used += num_columns(letter)
        if used > width:
            return text[:index]
    return text


def pad(text: str, width: int) -> str:
    """Pads the text with spaces to `width` columns."""
    return text + " " * (width - num_columns(text))


def printable_on_stdout(text: str) -> str:
    """Escapes characters that the terminal's encoding cannot show."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
