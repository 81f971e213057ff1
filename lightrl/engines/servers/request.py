"""CompletionDraft, a completion in progress, which may take several requests; Answer, a server's answer. Does no I/O.

If a sync aborts a request, or the server is lost, the next request's prompt includes the tokens so far.
"""

from __future__ import annotations

import base64
import gc
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lightrl.columns import SUPPORTS, TOPK_IDS, TOPK_LOGPROBS, TokenArray, column_named, extended, topk_columns
from lightrl.engines.engine import Completion
from lightrl.errors import EngineError
from lightrl.functional import encode_supports
from lightrl.models import Attachments
from lightrl.trajectory import FinishReason, Sampling

_ABOVE_0_NATS = 1e-3  # how far rounding can raise a logprob above 0
NO_IDS: TokenArray[int] = TokenArray((), "i")
_NO_LOGPROBS: TokenArray[float] = TokenArray((), "f")
# Encodes a server's data for a number of tokens; raises ValueError if the data is from a different model.
Encode = Callable[[Any, int], TokenArray[Any]]


class MalformedAnswer(EngineError):
    """A server's answer is not a valid completion; the request is sent to another server."""


@dataclass(frozen=True)
class Answer:
    """The tokens that a server generated for one request."""

    token_ids: TokenArray[int] = NO_IDS
    logprobs: TokenArray[float] = _NO_LOGPROBS
    weight_versions: TokenArray[int] = NO_IDS
    finish: str = "abort"
    columns: Mapping[str, TokenArray[Any]] = field(default_factory=dict)
    raw_columns: Mapping[str, Any] = field(default_factory=dict)  # columns for `CompletionDraft.encoders` to encode
    full_support: int | None = None  # size of the smallest support that the server may have cut off
    top: Sequence[Sequence[tuple[float, int]]] | None = None  # logprobs and ids of likely tokens, for each token
    rid: object = None  # id of the answered request
    num_read: object = None  # number of prompt tokens that the server read
    max_id: int = -1  # the largest id in `token_ids` and in their supports
    problem: str = ""  # why the answer is unusable


def check_answers(rid: str, num_sent: int | None, answer_rid: object, num_read: object, server: str) -> None:
    """Raises MalformedAnswer unless the answer is for request `rid` with `num_sent` tokens (None: any number)."""
    if answer_rid != rid or num_sent not in (None, num_read):
        raise MalformedAnswer(
            f"{server} answered request {rid} of {num_sent} tokens as if it were {answer_rid} of {num_read}. Look for "
            "a proxy or balancer that mixes up connections, changes requests, or sets their id (X-Request-Id)."
        )


@dataclass(frozen=True)
class NamedVersion:
    """A weight version that servers hold under a name, next to the base weights; tokens are tagged with `version`."""

    version: int
    name: str
    base_version: int  # the base weights' version, which the server reports for the tokens


