"""The memory, messages and batch sizes of a PlannedRun as text of at most 100 columns."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence

from lightrl.launch.memory import (
    PlannedRun,
    RankMemory,
    bytes_text,
    engine_memory,
    misfits,
    rank_memories,
    ranks_text,
    role_cost,
    rows_of,
)
from lightrl.strategies.costs import USABLE_FRACTION

_WIDTH = 100


def costs_text(run: PlannedRun, device_bytes: float | None) -> str:
    """All tables; what does not fit is at the end."""
    parts = [_batch_text(run), _roles_text(run), _memory_text(run), _engine_text(run), _fit_text(run, device_bytes)]
    return "\n\n".join(part for part in parts if part)


def _batch_text(run: PlannedRun) -> str:
    return _titled("batch sizes", (batch_rows if run.batches_per_update is None else data_rows)(run), right=(1,))


def _roles_text(run: PlannedRun) -> str:
    rows = [("role", "parameters", "trained", "ranks", "pp · dp · tp", "sent per rank and update")]
    for role in run.roles:
        split = f"{role.pp} · {role.dp} · {role.tp}"
        sent = bytes_text(role_cost(run, role).sent)
        rows.append((role.name, f"{role.parameters:,}", f"{role.trained:,}", ranks_text(role.ranks), split, sent))
    return _titled("models", rows, right=(1, 2))


def _memory_text(run: PlannedRun) -> str:
    memories = rank_memories(run)
    blocks = []
    for place, name in (("device", "memory of a rank's device"), ("host", "memory of a rank in the host")):
        used = [getattr(memory, place) for memory in memories]
        causes = list(dict.fromkeys(cause for parts in used for cause in parts))
        if not causes:
            continue
        rows = [("", *(ranks_text(memory.ranks) for memory in memories))]
        rows += [(cause, *(bytes_text(parts.get(cause, 0.0)) for parts in used)) for cause in causes]
        rows.append(("total", *(bytes_text(sum(parts.values())) for parts in used)))
        columns = range(1, len(memories) + 1)
        blocks.append(_titled(f"{name}, on paper", _grouped(rows, memories), right=columns))
    return "\n\n".join(blocks)


def _grouped(rows: Sequence[Sequence[str]], memories: Sequence[RankMemory]) -> list[Sequence[str]]:
    """Without the columns that are too many for a line: those of the ranks in the middle."""
    most = 4
    if len(memories) <= most:
        return list(rows)
    return [(*row[:most], "…" if index == 0 else "") for index, row in enumerate(rows)]


def _engine_text(run: PlannedRun) -> str:
    engine = run.engine
    if engine is None:
        return ""
    weights, key_values = engine_memory(run, engine)
    num = rows_of(run, engine)
    device_texts = {"rank 0": "on rank 0's device", "elsewhere": "on a device of its own"}
    where = device_texts.get(engine.place, f"servers: {engine.servers}, tp {engine.tp}")
    rows = [
        ("weights", bytes_text(weights), f"{run.roles[0].parameters:,} parameters of {engine.width} bytes"),
        ("key-values", bytes_text(key_values), f"of {num:,} trajectories of {run.longest:,} tokens at once"),
        ("one trajectory", bytes_text(engine_memory(run, engine, rows=1)[1]), f"of {run.longest:,} tokens"),
        ("sent per iteration", bytes_text(weights * engine.tp * engine.servers), "weights, to all, as whole ones"),
    ]
    return _titled(f"engine: {engine.name}, {where}; each device", rows, right=(1,))


def _fit_text(run: PlannedRun, device_bytes: float | None) -> str:
    if device_bytes is None:
        return "does it fit? Pass --gpu_memory_gb, in 1e9 bytes, to see what does not and what would change it."
    lines = [misfit.text for misfit in misfits(run, device_bytes)]
    of = f"{bytes_text(USABLE_FRACTION * device_bytes)} usable of {bytes_text(device_bytes)}"
    return "\n".join(["does not fit", *_wrapped(lines)]) if lines else f"fits: {of} on each device"


def _wrapped(lines: Sequence[str]) -> Iterator[str]:
    for line in lines:
        yield from textwrap.wrap(line, _WIDTH, initial_indent="  ", subsequent_indent="    ")


def _titled(title: str, rows: Sequence[Sequence[str]], *, right: Sequence[int]) -> str:
    """Rows in columns; the last one is wrapped where the line ends."""
    last = len(rows[0]) - 1
    widths = [max(len(row[column]) for row in rows) for column in range(last + 1)]
    lines = [title]
    for row in rows:
        cells = [
            cell.rjust(widths[index]) if index in right else cell.ljust(widths[index]) for index, cell in enumerate(row)
        ]
        start = "  " + "  ".join(cells[:-1]) + "  "
        room = _WIDTH - len(start)
        first, *others = [cells[-1].rstrip()] if len(cells[-1].rstrip()) <= room else textwrap.wrap(cells[-1], room)
        lines += [f"{start}{first}".rstrip(), *(" " * len(start) + text for text in others)]
    return "\n".join(lines)


def data_rows(run: PlannedRun) -> list[tuple[str, str, str]]:
    """Makes the rows of `batch_rows` for a run that trains on data."""
    rows, dp = run.trajectories, run.roles[0].dp
    name = "pairs" if run.group_size == 2 else "chats"
    numbers = [
        (f"{name} per batch", run.prompts or 1, "data.batch_size" if run.prompts else "not stated by the data: 1"),
        ("batches per update", run.batches_per_update or 1, "trainer.accumulate_grad_batches"),
        ("tokens per row, at most", run.longest, run.prompt_source),
        ("tokens per batch, at most", rows * run.longest, f"{rows:,} · {run.longest:,}, padded to the longest"),
        ("  on each of the dp ranks", run.microbatch, f"{rows:,} rows / {dp}; one forward and backward"),
    ]
    return [(name, f"{number:,}", origin) for name, number, origin in numbers]


def batch_rows(run: PlannedRun) -> list[tuple[str, str, str]]:
    """Name, number and origin of each batch size; those of a rank are of the policy's."""
    prompts, total = run.prompts or 1, run.trajectories
    dp = run.roles[0].dp if run.roles else run.world
    update = math.ceil(total / run.num_minibatches)
    rank_tokens = math.ceil(update / dp) * run.longest
    microbatches = math.ceil(rank_tokens / run.microbatch)
    longest = f"{run.prompt_tokens:,} of the prompt ({run.prompt_source}) + {run.new_tokens:,} new"
    rows = [
        ("prompts per iteration, P", prompts, "data.batch_size" if run.prompts else "not stated by the data: 1"),
        ("trajectories per prompt, G", run.group_size, "model.group_size"),
        ("trajectories per iteration", total, f"P · G = {prompts} · {run.group_size}"),
        (
            "trajectories in flight, at most",
            total * (run.max_staleness + 1),
            f"P · G · (max_staleness + 1) = {total} · {run.max_staleness + 1}",
        ),
        ("tokens per trajectory, at most", run.longest, longest),
        ("tokens per iteration, at most", total * run.longest, f"{total:,} · {run.longest:,}"),
        (
            "updates per iteration",
            run.num_minibatches * run.update_epochs,
            f"num_minibatches · update_epochs = {run.num_minibatches} · {run.update_epochs}",
        ),
        ("trajectories per update", update, f"{total:,} / num_minibatches = {total:,} / {run.num_minibatches}"),
        ("  on each of the dp ranks", math.ceil(update / dp), f"{update:,} / {dp}, balanced by tokens"),
        ("tokens per microbatch, at most", run.microbatch, "model.microbatch_tokens, but one trajectory at least"),
        (
            "microbatches per rank and update",
            max(1, microbatches),
            f"{rank_tokens:,} tokens / {run.microbatch:,}; fewer if trajectories are shorter",
        ),
    ]
    return [(name, f"{number:,}", origin) for name, number, origin in rows]
