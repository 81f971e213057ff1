"""Server: one SGLang server of an engine, and all that the engine knows of it.

ServerInfo is what the running process reports: which process it is, how it holds weights, of which model.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from lightrl.checks.printable import count_text
from lightrl.engines.abilities import Verification
from lightrl.engines.sglang.client import SGLangClient
from lightrl.engines.sglang.processes.process import ServerProcess
from lightrl.weights.digests import DTYPES, ServerLayout

if TYPE_CHECKING:
    from transformers import PretrainedConfig

State = Literal["starting", "routable", "draining", "restarting", "lost", "retired"]
ACTIVE: tuple[State, ...] = ("starting", "routable")  # may get weights
GONE: tuple[State, ...] = ("restarting", "lost", "retired")
MemoryPart = Literal["weights", "cuda_graph", "kv_cache"]
MEMORY_PARTS: tuple[MemoryPart, ...] = (
    "weights",
    "cuda_graph",
    "kv_cache",
)  # order to resume: the cache is last
SPEED_ANSWERS = 64  # latest answers that a server's speed is measured over

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
          "num_key_value_heads", "head_dim", "tie_word_embeddings")  # fmt: skip
# Arguments that change what a parameter holds or who holds it; see `layout_problem`.
_OTHER_LAYOUTS = ("quantization", "torchao_config", "enable_dp_attention", "enable_dp_lm_head", "enable_fp32_lm_head",
                  "modelopt_quant", "rl_quant_profile")  # fmt: skip


@dataclass(eq=False)
class Server:
    """One server at one address, from when it joins until it is forgotten; belongs to the home loop.

    `ServerFleet` decides its state, `Members` and `Watch` act on it. A server of ours that restarts gets another
    address, and is another Server with the same process object.

    Args:
        client: requests to its address.
        process: set if the engine started it.
    """

    client: SGLangClient
    process: ServerProcess | None = None
    state: State = "starting"
    reason: str = ""  # why it is not routable
    may_return: bool = False  # it is lost, and admitted again if it answers
    losses: tuple[int, ...] = ()  # the fleet's newest weight version at each of the latest
    weight_version: int = -1  # acknowledged
    verified_by: Verification = "version"  # the strongest check that the last load passed
    info: ServerInfo | None = None  # None until it was asked
    digest_dtype: torch.dtype | None = None  # dtype under which its digests equaled the trainer's
    logged_check: Verification | None = None  # check that the log has named for this process
    released: set[MemoryPart] = field(default_factory=set)  # a resume of anything else kills the server
    num_requests: int = 0
    outstanding_tokens: int = 0  # prompts of its requests, and what may still be generated
    num_answers: int = 0
    recent_s: float = 0.0  # seconds and tokens of the latest answers; older ones count less
    recent_tokens: float = 0.0
    is_slow: bool = False  # and the log has named it

    @property
    def url(self) -> str:
        return self.client.url

    @property
    def silent_s(self) -> float:
        """Seconds since it last answered anything: a busy server may delay one answer while it gives others."""
        last = self.client.last_answer_at
        return float("inf") if last is None else time.monotonic() - last

    @property
    def page_tokens(self) -> int:
        """The unit in which it caches key-values."""
        return self.info.page_tokens if self.info is not None else 1

    def status(self) -> ServerStatus:
        return ServerStatus(
            url=self.url,
            state=self.state,
            weight_version=self.weight_version,
            num_requests=self.num_requests,
            outstanding_tokens=self.outstanding_tokens,
            reason=self.reason,
            may_return=self.may_return,
        )

    def describe(self) -> str:
        """One clause, for messages."""
        reason, requests = f" ({self.reason})" if self.reason else "", count_text(self.num_requests, "request")
        return f"{self.url} is {self.state} with version {self.weight_version} and {requests}{reason}"

    def rejoin(self) -> None:
        """The server is up again at its address, without our weights."""
        self.state, self.reason, self.may_return = "starting", "", False
        self.weight_version = -1

    async def identify(self, *, timeout_s: float = 0.0) -> bool:
        """Asks which process answers at the address; True if it is another one than before."""
        info = ServerInfo.read(await self.client.server_info(timeout_s=timeout_s))
        is_other = self.info is not None and self.info.identity != info.identity
        if is_other:
            self.digest_dtype = self.logged_check = None
        self.info = info
        return is_other

    async def release_memory(self) -> None:
        """Releases the parts that it still holds; only while paused, a server that is not idle dies."""
        tags = [part for part in MEMORY_PARTS if part not in self.released]
        self.released.update(tags)  # before the request: a server that fails in between is lost anyway
        if tags:
            await self.client.release_memory(tags)

    async def resume_memory(self, parts: Collection[MemoryPart] = MEMORY_PARTS) -> None:
        """Takes back those of `parts` that it has released, one after the other."""
        for part in MEMORY_PARTS:
            if part in parts and part in self.released:
                self.released.discard(part)
                await self.client.resume_memory([part])

    def note_answer(self, seconds: float, num_tokens: int) -> None:
        decay = 1 - 1 / SPEED_ANSWERS
        self.recent_s = self.recent_s * decay + seconds
        self.recent_tokens = self.recent_tokens * decay + num_tokens
        self.num_answers += 1

    @property
    def ms_per_token(self) -> float | None:
        """Over the latest answers; None while there are too few."""
        is_known = self.num_answers >= SPEED_ANSWERS and self.recent_tokens
        return 1000 * self.recent_s / self.recent_tokens if is_known else None


@dataclass(frozen=True)
class ServerStatus:
    """A server's state as plain values, for `lightrl status` and for processes that follow this one."""

    url: str
    state: State
    weight_version: int
    num_requests: int
    outstanding_tokens: int
    reason: str
    may_return: bool


