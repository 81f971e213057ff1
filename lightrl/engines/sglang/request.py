"""A completion as SGLang's requests and answers: what to request next, and what an answer adds. Pure.

A completion may take several requests: after an abort for a sync, or the loss of its server, the next request has the
tokens so far as part of its prompt.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightrl.engines.engine import Completion
from lightrl.errors import EngineError
from lightrl.functional import encode_supports
from lightrl.models.images import ImageReader, data_url, refusal
from lightrl.trajectory import FinishReason, Sampling, TokenArray

_ABOVE_0_NATS = 1e-3  # rounding
_NO_IDS: TokenArray[int] = TokenArray((), "i")
_NO_LOGPROBS: TokenArray[float] = TokenArray((), "f")
_NO_CODES: TokenArray[int] = TokenArray((), "B")


class MalformedAnswer(EngineError):
    """A server's answer is not a valid completion; the request goes to another server."""


@dataclass(frozen=True)
class Answer:
    """The tokens of one request, one entry for each."""

    token_ids: TokenArray[int] = _NO_IDS
    logprobs: TokenArray[float] = _NO_LOGPROBS
    weight_versions: TokenArray[int] = _NO_IDS
    finish: str = "abort"
    supports: TokenArray[int] | None = None  # codes; None if the server did not send the supports
    problem: str = ""  # why it is unusable


@dataclass(frozen=True)
class RequestImages:
    """The images of a prompt as `/generate` takes them."""

    prompt: list[int]  # the prompt's token ids, with one image token for each image: the server repeats it
    image_data: list[str]  # data: URLs, for servers on other machines

    @classmethod
    def of(cls, image_reader: ImageReader | None, images: Sequence[str], token_ids: list[int]) -> RequestImages:
        """The images of a prompt, given how the policy reads them; raises ValueError if it takes none."""
        if image_reader is None:
            raise ValueError(refusal(len(images)))
        image_reader.check(images, token_ids)
        prompt = image_reader.collapsed(token_ids, len(images))
        return cls(prompt, [data_url(image) for image in images])


@dataclass(frozen=True)
class AdapterVersion:
    """The adapter that a request is sent to; its tokens are of this version."""

    version: int
    name: str
    base_version: int  # the server must report it


@dataclass
class CompletionDraft:
    """One completion in progress."""

    prompt: list[int]
    sampling: Sampling  # `max_new_tokens` counts all requests of the completion together
    sample: int = 0  # number of the completion among the n of the prompt
    token_ids: TokenArray[int] = _NO_IDS
    logprobs: TokenArray[float] = _NO_LOGPROBS
    weight_versions: TokenArray[int] = _NO_IDS
    supports: TokenArray[int] = _NO_CODES
    finish_reason: FinishReason | None = None
    images: RequestImages | None = None
    adapter: AdapterVersion | None = None  # adapter of the latest request

    @property
    def last_version(self) -> int:
        return self.weight_versions[-1] if self.weight_versions else -1

    @property
    def max_tokens(self) -> int:
        """Tokens of prompt and completion together; a measure of a server's load."""
        return len(self.prompt) + self.sampling.max_new_tokens

    def body(self, rid: str, cache_key: str) -> dict[str, Any]:
        """The next request to `/generate`, for the tokens that are missing; shares key-values under `cache_key`."""
        sampling, num_generated = self.sampling, len(self.token_ids)
        params: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.max_support,
            "max_new_tokens": sampling.max_new_tokens - num_generated,
            "min_new_tokens": max(0, sampling.min_new_tokens - num_generated),
            "sampling_seed": request_seed(sampling.seed, self.sample),
        }
        if sampling.stop_token_ids:
            params["stop_token_ids"] = list(sampling.stop_token_ids)
        else:  # SGLang then ignores the stop ids of the request too
            params["ignore_eos"] = True
        images = self.images
        body = {
            "rid": rid,
            "input_ids": (self.prompt if images is None else images.prompt) + list(self.token_ids),
            "sampling_params": params,
            "return_logprob": True,
            "extra_key": cache_key,
        }
        if sampling.is_truncated:
            body["return_sampling_mask"] = True
        if images is not None:
            body["image_data"] = images.image_data
        if self.adapter is not None:
            body["lora_path"] = self.adapter.name
        return body

    def add(self, answer: Answer, server: str, vocab_size: int) -> None:
        """Appends an answer, or raises MalformedAnswer; sets `finish_reason` if that ends the completion."""
        token_ids, logprobs, versions, finish = answer.token_ids, answer.logprobs, answer.weight_versions, answer.finish
        if answer.problem:
            raise MalformedAnswer(
                f"{server} answered /generate with {answer.problem}. Check that this run loaded its weights."
            )
        if self.adapter is not None:
            if other := sorted({version for version, _ in versions.runs()} - {self.adapter.base_version}):
                raise MalformedAnswer(
                    f"{server} generated with base {other} below adapter {self.adapter.name}, which belongs to base "
                    f"{self.adapter.base_version}."
                )
            versions = TokenArray.of_runs([(self.adapter.version, len(token_ids))], "i")
        if token_ids and max(token_ids) >= vocab_size:
            raise MalformedAnswer(
                f"{server} generated token id {max(token_ids)}, outside the trainer's vocabulary (0 to "
                f"{vocab_size - 1}). Check that it serves the trainer's model."
            )
        if len(self.token_ids) + len(token_ids) > self.sampling.max_new_tokens:
            raise MalformedAnswer(
                f"{server} generated {len(token_ids)} tokens after {len(self.token_ids)}, more than "
                f"max_new_tokens={self.sampling.max_new_tokens}."
            )
        order = [self.last_version, *(version for version, _ in versions.runs())]
        if order != sorted(order):
            raise MalformedAnswer(
                f"{server} generated with weight versions {versions[:1]} to {versions[-1:]} after the newer "
                f"{self.last_version}."
            )
        if finish == "stop" and not token_ids:
            raise MalformedAnswer(f"{server} stopped without a stop token.")
        if self.sampling.is_truncated and token_ids:
            if answer.supports is None:
                raise MalformedAnswer(
                    f"{server} did not return which tokens it sampled from (return_sampling_mask), which training with "
                    "top_p or top_k needs. Use SGLang 0.5.20 or later."
                )
            self.supports = TokenArray.joined([self.supports, answer.supports], "B")
        self.token_ids = TokenArray.joined([self.token_ids, token_ids], "i")
        self.logprobs = TokenArray.joined([self.logprobs, logprobs], "f")
        self.weight_versions = TokenArray.joined([self.weight_versions, versions], "i", as_runs=True)
        if finish == "stop" and self._is_end(self.token_ids[-1]):
            self.finish_reason = "stop"
        elif len(self.token_ids) == self.sampling.max_new_tokens:
            self.finish_reason = "length"
        # else it continues: aborted, or stopped at an end token of the model's config that the sampling does not have

    def completion(self) -> Completion:
        """Completion so far; its finish reason is `abort` while more is to come."""
        supports = self.supports if self.sampling.is_truncated else None
        return Completion(self.token_ids, self.logprobs, self.weight_versions, self.finish_reason or "abort", supports)

    def _is_end(self, token: int) -> bool:
        return token in self.sampling.stop_token_ids and len(self.token_ids) >= self.sampling.min_new_tokens


