"""The fake server's answers without a model: tokens and logprobs by rule, at a given pace.

Imports no torch, so a server starts in a fraction of a second. A token is a hash of the seed and of its place in prompt
and completion, uniform over the vocabulary, with logprob -log V: a policy that gives every token the same logit.
"""

import asyncio
import hashlib
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

from fake_sglang.faults import Fault

_GOLDEN = 0x9E3779B97F4A7C15
_MIX = 0xBF58476D1CE4E5B9
_MASK = 2**64 - 1


class Refused(Exception):
    """The server answers a request with HTTP 400; refused weights leave the old ones in place."""


def die(reason: str) -> NoReturn:
    """Ends the process, as the real server does."""
    sys.stderr.write(reason + "\n")
    sys.stderr.flush()
    os._exit(1)


@dataclass(eq=False)
class Run:
    """One completion in progress; the lists grow as tokens are written."""

    rid: str
    prompt: list[int]
    params: Mapping[str, Any]  # SGLang's sampling_params, with its defaults filled in
    lora: str | None = None  # name of the adapter
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    supports: list[list[int]] | None = None  # if the request asks for its sampling masks
    is_aborted: bool = False
    minimum_from: int = 0  # the token from which `min_new_tokens` counts: a retraction forgets those before
    num_cached: int = 0  # tokens of the prompt
    is_stale: bool = False  # the cached ones are of weights before the present ones
    aborted: asyncio.Event = field(default_factory=asyncio.Event)


class ScriptedModel:
    """Writes tokens by rule; subclasses put a model behind the server.

    Args:
        delay_s: before the first token.
        seconds_per_token: pace; 0 writes all tokens at once after the delay.
    """

    takes_tensors = False

    def __init__(
        self,
        *,
        vocab_size: int = 1000,
        max_context: int = 2**20,
        delay_s: float = 0.0,
        seconds_per_token: float = 0.0,
        version: str = "default",
    ) -> None:
        self.vocab_size = vocab_size
        self.max_context = max_context
        self.delay_s = delay_s
        self.seconds_per_token = seconds_per_token
        self.eos_token_ids: frozenset[int] = frozenset()
        self.version = version
        self.num_loads = 0
        self.config: Any = None  # of a model
        self._sums: dict[str, str] = {"script": "0"}
        self._running = asyncio.Event()
        self._running.set()

    async def write(self, run: Run) -> Literal["stop", "length", "abort"]:
        """Appends to the run's lists until it ends or is aborted; stands still while paused."""
        params = run.params
        seed = 42 if params.get("sampling_seed") is None else int(params["sampling_seed"])
        longest = int(params["max_new_tokens"])
        stops = frozenset() if params["ignore_eos"] else frozenset(params["stop_token_ids"] or ()) | self.eos_token_ids
        logprob = 0.0 if params["temperature"] == 0 else -math.log(self.vocab_size)
        if self.delay_s > 0:
            await asyncio.sleep(self.delay_s)
        for position in range(longest):
            if self.seconds_per_token > 0:
                await asyncio.sleep(self.seconds_per_token)
            if not self._running.is_set():
                await self._running.wait()
            if run.is_aborted:
                return "abort"
            token = self.token(run.prompt, seed, len(run.prompt) + position, params["temperature"] == 0)
            if position < run.minimum_from + params["min_new_tokens"]:
                while token in stops:
                    token = (token + 1) % self.vocab_size
            run.token_ids.append(token)
            run.logprobs.append(logprob if run.supports is None else 0.0)
            run.versions.append(self.version)
            if run.supports is not None:
                run.supports.append([token])  # the script allows no other token
            if token in stops:
                return "stop"
        return "length"

    def score(self, token_ids: list[int], lora: str | None = None) -> list[float]:
        """Logprobs of a prompt's tokens, 0 for the first; empty if there are none."""
        return []

    def top_logprobs(self, token_ids: list[int], num: int) -> list[list[tuple[float, int]]]:
        """Logprob and id of the most likely tokens at each place of a prompt; empty if there are none."""
        return []

    def classify(self, rows: Sequence[list[int]]) -> list[list[float]]:
        """The numbers of a reward model's head at the last token of each row."""
        return [[0.0] for _ in rows]

    async def pause(self) -> None:
        self._running.clear()

    async def resume(self) -> None:
        self._running.set()

    async def load_folder(self, folder: str, version: str | None, fault: Fault | None = None) -> None:
        """Loads the weights of a safetensors folder, or raises Refused."""
        sums = await asyncio.to_thread(_read_sums, folder)
        if fault is None:
            self._sums = sums
        elif fault.kind != "ignore_update":
            raise Refused(f"A fake server with a script cannot {fault.kind}. Start it with --model-path.")
        self.version = version or self.version
        self.num_loads += 1

    async def load_tensors(self, tensors: Any, version: str | None, fault: Fault | None = None) -> None:
        """Loads (name, tensor) pairs, possibly not all, or raises Refused."""
        raise Refused("A fake server with a script takes no tensors. Start it with --model-path.")

    def keep_history(self) -> None:
        """From now on keeps every version, for faults that need them."""

    def forget_history(self) -> None:
        """Undoes `keep_history`."""

    def keep_stale(self) -> None:
        """Requests that are stale are answered with the current weights from now on, whatever is loaded."""

    def forget_stale(self) -> None:
        """No request is stale any more."""

    async def revert(self, fault: Fault) -> None:
        """Brings back the weights of some versions ago, under the present version's name."""
        raise Refused("A fake server with a script has no weights that could be wrong. Start it with --model-path.")

    def rename(self, version: str) -> None:
        """Changes the name of the weights."""
        self.version = version

    def checksums(self) -> list[dict[str, str]]:
        """A digest of each parameter, by rank."""
        return [self._sums]

    def token(self, prompt: Sequence[int], seed: int, position: int, is_greedy: bool) -> int:
        start = sum(prompt) if is_greedy else seed
        mixed = (start * _MIX + (position + 1) * _GOLDEN) & _MASK
        mixed = ((mixed ^ (mixed >> 29)) * _MIX) & _MASK
        return (mixed >> 17) % self.vocab_size


def _read_sums(folder: str) -> dict[str, str]:
    """A hash of each tensor's bytes in a safetensors folder; refuses truncated files."""
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise Refused(f"{folder} has no safetensors file.")
    sums: dict[str, str] = {}
    for file in files:
        content = file.read_bytes()
        try:
            start = 8 + int.from_bytes(content[:8], "little")
            header = json.loads(content[8:start])
        except ValueError as error:
            raise Refused(f"{file} is not a safetensors file: {error}") from error
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            first, last = entry["data_offsets"]
            if start + last > len(content):
                raise Refused(f"{file} ends within {name}.")
            sums[name] = hashlib.sha256(content[start + first : start + last]).digest()[:8].hex()
    return sums