@dataclass(frozen=True)
class ServerInfo:
    """The answer of `/server_info`, as far as it matters here.

    Args:
        identity: differs after a restart; None from a server that does not report when it started.
        num_ranks: tensor-parallel.
        dtype: of its weights; None if it only says `auto`.
        is_cpu: whether its weights are on a CPU.
        layout_problem: why its digests cannot be compared with the trainer's; None if they can.
        model_path: at its start.
        overrides: of that model's config.
        page_tokens: the unit in which it caches key-values.
        is_auto: its dtype follows from the config that it was started with.
    """

    identity: str | None = None
    num_ranks: int = 1
    dtype: torch.dtype | None = None
    is_cpu: bool = True
    layout_problem: str | None = None
    model_path: str = ""
    overrides: str = "{}"
    page_tokens: int = 1
    is_auto: bool = False

    @classmethod
    def read(cls, info: Mapping[str, Any]) -> ServerInfo:
        started = info.get("startup_time")
        identity = None
        if started is not None:
            fields = json.dumps([started, info.get("random_seed"), info.get("launch_command")], sort_keys=True)
            identity = hashlib.sha256(fields.encode()).hexdigest()[:16]  # the command line may hold a key
        dtype = getattr(torch, str(info.get("dtype")), None)
        problems = [name for name in _OTHER_LAYOUTS if info.get(name)]
        problems += [name for name in ("pp_size", "attn_cp_size", "dcp_size") if int(info.get(name) or 1) > 1]
        return cls(
            identity,
            int(info.get("tp_size") or 1),
            dtype if dtype in DTYPES else None,
            info.get("device") == "cpu",
            f"it was started with {', '.join(f'{name}={info[name]}' for name in problems)}" if problems else None,
            str(info.get("model_path") or ""),
            str(info.get("json_model_override_args") or "{}"),
            int(info.get("page_size") or 1),
            info.get("dtype") == "auto" and not problems,
        )

    def layouts(self, dtype: torch.dtype | None = None) -> list[ServerLayout]:
        """Layouts that it may have; `dtype` if that is known from an earlier load."""
        dtypes = [self.dtype or dtype] if self.dtype or dtype else list(DTYPES)
        return [ServerLayout(one, self.num_ranks, self.is_cpu) for one in dtypes if one is not None]


def other_model(
    config: PretrainedConfig, model_info: Mapping[str, Any], info: ServerInfo, names: Iterable[str]
) -> str | None:
    """How a server's model differs from the trainer's, as far as the server reports; None if it seems to be the same.

    A running server does not report its sizes. They are compared if this machine can read the config that the server
    was started from.

    Args:
        model_info: the answer of `/model_info`.
        names: the server's parameters.
    """
    theirs = model_info.get("model_type")
    if theirs is not None and theirs != config.model_type:
        return f"it serves a model of type {theirs!r} ({info.model_path}); the trainer's is {config.model_type!r}"
    architectures, ours = model_info.get("architectures"), config.architectures
    if architectures and ours and set(architectures) != set(ours):
        return f"it serves {', '.join(architectures)} ({info.model_path}); the trainer has {', '.join(ours)}"
    numbers = {int(piece) for name in names if (piece := name.partition("model.layers.")[2].split(".")[0]).isdigit()}
    num_layers = config.get_text_config().num_hidden_layers
    if numbers and len(numbers) != num_layers and info.layout_problem is None:
        return f"its model ({info.model_path}) has {len(numbers)} layers; the trainer's has {num_layers}"
    served = _readable_config(info)
    if served is None:
        return None
    text, served_text = config.get_text_config(), served.get_text_config()
    differing = [
        f"{name}={getattr(served_text, name, None)} instead of {getattr(text, name, None)}"
        for name in _SIZES
        if None not in (getattr(text, name, None), getattr(served_text, name, None))
        and getattr(text, name) != getattr(served_text, name)
    ]
    if differing:
        return f"its model ({info.model_path}, {served.model_type}) has {', '.join(differing)} (the trainer's)"
    return None


def _readable_config(info: ServerInfo) -> PretrainedConfig | None:
    from transformers import AutoConfig

    if not info.model_path:
        return None
    with contextlib.suppress(OSError, ValueError):  # a path of the server's host, or a format unknown here
        served: PretrainedConfig = AutoConfig.from_pretrained(info.model_path, local_files_only=True)
        for name, value in json.loads(info.overrides).items():
            setattr(served, name, value)
        return served
    return None
