"""Optional abilities of an engine, beyond RolloutEngine; each is a small protocol.

The framework checks `isinstance(engine, ScoresTokens)` before it uses an ability; an engine works without any. What
only engines of servers can do, such as sharing the trainer's devices, is asked of that class.
"""

from __future__ import annotations

from typing import Literal, Protocol, runtime_checkable

from lightrl.engines.engine import Completion

Verification = Literal["digests", "replicas", "version"]


@runtime_checkable
class ContinuesCompletions(Protocol):
    """Continues completions that this engine or another has started, which `generate` gets as `started`."""

    async def unfinished(self) -> dict[int, Completion]:
        """Seed of a sampling → what is generated of its running completion; the finish reason is `abort`.

        Called while the engine is paused; the completions continue when it is resumed.
        """
        ...


@runtime_checkable
class ScoresTokens(Protocol):
    """Computes logprobs of given tokens; `WeightSync` then probes that the engine has the trainer's weights."""

    probe_every_n_loads: int  # 1 probes each load; more if a probe takes a noticeable part of an iteration

    def score(self, sequences: list[list[int]]) -> dict[str, list[list[float]]]:
        """Logprobs of the tokens of each sequence, by name of each replica that may get requests.

        They are those at temperature 1 of each token given those before, 0 for the first, from no cache of an earlier
        request. A replica that has none gives empty lists.
        """
        ...


@runtime_checkable
class NamesDtypes(Protocol):
    """Names the dtypes it computes in, which set the probe's tolerance; without it, float32."""

    def dtypes(self) -> set[str]:
        """Dtypes of its weights and of its computation, by torch's names; called after `start`."""
        ...


@runtime_checkable
class HasReplicas(Protocol):
    """Generates with several replicas, verifies their weights, and continues without one of them."""

    def verified_by(self) -> dict[str, Verification]:
        """The check that each replica which may get requests passed at its last load, by its name.

        `digests`: each of its parameters equals the trainer's, bit by bit. `replicas`: its checksum equals that of the
        other replicas, which all may be wrong. `version`: it only reports the version's number.
        """
        ...

    def drop_replica(self, name: str, reason: str) -> None:
        """Sends no more requests to the replica of this name until it has loaded the weights again."""
        ...
