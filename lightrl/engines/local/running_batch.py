"""RunningBatch: the rows being decoded; they enter and step together, and leave one by one.

Slots 0 to `size - 1` are in use, so that each tensor in a step is a plain slice; when a row leaves, the last row
moves into the free slot. `decode_thread.py` decides when to admit, step and recompute, and handles threads, queues and
asyncio. A token is sampled by inverting the cumulative distribution at a uniform number that depends only on seed and
position. So a completion depends only on its seed and logits, not on the batch or on global random state.

Shapes: S slots, n = `size` rows in use, W tokens that fit in a row, V vocabulary.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightrl.columns import SUPPORTS, TOPK_NAMES, TokenArray, column_named, topk_parts
from lightrl.engines.engine import Completion
from lightrl.engines.local.decoder import Decoder
from lightrl.functional import encode_supports
from lightrl.functional.device_copy import on_device
from lightrl.trajectory import FinishReason, Sampling

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64, the increment of splitmix64
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def completion_seed(seed: int, sample: int) -> int:
    """Returns the int64 seed of a request's completion number `sample`; completion 0 uses the request's seed."""
    if sample == 0:
        return seed
    mixed = _mix(torch.tensor(seed, dtype=torch.int64) ^ _mix(torch.tensor(sample, dtype=torch.int64) * _GOLDEN))
    return int(mixed)


def uniforms(seeds: Tensor, first: int, count: int) -> Tensor:
    """Returns a uniform random number for each seed in `seeds` [n] int64 and each of `count` positions from `first` on.

    The generator is splitmix64 (https://doi.org/10.1145/2660193.2660195); its initial state is a hash of the seed.

    Returns:
        [n, count] float64 in [0, 1), with 53 random bits.
    """
    counters = torch.arange(first + 1, first + count + 1, dtype=torch.int64, device=seeds.device)
    bits = _mix(_mix(seeds)[:, None] + counters[None, :] * _GOLDEN)
    return _shift_right(bits, 11).to(torch.float64) * 2.0**-53


def ban_stop_tokens(logits: Tensor, is_banned: Tensor, stop_token_ids: Tensor) -> None:
    """Sets the logits [n, V] of stop tokens to -inf, in place, in the rows where `is_banned` [n] is true.

    `stop_token_ids` [n, K] is padded with -1.
    """
    is_out = is_banned[:, None] & (stop_token_ids >= 0)
    bound = torch.where(is_out, -torch.inf, torch.inf).to(logits.dtype)
    logits.scatter_reduce_(1, stop_token_ids.clamp(min=0), bound, "amin")


def sample_tokens(
    logits: Tensor,
    uniform: Tensor,
    *,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    is_greedy: Tensor | None = None,
    num_top: int = 0,
) -> tuple[Tensor, Tensor, Tensor | None, tuple[Tensor, Tensor] | None]:
    """Samples one token per row; returns the token, its logprob over the support, the support, and likely tokens.

    The support is the set of tokens that top-k and top-p keep. A setting is None if no row uses it, to save work.

    Args:
        logits: [n, V] float32.
        uniform: [n] float64 in [0, 1).
        temperature: [n], above 0; 1 in greedy rows, because their logprobs are not scaled.
        top_k, top_p: [n], both or neither; V and 1 in greedy rows, to keep every token.
        is_greedy: [n] bool, rows that get the most likely token.
        num_top: K, the number of most likely tokens to return, at most V.

    Returns:
        Token ids [n] int64; logprobs [n] float32; supports [n, V] bool, None if `top_k` is None, and False everywhere
        in rows that are not truncated; the ids and logprobs of the K most likely tokens of the support, [n, K] each,
        or None if K is 0.
    """
    scaled = logits if temperature is None else logits / temperature[:, None]
    logprobs = torch.log_softmax(scaled, -1)
    probabilities = logprobs.exp()
    if top_k is not None and top_p is not None:
        probabilities = truncated(probabilities, top_k, top_p)
    # float64, because with 150,000 tokens a float32 sum would lose every token below 6e-8
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    token_ids = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)
    token_ids.clamp_(max=logits.shape[-1] - 1)  # NaN logits may give V; `retire` reports their NaN logprob
    if is_greedy is not None:
        token_ids = torch.where(is_greedy[:, None], logits.argmax(-1, keepdim=True), token_ids)
    if top_k is not None and top_p is not None:
        is_truncated = ((top_k < logits.shape[-1]) | (top_p < 1))[:, None]
        is_possible = (probabilities > 0) & is_truncated
        shifted = logits - logits.amax(-1, keepdim=True)  # before dividing, because large logits would lose digits
        shifted = shifted if temperature is None else shifted / temperature[:, None]
        within = torch.log_softmax(shifted.masked_fill(~is_possible, -torch.inf), -1)
        logprobs = torch.where(is_truncated, within, logprobs)
    top = logprobs.topk(num_top) if num_top else None
    chosen = logprobs.gather(-1, token_ids)[:, 0]
    return token_ids[:, 0], chosen, None if top_k is None else is_possible, top and (top.indices, top.values)


def truncated(probabilities: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Sets the probabilities of tokens outside top-k to 0, then of the remaining tokens outside top-p.

    Top-p keeps the most likely tokens until their sum reaches `top_p`, including the token that reaches it. In a tie,
    the lower token id wins. The result [n, V] is not renormalized.
    """
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(ordered.shape[-1], device=ordered.device)
    ordered = ordered.masked_fill(ranks >= top_k[:, None], 0.0)
    cumulative = ordered.cumsum(-1, dtype=torch.float64)
    before = cumulative - ordered
    is_outside = (before >= top_p[:, None] * cumulative[:, -1:]) & (top_p[:, None] < 1)
    return torch.zeros_like(probabilities).scatter_(-1, order, ordered.masked_fill(is_outside, 0.0))


def _mix(state: Tensor) -> Tensor:
    state = (state ^ _shift_right(state, 30)) * _MIX_1
    state = (state ^ _shift_right(state, 27)) * _MIX_2
    return state ^ _shift_right(state, 31)


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Shifts right and fills with zeros; `>>` on int64 would fill with the sign bit."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


# The sampling settings that hundreds of rows may share; seeds and limits differ.
_shared_settings = operator.attrgetter("temperature", "top_p", "top_k", "stop_token_ids")
_FIRST_WIDTH = 64  # tokens; initial W, which doubles as needed
_MAX_SAMPLED = 32  # steps whose supports are encoded together


@dataclass(eq=False)
class Row:
    """One completion in progress."""

    prompt: tuple[int, ...]
    sampling: Sampling  # with this completion's seed
    attachments: tuple[str, ...] = ()  # returned by the decoder's `attachments` for the prompt
    started: Completion | None = None  # tokens that this or another engine generated earlier
    owner: Any = None  # the caller's object for this completion, such as a future; the batch does not use it
    version_changes: list[tuple[int, int]] = field(default_factory=list)  # (token index, weight version from there on)
    codes: list[bytes] = field(default_factory=list)  # encoded supports of the tokens, if sampling is truncated
    top: dict[str, list[bytes]] = field(default_factory=dict)  # the most likely tokens, if sampling asks for them
    recorded: dict[str, list[bytes]] = field(default_factory=dict)  # columns from the decoder, one part per forward

    @property
    def columns(self) -> dict[str, TokenArray[Any]]:
        """The completion's columns so far."""
        parts = self.recorded | self.top | ({SUPPORTS.name: self.codes} if self.sampling.is_truncated else {})
        return {
            name: TokenArray.of_stored(b"".join(codes), b"", column_named(name).code) for name, codes in parts.items()
        }


class RunningBatch:
    """The rows being decoded. Each has at least one generated token; the last one is not yet in the KV cache."""

    def __init__(self, decoder: Decoder, *, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self.max_rows = max_rows  # S, the maximum of `size`
        self._decoder = decoder  # call `recompute` after its weights have changed
        self._vocab_size = vocab_size  # V
        self.device = device
        self._rows: list[Row] = []
        self._sampled: list[tuple[list[Row], Any, Any]] = []  # not encoded: rows, supports as (row, id) [M, 2], tokens
        # This state is on the host, so finding finished rows reads only sampled tokens from the device.
        self._prompt_lengths = np.zeros(max_rows, np.int64)
        self._lengths = np.zeros(max_rows, np.int64)  # tokens so far
        self._limits = np.zeros(max_rows, np.int64)  # max_new_tokens
        self._minimums = np.zeros(max_rows, np.int64)  # min_new_tokens
        self._stop_ids = np.full((max_rows, 1), -1)  # [S, K], -1 for none
        self._token_ids = np.zeros((max_rows, 0), np.int32)  # [S, W]
        self._logprobs = np.zeros((max_rows, 0), np.float32)  # [S, W]
        self._unread: list[tuple[Any, Any, Tensor]] = []  # slots [n], their lengths [n], tokens and logprobs [2, n]
        # State on the device.
        self._counters = torch.zeros(2, max_rows, dtype=torch.int64, device=device)
        self._positions, self._generated = self._counters  # [S], position of the last token; [S], tokens so far
        self._current = torch.zeros(max_rows, dtype=torch.int64, device=device)  # [S] the last token
        self._seeds = torch.zeros_like(self._current)
        self._top_k = torch.zeros_like(self._current)
        self._top_p = torch.ones(max_rows, dtype=torch.float32, device=device)
        self._temperature = torch.ones(max_rows, dtype=torch.float32, device=device)
        self._is_greedy = torch.zeros(max_rows, dtype=torch.bool, device=device)
        self._uniforms = torch.zeros(max_rows, 0, dtype=torch.float64, device=device)  # [S, W], one for each token
        self._slots = torch.arange(max_rows, device=device)
        self._has_temperature = self._has_truncation = self._has_greedy = False

    @property
    def size(self) -> int:
        return len(self._rows)

    def capacity(self, waiting: Iterable[Row]) -> int:
        """Returns how many rows fit into memory at full length, if waiting rows enter in order; at least 1."""
        size, longest = self.size, _longest_end(self._rows)
        for row in itertools.islice(waiting, self.max_rows - size):
            longest = max(longest, _longest_end([row]))
            if size and not self._decoder.fits(size + 1, longest):
                return size
            size += 1
        return self.max_rows

    def reserve(self, rows: Sequence[Row]) -> None:
        """Reserves KV cache memory for these rows; called before `admit` and `readmit`."""
        self._decoder.reserve(self.size + len(rows), _longest_end([*self._rows, *rows]))

    def admit(self, rows: Sequence[Row], weight_version: int) -> None:
        """Adds rows: computes each distinct prompt once, and samples each row's first token."""
        first = self.size
        prompts, sequence_indices, attachments = _distinct([row.prompt for row in rows], rows)
        logits = self._decoder.append(prompts, sequence_indices, attachments)
        for row in rows:
            row.version_changes = [(0, weight_version)]
        self._add_recorded(rows, sequence_indices)
        self._fill_rows(rows, [0] * len(rows))
        self._sample(first, self.size, logits[on_device(sequence_indices, self.device)])

    def step(self) -> None:
        """Samples one token in every row."""
        n = self.size
        self._widen(int(self._lengths[:n].max()) + 1)
        logits = self._decoder.step(self._current[:n], self._positions[:n], self._longest())
        self._add_recorded(self._rows, range(n))
        self._sample(0, n, logits)

    def retire(self) -> list[tuple[Row, Completion]]:
        """Removes finished rows; returns them with their completions, in slot order."""
        n = self.size
        lengths = self._lengths[:n]
        is_limited = lengths >= self._limits[:n]
        may_stop = (lengths > self._minimums[:n]) & (self._stop_ids[:n, 0] >= 0)
        if not (is_limited | may_stop).any():
            return []
        self.read()
        last = self._token_ids[np.arange(n), lengths - 1]
        is_stopped = (last[:, None] == self._stop_ids[:n]).any(1)
        finished = np.flatnonzero(is_stopped | is_limited).tolist()
        if not finished:
            return []
        self._encode_supports()
        completions = []
        versions_of: dict[tuple[Any, ...], TokenArray[int]] = {}  # rows that were admitted together share versions
        for slot in finished:
            row, length = self._rows[slot], int(lengths[slot])
            logprobs = self._logprobs[slot, :length]
            if not np.isfinite(logprobs).all():
                raise FloatingPointError("the logits of a token are not finite")
            key = length, *row.version_changes
            versions = versions_of.get(key) or versions_of.setdefault(key, _versions(row.version_changes, length))
            ids = TokenArray[int].of_stored(self._token_ids[slot, :length].tobytes(), b"", "i")
            token_logprobs = TokenArray[float].of_stored(logprobs.tobytes(), b"", "f")
            reason: FinishReason = "stop" if is_stopped[slot] else "length"
            completions.append((row, Completion(ids, token_logprobs, versions, reason, row.columns)))
        self._drop(set(finished))
        return completions

    def read(self) -> None:
        """Copies sampled tokens to the host; only this, supports and columns wait for the device."""
        unread, self._unread = self._unread, []
        if not unread:
            return
        slots, lengths, tokens = zip(*unread, strict=True)
        values = torch.cat(tokens, dim=1).cpu().numpy()
        slots_and_lengths = np.concatenate(slots), np.concatenate(lengths)
        self._token_ids[slots_and_lengths] = values[0]
        self._logprobs[slots_and_lengths] = values[1].astype(np.int32).view(np.float32)

    def remove(self, is_unwanted: Callable[[Row], bool]) -> None:
        """Removes the rows for which `is_unwanted` is true, without returning completions."""
        slots = {slot for slot, row in enumerate(self._rows) if is_unwanted(row)}
        if slots:
            self._drop(slots)

    def unfinished(self) -> dict[int, Completion]:
        """Returns each row's completion so far, keyed by seed, in slot order."""
        self.read()
        self._encode_supports()
        return {
            row.sampling.seed: Completion(
                self._token_ids[slot, :length].tolist(),
                self._logprobs[slot, :length].tolist(),
                _versions(row.version_changes, length),
                "abort",
                row.columns,
            )
            for slot, (row, length) in enumerate(zip(self._rows, self._lengths[: self.size].tolist(), strict=True))
        }

    def readmit(self, rows: Sequence[Row], weight_version: int) -> None:
        """Adds rows that have `started` tokens, and computes their KV cache; samples no token."""
        first = self.size
        starts = [row.started for row in rows if row.started is not None]
        sequences, sequence_indices, attachments = _distinct(
            [(*row.prompt, *part.token_ids[:-1]) for row, part in zip(rows, starts, strict=True)], rows
        )
        self._decoder.append(sequences, sequence_indices, attachments)
        self._add_recorded(rows, sequence_indices)
        self._fill_rows(rows, [len(part.token_ids) for part in starts])
        self._current[first : self.size] = on_device([part.token_ids[-1] for part in starts], self.device)
        for slot, (row, part) in enumerate(zip(rows, starts, strict=True), start=first):
            length = len(part.token_ids)
            self._token_ids[slot, :length] = part.token_ids
            self._logprobs[slot, :length] = part.logprobs
            row.codes = [bytes(part.columns.get(SUPPORTS.name, ()))]
            row.top = {name: [part.columns[name].stored[0]] for name in TOPK_NAMES if name in part.columns}
            row.version_changes = [*_changes(part.weight_versions), (length, weight_version)]

    def recompute(self, weight_version: int) -> None:
        """Recomputes the KV cache of all rows with the decoder's current weights; samples no token."""
        self._decoder.clear()
        if not self._rows:
            return
        self.read()
        tokens_by_row = []
        for slot, (row, length) in enumerate(zip(self._rows, self._lengths[: self.size].tolist(), strict=True)):
            tokens_by_row.append((*row.prompt, *self._token_ids[slot, : length - 1].tolist()))
            row.version_changes.append((length, weight_version))
            row.recorded.clear()
        sequences, sequence_indices, attachments = _distinct(tokens_by_row, self._rows)
        self._decoder.append(sequences, sequence_indices, attachments)
        self._add_recorded(self._rows, sequence_indices)

    def _longest(self) -> int:
        """Returns the number of tokens in the longest row, including its prompt."""
        return int((self._prompt_lengths + self._lengths)[: self.size].max())

    def _sample(self, first: int, end: int, logits: Tensor) -> None:
        """Samples one token for each slot from `first` up to `end`, exclusive; modifies the logits."""
        rows, generated = self._slots[first:end], self._generated[first:end]
        lengths = self._lengths[first:end]
        is_banned = (lengths < self._minimums[first:end]) & (self._stop_ids[first:end, 0] >= 0)
        if is_banned.any():
            stops = on_device(self._stop_ids[first:end], self.device)
            ban_stop_tokens(logits, on_device(is_banned, self.device), stops)
        num_top = max(row.sampling.topk_logprobs for row in self._rows[first:end])
        token_ids, logprobs, supports, top = sample_tokens(
            logits,
            self._uniforms[rows, generated],
            temperature=self._temperature[first:end] if self._has_temperature else None,
            top_k=self._top_k[first:end] if self._has_truncation else None,
            top_p=self._top_p[first:end] if self._has_truncation else None,
            is_greedy=self._is_greedy[first:end] if self._has_greedy else None,
            num_top=min(num_top, self._vocab_size),
        )
        tokens = torch.stack((token_ids, logprobs.view(torch.int32)))
        self._unread.append((np.arange(first, end), lengths.copy(), tokens))
        self._current[first:end] = token_ids
        self._counters[:, first:end] += 1
        lengths += 1
        if top is not None:
            widths = [row.sampling.topk_logprobs for row in self._rows[first:end]]
            for row, parts in zip(self._rows[first:end], topk_parts(*top, widths), strict=True):
                for name, values in parts.items():
                    row.top.setdefault(name, []).append(values)
        if supports is not None:
            self._sampled.append((self._rows[first:end], supports.nonzero().cpu().numpy(), token_ids.cpu().numpy()))
            if len(self._sampled) == _MAX_SAMPLED:
                self._encode_supports()

    def _add_recorded(self, rows: Sequence[Row], sequence_indices: Sequence[int]) -> None:
        """Adds to each row the columns that the decoder recorded for the row's sequence in the latest forward."""
        for name, latest in self._decoder.latest_columns.items():
            stored = [values.numpy().tobytes() for values in latest]  # for each sequence
            for row, index in zip(rows, sequence_indices, strict=True):
                row.recorded.setdefault(name, []).append(stored[index])

    def _encode_supports(self) -> None:
        """Encodes the supports of several steps at once, because each numpy call is costly; adds them to their rows."""
        sampled, self._sampled = self._sampled, []
        if sampled:
            rows, parts, token_ids = zip(*sampled, strict=True)
            firsts = itertools.accumulate(map(len, rows), initial=0)
            supports = np.concatenate([np.add(part, (first, 0)) for first, part in zip(firsts, parts, strict=False)])
            codes = encode_supports(supports[:, 0], supports[:, 1], np.concatenate(token_ids), self._vocab_size)
            for row, code in zip(itertools.chain(*rows), codes, strict=True):
                row.codes.append(code)

    def _drop(self, leaving: set[int]) -> None:
        """Removes the rows in these slots; the last rows move into the free slots."""
        self.read()
        old_size, new_size = self.size, self.size - len(leaving)
        holes = [slot for slot in sorted(leaving) if slot < new_size]
        movers = [slot for slot in range(new_size, old_size) if slot not in leaving]
        order = list(range(new_size))
        for hole, mover in zip(holes, movers, strict=True):
            order[hole] = mover
        self._decoder.keep_rows(order, self._longest())
        self._rows = [self._rows[source] for source in order]
        if holes:
            targets, sources = on_device([holes, movers], self.device)
            self._counters[:, targets] = self._counters[:, sources]
            for tensor in (
                *(self._current, self._seeds, self._top_k, self._top_p, self._temperature, self._is_greedy),
                self._uniforms,
            ):
                tensor[targets] = tensor[sources]
            for array in (
                *(self._prompt_lengths, self._lengths, self._limits, self._minimums, self._stop_ids),
                *(self._token_ids, self._logprobs),
            ):
                array[holes] = array[movers]

    def _fill_rows(self, rows: Sequence[Row], generated: Sequence[int]) -> None:
        """Adds rows and their state for the next step; `generated` has each row's number of generated tokens."""
        first = self.size
        self._rows.extend(rows)
        new = slice(first, self.size)
        self._prompt_lengths[new] = [len(row.prompt) for row in rows]
        self._lengths[new] = generated
        self._limits[new] = [row.sampling.max_new_tokens for row in rows]
        self._minimums[new] = [row.sampling.min_new_tokens for row in rows]
        self._positions[new] = on_device((self._prompt_lengths + self._lengths)[new] - 1, self.device)
        self._generated[new] = on_device(generated, self.device)
        self._seeds[new] = on_device([row.sampling.seed for row in rows], self.device)
        self._widen(max(generated) + 1)
        self._uniforms[new] = uniforms(self._seeds[new], 0, self._uniforms.shape[1])
        slots_by_settings: dict[object, list[int]] = {}  # hundreds of rows share a few settings
        for slot, row in enumerate(self._rows):
            slots_by_settings.setdefault(_shared_settings(row.sampling), []).append(slot)
        self._has_temperature = self._has_truncation = self._has_greedy = False
        for slots in slots_by_settings.values():
            sampling = self._rows[slots[0]].sampling
            stops = sampling.stop_token_ids
            if (missing := len(stops) - self._stop_ids.shape[1]) > 0:
                self._stop_ids = np.pad(self._stop_ids, ((0, 0), (0, missing)), constant_values=-1)
            self._stop_ids[slots] = -1
            self._stop_ids[slots, : len(stops)] = stops
            indices = on_device(slots, self.device)
            is_truncated, is_greedy = sampling.is_truncated, sampling.temperature == 0
            self._top_k[indices] = sampling.max_support if is_truncated else self._vocab_size
            self._top_p[indices] = sampling.top_p if is_truncated else 1.0
            self._temperature[indices] = sampling.temperature or 1.0
            self._is_greedy[indices] = is_greedy
            self._has_temperature |= sampling.temperature not in (0, 1)
            self._has_truncation |= is_truncated
            self._has_greedy |= is_greedy

    def _widen(self, num_tokens: int) -> None:
        """Grows W to at least `num_tokens`."""
        old = self._token_ids.shape[1]
        if num_tokens <= old:
            return
        width = max(num_tokens, 2 * old, _FIRST_WIDTH)
        new_uniforms = uniforms(self._seeds, old, width - old)
        self._uniforms = torch.cat([self._uniforms, new_uniforms], dim=1)
        more_columns = ((0, 0), (0, width - old))
        self._token_ids, self._logprobs = np.pad(self._token_ids, more_columns), np.pad(self._logprobs, more_columns)


def _longest_end(rows: Sequence[Row]) -> int:
    """Returns the maximum length, including the prompt, that these rows may reach."""
    return max((len(row.prompt) + row.sampling.max_new_tokens for row in rows), default=0)


def _distinct(
    sequences: Sequence[tuple[int, ...]], rows: Sequence[Row]
) -> tuple[Sequence[tuple[int, ...]], list[int], Sequence[tuple[str, ...]]]:
    """Returns the distinct sequences, the index of each row's sequence among them, and each sequence's attachments."""
    index_of: dict[tuple[tuple[int, ...], tuple[str, ...]], int] = {}
    sequence_indices = [
        index_of.setdefault((sequence, row.attachments), len(index_of))
        for sequence, row in zip(sequences, rows, strict=True)
    ]
    distinct, attachments = zip(*index_of, strict=True)
    return distinct, sequence_indices, attachments


def _changes(versions: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the positions where the weight version changes; the inverse of `_versions`."""
    return [(index, version) for index, version in enumerate(versions) if not index or version != versions[index - 1]]


def _versions(changes: Sequence[tuple[int, int]], length: int) -> TokenArray[int]:
    """Returns the weight version of each token, from the positions where it changed."""
    ends = [*(start for start, _ in changes[1:]), length]
    runs = [(version, end - start) for (start, version), end in zip(changes, ends, strict=True)]
    return TokenArray.of_runs(runs, "i")