def request_seed(seed: int, sample: int) -> int:
    """Seed of all requests of a completion, 0 to 2**63 - 1: SGLang hashes it with each token's position."""
    # So a completion has the same tokens wherever it is interrupted.
    if sample == 0 and seed >= 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/{sample}".encode(), digest_size=8).digest(), "big") >> 1


def read_answer(content: bytes) -> Answer:
    """The answer of `/generate`; raises ValueError if it is not JSON.

    A thousand tokens are a thousand short-lived lists in JSON. The garbage collector is off meanwhile: they would
    trigger it, and it would visit all trajectories in memory (0.9 of 2.2 ms per request).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return _read(json.loads(content))
    finally:
        if was_enabled:
            gc.enable()


def _read(answer: Any) -> Answer:
    try:
        meta = answer["meta_info"]
        output_ids = answer.get("output_ids") or []
        finish = str(meta["finish_reason"]["type"])
        triples = meta.get("output_token_logprobs") or []
        is_complete = output_ids == [triple[1] for triple in triples]
        token_ids: TokenArray[int] = TokenArray(output_ids, "i")
        chosen = meta.get("output_token_sampling_logprobs")  # within the supports; the others are before truncation
        logprobs: TokenArray[float] = TokenArray([triple[0] for triple in triples] if chosen is None else chosen, "f")
        _check_numbers(token_ids, logprobs)
        supports = None if chosen is None else _support_codes(meta["output_token_sampling_mask"], output_ids)
        versions = _token_versions(meta, len(output_ids)) if output_ids else _NO_IDS
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        return Answer(
            problem=f"{str(answer)[:200]} ({error!r}) instead of tokens, logprobs and a numbered weight version"
        )
    if (
        not is_complete
        or {len(versions), len(logprobs)} != {len(token_ids)}
        or finish not in ("stop", "length", "abort")
    ):
        return Answer(
            problem=f"{len(token_ids)} tokens, {len(logprobs)} logprobs, {len(versions)} versions and the finish "
            f"reason {finish!r}; the numbers must be equal, the reason stop, length or abort"
        )
    return Answer(token_ids, logprobs, versions, finish, supports)


def _check_numbers(token_ids: TokenArray[int], logprobs: TokenArray[float]) -> None:
    """Raises ValueError for what no model samples; trained on, it would be noticed as a bad update, or not at all."""
    numbers = np.asarray(logprobs)
    if not (np.isfinite(numbers) & (numbers <= _ABOVE_0_NATS)).all():
        wrong = next(number for number in logprobs if not -math.inf < number <= _ABOVE_0_NATS)
        raise ValueError(f"a logprob of {wrong:g}")
    if (np.asarray(token_ids) < 0).any():
        raise ValueError(f"a token id of {min(token_ids)}")


def _support_codes(masks: Sequence[Sequence[int]], token_ids: Sequence[int]) -> TokenArray[int]:
    """Codes of the tokens, whose supports are sorted by probability."""
    if len(masks) != len(token_ids) or not all(masks):
        raise ValueError(f"{len(masks)} sampling masks for {len(token_ids)} tokens, or an empty one")
    rows = np.arange(len(masks)).repeat([len(mask) for mask in masks])
    ids = np.fromiter(itertools.chain.from_iterable(masks), np.int64, len(rows))
    codes = encode_supports(rows, ids[np.lexsort((ids, rows))], np.array(token_ids, np.int64))
    return TokenArray.of_stored(b"".join(codes), b"", "B")


def _token_versions(meta: Mapping[str, Any], num_tokens: int) -> TokenArray[int]:
    """One per token, from the spans; a server without spans (before 0.5.20) has one version for all."""
    spans = meta.get("weight_versions")
    if not spans:
        return TokenArray.of_runs([(int(meta["weight_version"]), num_tokens)], "i")
    end = 0
    for span in spans:
        if span["start"] != end:
            raise ValueError(f"a span starts at {span['start']}, not at {end}")
        if not end <= span["end"] <= num_tokens:
            raise ValueError(f"a span from {end} ends at {span['end']}; there are {num_tokens} tokens")
        end = span["end"]
    return TokenArray.of_runs([(int(span["version"]), span["end"] - span["start"]) for span in spans], "i")
