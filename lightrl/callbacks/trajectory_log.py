"""TrajectoryLog: writes trajectories as JSONL, to read and replay, and periodically prints some as a table."""

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
_SEARCHED_OF_TURN = 100  # minimum for each turn
_CELL = 4000  # characters of a prompt or completion in a logger's table
_ROWS_AT_ONCE = 256  # rows of a per-token field in one collective


class _Tokenizer(Protocol):
    def decode(self, token_ids: list[int]) -> str: ...


class TrajectoryLog(RLCallback):
    """Writes the trajectories of the 1st, (n + 1)th, … iteration to `<run folder>/trajectories/iteration-000012.jsonl`.

    Each line is one complete trajectory, so an iteration can be read, filtered with `jq`, replayed and trained on
    (`lightrl.trajectory.read_trajectories`):

        {"iteration": 12, "weight_version": 11, "advantage": 0.87, "reward": 1.0, ..., "trajectory": {"prompt": ...}}

    `advantage` is the mean over the trajectory's loss tokens. If the tokens' advantages differ, `advantages` has one
    per token. `trainer_logprobs` are the trainer's logprobs before the update. `tokens.jsonl` maps each token id that
    occurred to its text. A file is moved into place when it is complete, and a resumed run overwrites the iterations
    that it repeats. If the disk is full or read-only, the log stops with a warning and the run continues.

    Args:
        every_n_iterations: iterations from one logged iteration to the next; 1 logs every iteration.
        max_per_iteration: maximum number of trajectories per iteration; None writes all, which a replay needs.
        table_every_n_iterations: iterations between two tables, which are printed and, with all parts of the reward,
            logged as `samples` to Weights & Biases, MLflow, TensorBoard and Comet; None prints none.
        table_rows: number of trajectories in the table, from the highest advantage to the lowest.
        score_per_iteration: number of trajectories per iteration for which to compute the trainer's logprobs, with an
            extra forward on every rank. Logprobs that the update needs anyway are always written.
    """

    run_folder_output = "trajectories"  # two runs must not write it at the same time

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
        self._written_ids: set[int] = set()  # token ids in tokens.jsonl
        self._folder: Path | None = None  # None: nothing is written
        self._trajectories: list[Trajectory] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        run_folder = trainer.log_dir or trainer.default_root_dir  # log_dir is a collective, so all ranks read it
        should_write = trainer.is_global_zero and not cast("RLTrainer", trainer).fast_dev_run
        self._folder = Path(run_folder) / "trajectories" if should_write else None
        self._written_ids = set()

    def on_rewards_ready(self, trainer: RLTrainer, module: RLModule, groups: list[Group]) -> None:
        self._trajectories = [trajectory for group in groups for trajectory in group.trajectories]

    def on_experience_ready(self, trainer: RLTrainer, module: RLModule, experience: Experience) -> None:
        trajectories, self._trajectories = self._trajectories, []
        version, iteration = trainer.weight_version, trainer.weight_version + 1
        should_write = version % self.every_n_iterations == 0
        should_print = self.table_every_n_iterations is not None and version % self.table_every_n_iterations == 0
        if not should_print and not should_write:
            return
        # The following calls are collectives, so all ranks make them.
        advantages = _mean_advantages(experience, len(trajectories))
        num = len(trajectories) if self.max_per_iteration is None else min(len(trajectories), self.max_per_iteration)
        token_advantages: list[list[float]] = []
        logprobs: list[list[float]] = []
        if should_write:
            store_call_outputs(module, experience, trajectories)
            logprobs = self._trainer_logprobs(trainer, module, experience, trajectories[:num])
            if len(experience) == len(trajectories) and _varies(experience):
                token_advantages = [row.tolist() for row in _rows_of_all(experience, "advantages", num)]
        if not trainer.is_global_zero:
            return
        tokenizer = getattr(module, "tokenizer", None)
        if should_write and self._folder is not None:
            stamp = {"iteration": iteration, "weight_version": version}
            records = _records(trajectories[:num], advantages[:num], token_advantages, logprobs, version, tokenizer)
            self._write(iteration, [{**stamp, **record} for record in records], tokenizer)
        if should_print:
            rows = pick_rows(trajectories, advantages, self.table_rows)
            width = shutil.get_terminal_size((_WIDTH_WITHOUT_TERMINAL, 0)).columns
            module.print(printable_on_stdout(f"iteration {iteration}\n{format_table(rows, tokenizer, width)}"))
            samples = [_sample(*row, tokenizer, version) for row in rows]
            log_table(trainer.loggers, "samples", samples, iteration)

    def _trainer_logprobs(
        self, trainer: RLTrainer, module: RLModule, experience: Experience, trajectories: Sequence[Trajectory]
    ) -> list[list[float]]:
        """Returns the trainer's logprobs before the update, [b][T]; empty if none are due. Collective."""
        if proximal := _rows_of_all(experience, "proximal_logprobs", len(trajectories)):
            return [row.tolist() for row in proximal]
        num = min(self.score_per_iteration, len(trajectories))
        if num == 0:
            return []
        ranks = ranks_of(trainer.strategy)
        holders = ranks.of_role("policy")
        if ranks.size == 1:
            experience = experience.select(list(range(num)))
        else:  # all ranks compute the same rows, but only some have the tokens
            texts = ranks.broadcast_json([item.to_text() for item in trajectories[:num]] if ranks.is_main else None)
            experience = Experience.from_trajectories([Trajectory.from_text(text) for text in texts])
        rows: list[list[float]] = [[]] * num
        if holders.is_here:
            order, parts = experience.microbatch_rows(module.microbatch_tokens)
            with torch.no_grad(), trainer.precision_plugin.forward_context():
                outputs = module.parallel_models["policy"].forward([part.to(module.device) for part in parts])
                for indices, output in zip(order, outputs, strict=True):  # `outputs` is lazy
                    for index, logprobs in zip(indices, output.logprobs.float().cpu().tolist(), strict=True):
                        rows[index] = logprobs
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
                "The trajectory log cannot write %s: %s. The log stops; the run continues. Check that prompts are "
                "JSON and that the disk has space, or increase TrajectoryLog.every_n_iterations.",
                path,
                write_problem(error, path, len(content)),
            )

    def _write_tokens(self, trajectories: Iterable[Trajectory], tokenizer: _Tokenizer | None) -> None:
        """Appends the texts of new token ids, one `[id, text]` per line."""
        if tokenizer is None or self._folder is None:
            return
        new_ids = {id_ for trajectory in trajectories for id_ in trajectory.token_ids} - self._written_ids
        self._written_ids |= new_ids
        lines = [json.dumps([id_, tokenizer.decode([id_])]) + "\n" for id_ in sorted(new_ids)]
        with (self._folder / "tokens.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(lines)


def _rows_of_all(experience: Experience, name: str, num: int) -> list[Tensor]:
    """Gathers a per-token field of the first `num` trajectories from all ranks, [T, ...] each. Collective."""
    if name not in experience.local.tensors():
        return []
    local, local_rows = experience.local[name], experience.local_rows
    rows: list[Tensor] = []
    for start in range(0, num, _ROWS_AT_ONCE):
        end = min(start + _ROWS_AT_ONCE, num)
        values = local.new_zeros(end - start, int(experience.lengths[start:end].max()), *local.shape[2:], device="cpu")
        is_here = (local_rows >= start) & (local_rows < end)
        width = min(local.shape[1], values.shape[1])
        values[local_rows[is_here] - start, :width] = local[is_here.to(local.device)][:, :width].cpu()
        rows += experience.total(values)
    return rows


def _varies(experience: Experience) -> bool:
    """Whether the advantages of a trajectory's tokens differ. Collective."""
    local = experience.local
    if local.advantages is None:
        return False
    highest = local.advantages.where(local.loss_mask, -torch.inf).amax(1)
    lowest = local.advantages.where(local.loss_mask, torch.inf).amin(1)
    return bool(experience.total((highest > lowest).sum().float().cpu()))


def _records(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[float | None],
    token_advantages: Sequence[Sequence[float]],
    trainer_logprobs: Sequence[Sequence[float]],
    weight_version: int,
    tokenizer: _Tokenizer | None,
) -> Iterator[JsonObject]:
    """Yields a record for each trajectory: the columns of a table, then the trajectory and per-token numbers."""
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
        if token_advantages:
            rounded = [round(value, 6) for value in token_advantages[row][:num]]
            if len({value for value, is_trained in zip(rounded, trajectory.loss_mask, strict=True) if is_trained}) > 1:
                record["advantages"] = rounded
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


def store_call_outputs(module: RLModule, experience: Experience, trajectories: Sequence[Trajectory]) -> None:
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
    """Selects at most `num` trajectories, evenly spaced from the highest advantage (then reward) to the lowest."""
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
    """Formats prompt, completion, reward and advantage of each trajectory on a line of at most `width` columns.

    The beginning of a long prompt and the middle of a long completion are cut; unprintable characters are escaped.
    Special tokens are shown if the tokenizer decodes them, since a strict reward sees them.
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
    """Returns the mean advantage per trajectory; None if there are none, or if rows and trajectories do not match."""
    local = experience.local
    if local.advantages is None or len(experience) != num:
        return [None] * num
    masked = local.advantages.where(local.loss_mask, 0.0)
    means = torch.zeros(num)
    means[experience.local_rows] = masked.sum(dim=1) / local.loss_mask.sum(dim=1).clamp(min=1)
    return cast("list[float | None]", experience.total(means).tolist())


def _text_of_turns(trajectory: Trajectory, tokenizer: _Tokenizer | None) -> str:
    """Returns the text that the policy and the environment wrote, one line per part."""
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
    """Returns the width of a text in terminal columns: East Asian wide characters take two, combining marks none."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(char) else 1 + (unicodedata.east_asian_width(char) in "WF") for char in text)


def shorten(text: str, width: int, *, keep_start: float) -> str:
    """Cuts text to `width` columns, with … for the omitted part; `keep_start` is the share kept from the start."""
    if num_columns(text) <= width:
        return text
    text = text[: 2 * width] + text[-2 * width :] if len(text) > 4 * width else text
    num_start = int((width - 1) * keep_start)
    start, end = _cut(text, num_start), _cut(text[::-1], width - 1 - num_start)[::-1]
    return f"{start}…{end}"


def _cut(text: str, width: int) -> str:
    """Returns the longest prefix that fits into `width` columns."""
    used = 0
    for index, char in enumerate(text):
        used += num_columns(char)
        if used > width:
            return text[:index]
    return text


def pad(text: str, width: int) -> str:
    return text + " " * (width - num_columns(text))


def printable_on_stdout(text: str) -> str:
    """Escapes characters that the terminal's encoding cannot show."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
