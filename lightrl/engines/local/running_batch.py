"""RunningBatch: the rows being decoded; they enter together, draw together and leave one by one.

Slots 0 to `size - 1` are in use, so that every tensor of a step is a plain slice; when a row leaves, the last one takes
its slot. Nothing here knows threads, queues or asyncio: `decode_thread.py` decides when to admit, step and recompute.

Shapes: S slots, n = `size` rows in use, W tokens of room per row, V vocabulary.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightrl.engines.engine import Completion
from lightrl.engines.local.decoder import Decoder
from lightrl.engines.local.sampler import ban_stop_tokens, draw_tokens, uniforms
from lightrl.functional import encode_supports
from lightrl.trajectory import FinishReason, Sampling, TokenArray

# What rows have in common beside their seeds.
_kind = operator.attrgetter("temperature", "top_p", "top_k", "max_new_tokens", "min_new_tokens", "stop_token_ids")
_FIRST_WIDTH = 64  # tokens; W doubles from here
_MAX_DRAWS = 32  # whose supports wait to be encoded


@dataclass(eq=False)
class Row:
    """One completion in progress."""

    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int  # of this completion
    images: tuple[str, ...] = ()  # distinguish the pictures of equal prompts
    pixels: Tensor | None = None  # their pixel values, [m, 3, H, W]
    written: Completion | None = None  # the part of it that was written before, by this engine or another
    owner: Any = None  # whose completion it is; the batch hands it back
    version_changes: list[tuple[int, int]] = field(default_factory=list)  # (first token, weight version from there on)
    supports: list[bytes] = field(default_factory=list)  # the codes of the tokens', while draws are truncated

    def codes(self) -> TokenArray[int] | None:
        """Of the supports, end to end; None if draws are not truncated."""
        return TokenArray(b"".join(self.supports), "B") if self.sampling.is_truncated else None


class RunningBatch:
    """The rows being decoded.

    An admitted row has drawn its first token; its last token is not yet in the decoder's key-values.

    Args:
        decoder: gives the logits; if its weights change between two calls, `recompute` must come next.
        max_rows: S, bound of `size`.
        vocab_size: V.
        device: of the decoder.
    """

    def __init__(self, decoder: Decoder, *, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self.max_rows = max_rows
        self._decoder = decoder
        self._vocab_size = vocab_size
        self._device = device
        self._rows: list[Row] = []
        self._draws: list[tuple[list[Row], Any, Any]] = []  # rows, supports [M, 2], tokens [n]: not yet encoded
        self._counters = torch.zeros(2, max_rows, dtype=torch.int64, device=device)
        self._positions, self._generated = self._counters  # [S] of the last token; [S] tokens drawn so far
        self._current = torch.zeros(max_rows, dtype=torch.int64, device=device)  # [S] the last token
        self._limits = torch.zeros_like(self._current)  # [S] max_new_tokens
        self._minima = torch.zeros_like(self._current)  # [S] min_new_tokens
        self._seeds = torch.zeros_like(self._current)
        self._top_k = torch.zeros_like(self._current)
        self._top_p = torch.ones(max_rows, device=device)
        self._temperature = torch.ones(max_rows, device=device)
        self._is_greedy = torch.zeros(max_rows, dtype=torch.bool, device=device)
        self._stops = torch.zeros(max_rows, 0, dtype=torch.int64, device=device)  # [S, K], -1 is no token
        self._token_ids = torch.zeros(max_rows, 0, dtype=torch.int64, device=device)  # [S, W]
        self._logprobs = torch.zeros(max_rows, 0, device=device)  # [S, W]
        self._uniforms = torch.zeros(max_rows, 0, dtype=torch.float64, device=device)  # [S, W], draw the tokens
        self._slots = torch.arange(max_rows, device=device)
        self._has_temperature = self._has_truncation = self._has_greedy = self._has_stops = False
        # copies of tensor values, so that most steps read no tensor
        self._longest = 0  # greatest position + 1
        self._most_generated = 0
        self._steps_to_limit = 0  # until the first row reaches its max_new_tokens
        self._steps_with_ban = 0  # until every row has its min_new_tokens

    @property
    def size(self) -> int:
        return len(self._rows)

    def admit(self, rows: Sequence[Row], weight_version: int) -> None:
        """Computes the prompts, equal ones once, and draws the first token of each row."""
        first, end = self.size, self.size + len(rows)
        prompts, owners, pictures = _distinct([row.prompt for row in rows], rows)
        logits = self._decoder.append(prompts, owners, *pictures)
        for row in rows:
            row.version_changes = [(0, weight_version)]
        self._fill_rows(rows, [0] * len(rows))
        self._widen(1)
        self._fill_uniforms(first)

        self._steps_with_ban = 1
        self._draw(first, end, logits[torch.tensor(owners, device=self._device)])
        self._count()

    def step(self) -> None:
        """Draws one token in every row."""
        n = self.size
        if self._most_generated >= self._token_ids.shape[1]:
            self._widen(self._most_generated + 1)
        logits = self._decoder.step(self._current[:n], self._positions[:n], self._longest)
        self._draw(0, n, logits)
        self._longest += 1
        self._most_generated += 1
        self._steps_to_limit -= 1
        self._steps_with_ban -= 1

    def retire(self) -> list[tuple[Row, Completion]]:
        """Removes finished rows; returns them with their completions, in slot order."""
        n = self.size
        if n == 0 or not (self._steps_to_limit <= 0 or self._has_stops):
            return []
        is_stop = self._current[:n, None] == self._stops[:n]
        if self._steps_to_limit > 0 and not bool(is_stop.any()):
            return []
        is_stopped = is_stop.any(1)
        is_finished = is_stopped | (self._generated[:n] >= self._limits[:n])
        slots = is_finished.nonzero()[:, 0]
        finished = slots.tolist()
        lengths = self._generated[slots].tolist()
        reasons: list[FinishReason] = ["stop" if stopped else "length" for stopped in is_stopped[slots].tolist()]
        longest = max(lengths)
        token_ids = self._token_ids[slots, :longest].int().cpu().numpy()
        logprobs = self._logprobs[slots, :longest].cpu().numpy()
        if not np.isfinite(logprobs).all():
            raise FloatingPointError("the logits of a token are not finite")
        self._encode_supports()
        completions = []
        versions_of: dict[tuple[Any, ...], TokenArray[int]] = {}  # rows of a wave have the same
        for place, slot in enumerate(finished):
            row, length = self._rows[slot], lengths[place]
            key = length, *row.version_changes
            versions = versions_of.get(key) or versions_of.setdefault(key, _versions(row.version_changes, length))
            ids = TokenArray[int].of_stored(token_ids[place, :length].tobytes(), b"", "i")
            of_ids = TokenArray[float].of_stored(logprobs[place, :length].tobytes(), b"", "f")
            completions.append((row, Completion(ids, of_ids, versions, reasons[place], row.codes())))
        self._drop(set(finished))
        return completions

    def remove(self, is_unwanted: Callable[[Row], bool]) -> None:
        """Removes rows without a completion."""
        slots = {slot for slot, row in enumerate(self._rows) if is_unwanted(row)}
        if slots:
            self._drop(slots)

    def unfinished(self) -> dict[int, Completion]:
        """What is written of each row so far, by seed, in slot order."""
        self._encode_supports()
        lengths = self._generated[: self.size].tolist()
        return {
            row.seed: Completion(
                self._token_ids[slot, :length].tolist(),
                self._logprobs[slot, :length].tolist(),
                _versions(row.version_changes, length),
                "abort",
                row.codes(),
            )
            for slot, (row, length) in enumerate(zip(self._rows, lengths, strict=True))
        }

    def readmit(self, rows: Sequence[Row], weight_version: int) -> None:
        """Computes the key-values of rows that were `written` in part; draws no token."""
        first, most = self.size, self._most_generated
        begun = [row.written for row in rows if row.written is not None]
        sequences, owners, pictures = _distinct(
            [(*row.prompt, *part.token_ids[:-1]) for row, part in zip(rows, begun, strict=True)], rows
        )
        self._decoder.append(sequences, owners, *pictures)
        lengths = [len(part.token_ids) for part in begun]
        self._fill_rows(rows, lengths)
        self._widen(max(most, *lengths) + 1)
        self._fill_uniforms(first)
        for slot, (row, part) in enumerate(zip(rows, begun, strict=True), start=first):
            length = len(part.token_ids)
            self._fill(self._token_ids[slot], 0, part.token_ids)
            self._fill(self._logprobs[slot], 0, part.logprobs)
            self._current[slot] = part.token_ids[-1]
            row.supports = [bytes(part.supports or ())]
            row.version_changes = [*_changes(part.weight_versions), (length, weight_version)]
        self._count()

    def recompute(self, weight_version: int) -> None:
        """Recomputes the key-values of all rows with the decoder's current weights; draws no token."""
        self._decoder.clear()
        if not self._rows:
            return
        generated = self._generated[: self.size].tolist()
        written = self._token_ids[: self.size, : max(generated)].tolist()
        every = []
        for row, length, token_ids in zip(self._rows, generated, written, strict=True):
            every.append((*row.prompt, *token_ids[: length - 1]))
            row.version_changes.append((length, weight_version))
        sequences, owners, pictures = _distinct(every, self._rows)
        self._decoder.append(sequences, owners, *pictures)

    def _draw(self, first: int, end: int, logits: Tensor) -> None:
        """Draws one token for the slots `first` to `end`; changes the logits."""
        rows, generated = self._slots[first:end], self._generated[first:end]
        if self._steps_with_ban > 0 and self._has_stops:
            ban_stop_tokens(logits, generated < self._minima[first:end], self._stops[first:end])
        token_ids, logprobs, supports = draw_tokens(
            logits,
            self._uniforms[rows, generated],
            temperature=self._temperature[first:end] if self._has_temperature else None,
            top_k=self._top_k[first:end] if self._has_truncation else None,
            top_p=self._top_p[first:end] if self._has_truncation else None,
            is_greedy=self._is_greedy[first:end] if self._has_greedy else None,
        )
        self._token_ids[rows, generated] = token_ids
        self._logprobs[rows, generated] = logprobs
        self._current[first:end] = token_ids
        self._counters[:, first:end] += 1
        if supports is not None:
            self._draws.append((self._rows[first:end], supports.nonzero().cpu().numpy(), token_ids.cpu().numpy()))
            if len(self._draws) == _MAX_DRAWS:
                self._encode_supports()

    def _encode_supports(self) -> None:
        """Gives rows the codes of their last draws; of many at once, since numpy's calls cost most of it."""
        draws, self._draws = self._draws, []
        if draws:
            rows, parts, token_ids = zip(*draws, strict=True)
            firsts = itertools.accumulate(map(len, rows), initial=0)
            places = np.concatenate([np.add(part, (first, 0)) for first, part in zip(firsts, parts, strict=False)])
            codes = encode_supports(places[:, 0], places[:, 1], np.concatenate(token_ids), self._vocab_size)
            for row, code in zip(itertools.chain(*rows), codes, strict=True):
                row.supports.append(code)

    def _drop(self, leaving: set[int]) -> None:
        """Removes the rows of these slots; the last rows take their places."""
        old_size, new_size = self.size, self.size - len(leaving)
        holes = [slot for slot in sorted(leaving) if slot < new_size]
        movers = [slot for slot in range(new_size, old_size) if slot not in leaving]
        order = list(range(new_size))
        for hole, mover in zip(holes, movers, strict=True):
            order[hole] = mover
        self._decoder.keep(order, self._longest)
        self._rows = [self._rows[source] for source in order]
        if holes:
            targets, sources = torch.tensor([holes, movers], device=self._device)
            self._counters[:, targets] = self._counters[:, sources]
            for tensor in (
                *(self._current, self._limits, self._minima, self._seeds, self._top_k, self._top_p, self._temperature),
                *(self._is_greedy, self._stops, self._token_ids, self._logprobs, self._uniforms),
            ):
                tensor[targets] = tensor[sources]
        self._count()

    def _count(self) -> None:
        """Updates the copies of tensor values."""
        n = self.size
        if n == 0:
            self._longest = self._most_generated = self._steps_to_limit = self._steps_with_ban = 0
            return
        generated = self._generated[:n]
        self._longest = int(self._positions[:n].max()) + 1
        self._most_generated = int(generated.max())
        self._steps_to_limit = int((self._limits[:n] - generated).min())
        self._steps_with_ban = int((self._minima[:n] - generated).max())

    def _fill_rows(self, rows: Sequence[Row], generated: Sequence[int]) -> None:
        """Sets what a step needs of new rows, which have drawn so many tokens each."""
        first = self.size
        self._rows.extend(rows)

        positions = [len(row.prompt) + num - 1 for row, num in zip(rows, generated, strict=True)]
        self._fill(self._positions, first, positions)
        self._fill(self._generated, first, generated)
        self._fill(self._seeds, first, [row.seed for row in rows])
        kinds = {_kind(row.sampling): row.sampling for row in self._rows}  # few, with hundreds of rows
        places = {kind: place for place, kind in enumerate(kinds)}
        which = torch.tensor([places[_kind(row.sampling)] for row in rows], device=self._device)
        every = list(kinds.values())
        kept = [sampling if sampling.is_truncated else Sampling() for sampling in every]  # greedy is not
        for tensor, values in (
            (self._limits, [sampling.max_new_tokens for sampling in every]),
            (self._minima, [s.min_new_tokens if s.stop_token_ids else 0 for s in every]),
            (self._top_k, [s.max_support if s.is_truncated else self._vocab_size for s in kept]),
            (self._top_p, [sampling.top_p for sampling in kept]),
            (self._temperature, [sampling.temperature or 1.0 for sampling in every]),
            (self._is_greedy, [sampling.temperature == 0 for sampling in every]),
            self._stops_of([sampling.stop_token_ids for sampling in every]),
        ):
            of_kinds = torch.tensor(values, dtype=tensor.dtype, device=self._device)
            tensor[first : self.size] = of_kinds[which]
        self._has_temperature = any(sampling.temperature not in (0, 1) for sampling in every)
        self._has_truncation = any(sampling.is_truncated for sampling in every)
        self._has_greedy = any(sampling.temperature == 0 for sampling in every)
        self._has_stops = any(sampling.stop_token_ids for sampling in every)

    def _fill_uniforms(self, first: int) -> None:
        """The numbers that draw the tokens of the rows from this slot on."""
        self._uniforms[first : self.size] = uniforms(self._seeds[first : self.size], 0, self._uniforms.shape[1])

    def _fill(self, tensor: Tensor, first: int, values: Sequence[int | float | bool]) -> None:
        tensor[first : first + len(values)] = torch.tensor(values, dtype=tensor.dtype, device=self._device)

    def _stops_of(self, stops: Sequence[tuple[int, ...]]) -> tuple[Tensor, list[list[int]]]:
        """The rows' stop tokens, with room for these, and these as they stand there."""
        width = max(self._stops.shape[1], *(len(ids) for ids in stops), 1)
        if width > self._stops.shape[1]:
            wider = torch.full((self.max_rows, width), -1, device=self._device)
            wider[:, : self._stops.shape[1]] = self._stops
            self._stops = wider
        return self._stops, [[*ids, *[-1] * (width - len(ids))] for ids in stops]

    def _widen(self, num_tokens: int) -> None:
        """Makes room for at least `num_tokens` in every row."""
        old = self._token_ids.shape[1]
        if num_tokens <= old:
            return
        width = max(num_tokens, 2 * old, _FIRST_WIDTH)
        more = uniforms(self._seeds, old, width - old)
        self._uniforms = torch.cat([self._uniforms, more], dim=1)
        self._token_ids = torch.nn.functional.pad(self._token_ids, (0, width - old))
        self._logprobs = torch.nn.functional.pad(self._logprobs, (0, width - old))