@dataclass
class CompletionDraft:
    """A completion in progress."""

    prompt: list[int]
    sampling: Sampling  # `max_new_tokens` limits the completion, not each request
    sample: int = 0  # index among the prompt's n completions
    token_ids: TokenArray[int] = NO_IDS
    logprobs: TokenArray[float] = _NO_LOGPROBS
    weight_versions: TokenArray[int] = NO_IDS
    columns: Mapping[str, TokenArray[Any]] = field(default_factory=dict)  # columns of the prompt and the tokens so far
    encoders: Mapping[str, Encode] = field(default_factory=dict)  # encoders for the columns to request, except supports
    finish_reason: FinishReason | None = None
    attachments: Attachments | None = None
    named_version: NamedVersion | None = None  # the latest request's version; None means the server's only weights
    vocab_size: int = 2**31
    num_ties: int = 8  # likely tokens that vLLM returns beyond `max_support`, in case some tie with the last

    def start_with(self, started: Completion) -> None:
        """Starts with the tokens of an unfinished completion."""
        self.token_ids = TokenArray.joined([started.token_ids], "i")
        self.logprobs = TokenArray.joined([started.logprobs], "f")
        self.weight_versions = TokenArray.joined([started.weight_versions], "i", as_runs=True)
        self.columns = extended({}, len(self.prompt), started.columns, len(started.token_ids))

    @property
    def last_version(self) -> int:
        return self.weight_versions[-1] if self.weight_versions else -1

    @property
    def num_tokens(self) -> int:
        """The number of tokens in the prompt and the completion so far."""
        return len(self.prompt) + len(self.token_ids)

    @property
    def max_tokens(self) -> int:
        """The largest possible number of tokens in prompt and completion; measures the load on a server."""
        return len(self.prompt) + self.sampling.max_new_tokens

    def add(
        self, answer: Answer, server: str, *, path: str = "/generate", column_help: Mapping[str, str] | None = None
    ) -> None:
        """Appends an answer, or raises MalformedAnswer; sets `finish_reason` if the completion is finished."""
        token_ids, logprobs, versions, finish = answer.token_ids, answer.logprobs, answer.weight_versions, answer.finish
        if answer.problem:
            problem = f"{server} answered {path} with {answer.problem}. Check that this run loaded its weights."
            raise MalformedAnswer(problem)
        if (named := self.named_version) is not None:
            if other := sorted({version for version, _ in versions.runs()} - {named.base_version}):
                problem = f"{server} generated with base version {other}; {named.name} needs base {named.base_version}."
                raise MalformedAnswer(problem)
            versions = TokenArray.of_runs([(named.version, len(token_ids))], "i")
        if answer.max_id >= self.vocab_size:
            raise MalformedAnswer(
                f"{server} returned token id {answer.max_id}, outside the trainer's vocabulary (0 to "
                f"{self.vocab_size - 1}). Check that it serves the trainer's model."
            )
        num = len(self.token_ids) + len(token_ids)
        if num > self.sampling.max_new_tokens:
            raise MalformedAnswer(
                f"{server} generated {len(token_ids)} tokens after {len(self.token_ids)}, more than "
                f"max_new_tokens={self.sampling.max_new_tokens}."
            )
        order = [self.last_version, *(version for version, _ in versions.runs())]
        if order != sorted(order):
            raise MalformedAnswer(f"{server} generated with weight versions {order[1:]} after {self.last_version}.")
        if finish != "abort" and not token_ids:
            raise MalformedAnswer(f"{server} ended a completion without a token.")
        stops = np.flatnonzero(np.isin(np.asarray(token_ids), self.sampling.stop_token_ids))
        if len(stops) and (stops[0] + 1 < len(token_ids) or num < self.sampling.min_new_tokens):
            raise MalformedAnswer(
                f"{server} sampled stop token {token_ids[stops[0]]} before min_new_tokens="
                f"{self.sampling.min_new_tokens}, or did not stop there. Look for a proxy that drops these settings."
            )
        if token_ids:
            columns = {**answer.columns, **self._encoded(answer, server)}
            if not self.sampling.is_truncated:  # the most likely tokens were read as a support
                columns.pop(SUPPORTS.name, None)
            num_top = self.sampling.topk_logprobs
            if num_top and answer.top is not None and len(answer.top) == len(token_ids):
                try:
                    top: dict[str, Any] = topk_columns(answer.top, num_top)
                    check_numbers(top[TOPK_IDS.name], top[TOPK_LOGPROBS.name], self.vocab_size)
                except (OverflowError, TypeError, ValueError) as error:
                    raise MalformedAnswer(f"{server} returned likely tokens with {error}.") from error
                columns |= top
            for name, is_needed in {
                SUPPORTS.name: self.sampling.is_truncated,
                TOPK_IDS.name: num_top > 0,
                **dict.fromkeys(self.encoders, finish != "abort"),
            }.items():
                if is_needed and name not in columns:
                    raise MalformedAnswer(
                        f"{server} did not return the {name} of its tokens, which training needs. "
                        f"{(column_help or {}).get(name, '')}"
                    )
            if self.sampling.is_truncated and (answer.full_support or self.vocab_size) < self.vocab_size:
                self.num_ties *= 8  # for the next attempt
                raise MalformedAnswer(
                    f"{server} returns only the {answer.full_support} most likely tokens, but may have sampled from "
                    f"more, because others may tie with the {self.sampling.max_support} most likely. Change top_k or "
                    "top_p, or use SGLangEngine."
                )
            self.columns = extended(self.columns, self.num_tokens, columns, len(token_ids))
        self.token_ids = TokenArray.joined([self.token_ids, token_ids], "i")
        self.logprobs = TokenArray.joined([self.logprobs, logprobs], "f")
        self.weight_versions = TokenArray.joined([self.weight_versions, versions], "i", as_runs=True)
        if len(stops):  # whatever `finish` says: SGLang may abort a request before it notices the stop token
            self.finish_reason = "stop"
        elif num == self.sampling.max_new_tokens:
            self.finish_reason = "length"
        # Otherwise the completion continues: it was aborted, or stopped at an end token that sampling does not list.
        elif self.sampling.grammar:  # a server matches a grammar from the start, so the completion starts over
            self.token_ids, self.logprobs, self.weight_versions, self.columns = NO_IDS, _NO_LOGPROBS, NO_IDS, {}

    def check(self, answer: Answer, server: str, rid: str, oldest: int, newest: int) -> None:
        """Raises MalformedAnswer if the answer is for a different request, or reports weights that the server lacked.

        Args:
            oldest, newest: the weight versions that the server may have had; for a named version, base versions.
        """
        if answer.problem:  # `add` reports it
            return
        # Servers count attachments' tokens differently, and report no count for a request aborted before it was read.
        is_counted = self.attachments is None and (answer.num_read is not None or answer.finish != "abort")
        check_answers(rid, self.num_tokens if is_counted else None, answer.rid, answer.num_read, server)
        versions = [version for version, _ in answer.weight_versions.runs()]
        if wrong := [version for version in versions if not oldest <= version <= newest]:
            raise MalformedAnswer(
                f"{server} reports that weight versions {wrong} generated its answer, but since the request was sent, "
                f"it can only have had versions {oldest} to {newest}. Look for another run that loads weights there."
            )

    def completion(self) -> Completion:
        """Returns the completion so far, with finish reason `abort` if it is not finished."""
        columns = {
            name: column_named(name).of_completion(values, len(self.prompt), self.num_tokens)
            for name, values in (self.columns if self.token_ids else {}).items()
        }
        return Completion(self.token_ids, self.logprobs, self.weight_versions, self.finish_reason or "abort", columns)

    def _encoded(self, answer: Answer, server: str) -> dict[str, TokenArray[Any]]:
        num_read = self.num_tokens + len(answer.token_ids) - 1  # the model has not read the last token
        columns = {}
        for name, encode in self.encoders.items():
            if name not in answer.raw_columns:
                continue
            try:
                columns[name] = encode(answer.raw_columns[name], num_read)
            except ValueError as error:
                raise MalformedAnswer(
                    f"{server} answered /generate with a different model's {name}: {error}. Check that it serves the "
                    f"trainer's model, or set record_{name} to false."
                ) from error
        return columns


