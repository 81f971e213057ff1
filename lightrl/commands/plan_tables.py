"""The memory, messages and batch sizes of a PlannedRun as text of at most 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from lightrl.commands.plan_costs import (
    PlannedRun,
    RankMemory,
    batch_rows,
    data_rows,
    engine_memory,
    rank_memories,
    ranks_text,
    role_cost,
    rows_of,
)
from lightrl.commands.plan_fit import misfits
from lightrl.strategies.costs import USABLE_FRACTION

_WIDTH = 100
_UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def costs_text(run: PlannedRun, device_bytes: float | None) -> str:
    """All tables; what does not fit is at the end."""
    parts = [_batch_text(run), _roles_text(run), _memory_text(run), _engine_text(run), _fit_text(run, device_bytes)]
    return "\n\n".join(part for part in parts if part)


def bytes_text(number: float) -> str:
    for unit, size in _UNITS:
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:.0f} B"


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
    places = {"rank 0": "on rank 0's device", "elsewhere": "on a device of its own"}
    where = places.get(engine.place, f"servers: {engine.servers}, tp {engine.tp}")
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
    room = USABLE_FRACTION * device_bytes
    of = f"{bytes_text(room)} usable of {bytes_text(device_bytes)}"
    lines = [
        f"{item.cause}: {bytes_text(item.cause_bytes)} of {item.where}'s {bytes_text(item.total)}, but {of}; {item.fix}"
        for item in misfits(run, room)
    ]
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