def _distinct(
    sequences: Sequence[tuple[int, ...]], rows: Sequence[Row]
) -> tuple[list[tuple[int, ...]], list[int], list[list[Tensor | None]]]:
    """The sequences that differ in tokens or pictures; the index of each row's; and the decoder's argument for their
    pictures, if there are any."""
    places: dict[tuple[tuple[int, ...], tuple[str, ...]], int] = {}
    owners = [
        places.setdefault((sequence, row.images), len(places)) for sequence, row in zip(sequences, rows, strict=True)
    ]
    prompts = [sequence for sequence, _ in places]
    if not any(row.images for row in rows):
        return prompts, owners, []
    pictures: list[Tensor | None] = [None] * len(places)
    for owner, row in zip(owners, rows, strict=True):
        pictures[owner] = row.pixels
    return prompts, owners, [pictures]


def _changes(versions: Sequence[int]) -> list[tuple[int, int]]:
    """The inverse of `_versions`."""
    return [(index, version) for index, version in enumerate(versions) if not index or version != versions[index - 1]]


def _versions(changes: Sequence[tuple[int, int]], length: int) -> TokenArray[int]:
    """The weight version of each token, from the positions at which it changed."""
    ends = [*(start for start, _ in changes[1:]), length]
    runs = [(version, end - start) for (start, version), end in zip(changes, ends, strict=True)]
    return TokenArray.of_runs(runs, "i")