def request_seed(seed: int, sample: int) -> int:
    """Returns the seed that all requests of a completion use, from 0 to 2**63 - 1.

    SGLang hashes the seed with each token's position, so interruptions do not change a completion's tokens.
    """
    if sample == 0 and seed >= 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/{sample}".encode(), digest_size=8).digest(), "big") >> 1


def check_numbers(token_ids: Sequence[int], logprobs: Sequence[float], num_ids: float = math.inf) -> None:
    """Raises ValueError for impossible values, because training might not notice them."""
    numbers = np.asarray(logprobs)
    if not (np.isfinite(numbers) & (numbers <= _ABOVE_0_NATS)).all():
        wrong = next(number for number in logprobs if not -math.inf < number <= _ABOVE_0_NATS)
        raise ValueError(f"a logprob of {wrong:g}")
    ids = np.asarray(token_ids)
    if (wrong_ids := ids[(ids < 0) | (ids >= num_ids)]).size:
        raise ValueError(f"a token id of {wrong_ids[0]}")


@dataclass(frozen=True)
class RawAnswer:
    """An answer from a server, before checks."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    logprob_ids: Sequence[int]  # the token id that each logprob is for
    spans: Sequence[Mapping[str, Any]]  # for example `{"version": "7", "start": 0, "end": 12}`
    finish: str
    supports: Sequence[Sequence[int]] | None  # ids of each token's support, in any order
    raw_columns: Mapping[str, str | None] = field(default_factory=dict)  # `Answer.raw_columns`, as int32 in base64
    full_support: int | None = None  # `Answer.full_support`
    top: Sequence[Sequence[tuple[float, int]]] | None = None  # `Answer.top`
    rid: object = None
    num_read: object = None


def parse_answer(content: bytes, parse: Callable[[Any], RawAnswer]) -> Answer:
    """Parses and checks an answer; raises ValueError if it is not JSON.

    The garbage collector is off, because short-lived lists of a thousand tokens would trigger it, and it would visit
    all trajectories in memory (0.9 of the 2.2 ms per request).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        answer = json.loads(content)
        try:
            return _checked(parse(answer))
        except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
            return Answer(
                problem=f"{str(answer)[:200]} ({error!r}) instead of tokens, logprobs and a numbered weight version"
            )
    finally:
        if was_enabled:
            gc.enable()


