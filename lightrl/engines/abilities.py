"""Optional abilities of an engine, beyond RolloutEngine; each is a small protocol.

The framework checks `isinstance(engine, ScoresTokens)` before it uses an ability; an engine works without any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from lightrl import loaded_on_first_use
from lightrl.engines.engine import Completion
from lightrl.models.lora import AdapterShape
from lightrl.trajectory import Sampling
from lightrl.weights import SharedFolder

Proof = Literal["digests", "replicas", "version"]
if not TYPE_CHECKING:
    __getattr__ = loaded_on_first_use(__name__, {})  # names that have changed


@runtime_checkable
class LivesOnLoop(Protocol):
    """Runs its requests on the controller's event loop instead of a thread of its own."""

    async def attach(self) -> None:
        """Called on the loop, before the first request."""
        ...

    async def detach(self) -> None:
        """Called on the loop after its tasks are cancelled, before it ends."""
        ...


@runtime_checkable
class ContinuesCompletions(Protocol):
    """Continues completions that this engine or another has started."""

    weight_version: int

    async def generate(
        self,
        token_ids: list[int],
        sampling: Sampling,
        *,
        session: str,
        n: int = 1,
        images: tuple[str, ...] = (),
        written: Completion | None = None,
    ) -> list[Completion]:
        """As RolloutEngine's; with n = 1 the completion begins with the tokens that are `written`.

        They keep their logprobs and versions, and count for `sampling.max_new_tokens`. The others are drawn as if
        nothing had come between.
        """
        ...

    async def unfinished(self) -> dict[int, Completion]:
        """What is written of each running completion, by the seed of its sampling; its finish reason is `abort`.

        Called while the engine is paused; the completions continue when it is resumed.
        """
        ...


@runtime_checkable
class LeadsFollowers(Protocol):
    """Serves requests of other processes too, which follow this one: it controls the servers, they send requests."""

    def leader(self, num_followers: int) -> Leader:
        """What these processes need of the engine; called after `start`."""
        ...


class Leader(Protocol):
    """The engine's side of its followers; on the controller's event loop."""

    @property
    def follower(self) -> Follower:
        """To be pickled, and opened in each process."""
        ...

    def lead(self, followers: Followers | None) -> None:
        """From now on these send the requests, and no one else; None ends that."""
        ...

    def news(self) -> Any:
        """What followers must know now, to be pickled: the servers, and whether requests may begin."""
        ...

    def note(self, states: Sequence[Any]) -> None:
        """The latest `Follower.state` of each."""
        ...

    def hear(self, kind: str, url: str, reason: str) -> None:
        """What a follower reports of a server."""
        ...


class Followers(Protocol):
    """All followers, as their leader reaches them."""

    async def tell(self) -> None:
        """Returns when each has the leader's news, and its state was noted, or it has ended."""
        ...

    def post(self) -> object:
        """Sends the leader's news without waiting."""
        ...


class Follower(ContinuesCompletions, Protocol):
    """An engine in another process, with requests of its own; on an event loop of that process."""

    async def open(self, report: Callable[[str, str, str], object]) -> None:
        """First; what it reports of servers goes to `Leader.hear`."""
        ...

    def follow(self, news: Any) -> None: ...

    @property
    def state(self) -> Any:
        """For `Leader.note`."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class ScoresTokens(Protocol):
    """Computes logprobs of given tokens; `WeightSync` then probes that the engine has the trainer's weights."""

    probe_every_n_loads: int  # 1 probes each load; more if a probe takes a noticeable part of an iteration

    def score(self, sequences: list[list[int]]) -> dict[str, list[list[float]]]:
        """By name of each replica that may get requests: for each sequence the logprobs of its tokens.

        They are those at temperature 1 of each token given those before, 0 for the first, from no cache of an earlier
        request. A replica that has none gives empty lists.
        """
        ...


@runtime_checkable
class DropsReplicas(Protocol):
    """Continues without one of its replicas, which gets the weights again before it serves again."""

    def drop_replica(self, name: str, reason: str) -> None:
        """Sends no more requests to the replica of this name, as `ScoresTokens.score` gives it."""
        ...


@runtime_checkable
class LimitsContext(Protocol):
    """Accepts at most `max_context` tokens of prompt and completion together; None is no limit."""

    max_context: int | None


@runtime_checkable
class DecodesInThreads(Protocol):
    """Decodes in this process, with this many threads; None until `start` has chosen."""

    threads: int | None


@runtime_checkable
class NamesDtypes(Protocol):
    """Tells the dtypes it computes in, which set the probe's tolerance; without it, float32."""

    def dtypes(self) -> set[str]:
        """Those of its weights and of its computation, by torch's names; called after `start`."""
        ...


@runtime_checkable
class SharesDevices(Protocol):
    """May share the trainer's devices (`colocated`); it then releases its memory for each update."""

    placement: Literal["separate", "colocated"]

    def make_room(self) -> None:
        """Releases the memory of weights and key-values; the next `load_weights` takes it back."""
        ...


@runtime_checkable
class ProvesWeights(Protocol):
    """Tells how the last load of each serving server was checked."""

    def proofs(self) -> dict[str, Proof]:
        """By address of each server that may get requests.

        `digests`: each of its parameters equals the trainer's, bit by bit. `replicas`: its checksum equals that of the
        other servers, which all may be wrong. `version`: it only reports the version's number.
        """
        ...


@runtime_checkable
class SharesFolder(Protocol):
    """Loads weights from a folder into which every rank of the trainer may write its share."""

    def shared_folder(self) -> SharedFolder | None:
        """The folder, which exists; None if weights travel in another way."""
        ...


@runtime_checkable
class ServesAdapters(Protocol):
    """May serve a policy's adapters beside its base, instead of weights with the adapters merged."""

    adapters: Literal["merged", "served"]

    def expect_adapters(self, shape: AdapterShape, *, num_versions: int) -> None:
        """Called before `start` if `adapters` is `served`: keep this many versions.

        `load_weights` then gets the adapters under their names in the model, and after them the base if `needs_base`.
        """
        ...

    def needs_base(self) -> bool:
        """Whether the next load must bring the base."""
        ...


@runtime_checkable
class ShowsServers(Protocol):
    """Has servers whose states `lightrl status` shows."""

    @property
    def pool(self) -> ServerStates:
        """What it knows of its servers."""
        ...


class ServerStates(Protocol):
    """The servers of an engine, by address."""

    @property
    def servers(self) -> Mapping[str, object]:
        """Data classes with url, state, weight_version, num_requests, outstanding_tokens and reason."""
        ...