def _checked(raw: RawAnswer) -> Answer:
    """Checks and converts an answer; if something is wrong, `problem` describes it."""
    token_ids: TokenArray[int] = TokenArray(raw.token_ids, "i")
    logprobs: TokenArray[float] = TokenArray(raw.logprobs, "f")
    check_numbers(token_ids, logprobs)
    columns = {} if raw.supports is None else {SUPPORTS.name: _support_codes(raw.supports, raw.token_ids)}
    versions = _token_versions(raw.spans, len(token_ids)) if token_ids else NO_IDS
    are_complete = raw.token_ids == raw.logprob_ids and len(versions) == len(logprobs) == len(token_ids)
    if not are_complete or raw.finish not in ("stop", "length", "abort"):
        return Answer(
            problem=f"{len(token_ids)} tokens, {len(logprobs)} logprobs, {len(versions)} versions and the finish "
            f"reason {raw.finish!r}; these numbers must be equal, and the reason must be stop, length or abort"
        )
    sent = {name: text for name, text in raw.raw_columns.items() if text is not None}
    raw_columns = {name: np.frombuffer(base64.b64decode(text), np.int32) for name, text in sent.items()}
    parts = (token_ids, logprobs, versions, raw.finish, columns, raw_columns, raw.full_support, raw.top)
    max_id = max(itertools.chain(raw.token_ids, *(raw.supports or ())), default=-1)
    return Answer(*parts, rid=raw.rid, num_read=raw.num_read, max_id=max_id)


def _support_codes(supports: Sequence[Sequence[int]], token_ids: Sequence[int]) -> TokenArray[int]:
    if len(supports) != len(token_ids) or not all(supports):
        raise ValueError(f"{len(supports)} sampling masks for {len(token_ids)} tokens, or an empty mask")
    rows = np.arange(len(supports)).repeat([len(support) for support in supports])
    ids: Any = np.fromiter(itertools.chain.from_iterable(supports), np.int64, len(rows))
    check_numbers(ids, ())
    codes = encode_supports(rows, ids[np.lexsort((ids, rows))], np.array(token_ids, np.int64))
    return TokenArray.of_stored(b"".join(codes), b"", "B")


def _token_versions(spans: Sequence[Mapping[str, Any]], num_tokens: int) -> TokenArray[int]:
    end = 0
    for span in spans:
        if span["start"] != end:
            raise ValueError(f"a span starts at {span['start']}, not at {end}")
        if not end <= span["end"] <= num_tokens:
            raise ValueError(f"a span from {end} ends at {span['end']}; there are {num_tokens} tokens")
        end = span["end"]
    return TokenArray.of_runs([(_version(span["version"]), span["end"] - span["start"]) for span in spans], "i")


def _version(value: object) -> int:
    """Parses a version, which servers store as text; `int` would also accept 1.5, True and 1_0."""
    if type(value) is int or (isinstance(value, str) and value.isascii() and value.removeprefix("-").isdigit()):
        return int(value)
    raise ValueError(f"the weight version {value!r}")
