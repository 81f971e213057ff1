"""ParameterCheck checks that a load is complete and finite; WeightVerifier compares digests with the trainer's."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from transformers import PretrainedConfig

from lightrl.concurrency.in_thread import in_thread
from lightrl.engines.engine import Verification
from lightrl.engines.servers.server import Server
from lightrl.engines.servers.sync.report import SyncServers
from lightrl.errors import WeightSyncError
from lightrl.weights import Bucket, Digests, ServerForm, ServerLayout
from lightrl.weights.bucket import OUTPUT_HEAD
from lightrl.weights.digests import RankDigests
from lightrl.weights.server_layout import unknown_layout

log = logging.getLogger(__name__)

KEPT_VERSIONS = 3  # the version being loaded, the current one for late servers, and the previous one for a rollback
_USUAL = re.compile(  # common models' parameter names on servers; if only such names differ, the models differ
    r"model\.(embed_tokens|norm|layers\.\d+\.(self_attn\.(qkv_proj|o_proj|q_norm|k_norm)|\w*layernorm"
    r"|mlp\.(gate_up_proj|down_proj|gate|experts)))\.(weight|bias|w13_weight|w2_weight)|lm_head\.weight"
)


class ParameterCheck:
    """Compares the names and shapes of each load with the first load's."""

    def __init__(self) -> None:
        self._first: dict[str, list[int]] | None = None  # shapes of the first load's parameters

    def checked(self, buckets: Iterable[Bucket]) -> Iterator[Bucket]:
        """Yields the buckets of a load; yields the last one, which sets the version, only if all parameters are valid.

        Raises:
            WeightSyncError: if a parameter is missing, new, duplicated, has a different shape, or is not finite.
        """
        shapes: dict[str, list[int]] = {}
        for bucket in buckets:
            for name, shape in bucket.shapes.items():
                if name in shapes or (self._first is not None and self._first.get(name) != shape):
                    raise WeightSyncError(
                        f"Parameter {name!r} with shape {shape} arrived twice, or the first load did not have it with "
                        "this shape. Every load must have the same parameters."
                    )
                shapes[name] = shape
            for name, tensor in bucket.tensors.items():  # the other ranks have checked the tensors in `files`
                if not torch.isfinite(tensor).all():
                    raise WeightSyncError(f"Parameter {name!r} has non-finite values.")
            if bucket.is_last and self._first is not None and (missing := sorted(set(self._first) - set(shapes))):
                raise WeightSyncError(f"Parameters {missing[:4]} are missing; the first load had them.")
            yield bucket
        self._first = shapes


@dataclass(eq=False)
class WeightVerifier:
    """Verifies that servers have the trainer's weights.

    If a server's digests could be compared before but no longer can, the server is rejected, so a weaker check never
    silently replaces digests. If a weaker check is used, the log says so once per server.
    """

    config: PretrainedConfig  # the policy's config
    form: ServerForm  # dtype and names of the weights that are sent
    timeout_s: float = 600.0  # for the digests of a bucket
    _versions: dict[int, Digests] = field(default_factory=dict)

    def begin(self, weight_version: int, servers: Iterable[Server]) -> Digests:
        """Returns the object that computes a load's digests; keeps it to verify servers, now or in a later sync."""
        layouts: dict[ServerLayout, None] = {}
        for server in servers:
            if server.info is not None and server.info.layout_problem is None:
                possible = server.info.layouts(server.digest_dtype)
                layouts |= {layout: None for layout in possible if unknown_layout(self.config, layout) is None}
        num_threads = max(1, min(8, (os.cpu_count() or 2) // 2))
        digests = Digests(self.config, self.form, layouts, timeout_s=self.timeout_s, num_threads=num_threads)
        if weight_version in self._versions:
            self._versions.pop(weight_version).close()
        self._versions[weight_version] = digests
        for old in list(self._versions)[:-KEPT_VERSIONS]:
            self._versions.pop(old).close()
        return digests

    def close(self) -> None:
        """Stops the threads that compute digests, which failed loads leave running."""
        for digests in self._versions.values():
            digests.close()

    def finish(self, weight_version: int) -> None:
        """Blocks until the digests for a version are complete."""
        if weight_version in self._versions:
            self._versions[weight_version].finish()

    def verify(self, server: Server, weight_version: int, ranks: RankDigests | None) -> tuple[Verification | None, str]:
        """Compares a server's digests with the trainer's; `ranks` is None if the server reports none.

        Returns:
            `digests` and "" if they are equal; None and the problem if the server must be rejected; `version` and the
            reason if the digests cannot be compared.
        """
        check, problem = self._compare(server, weight_version, ranks)
        if check == "version" and server.digest_dtype is not None:
            return None, f"its weights can no longer be compared with the trainer's: {problem}"
        if check is not None and server.logged_check != check:
            server.logged_check = check
            if check != "digests":
                log.warning(
                    "%s: its parameters cannot be compared with the trainer's: %s. Its checksum is compared with other "
                    "servers' checksums, if there are any.",
                    server.url,
                    problem,
                )
        return check, problem

    def _compare(
        self, server: Server, weight_version: int, ranks: RankDigests | None
    ) -> tuple[Verification | None, str]:
        """Compares the digests as `verify` does, but ignores earlier results."""
        info = server.info
        if info is None or weight_version not in self._versions:
            return "version", f"the digests for version {weight_version} are unknown"
        expected = self._versions[weight_version].finish()
        layouts = info.layouts(server.digest_dtype)
        problem = info.layout_problem or unknown_layout(self.config, layouts[0])
        if problem is None and not any(layout in expected for layout in layouts):
            problem = f"the digests for version {weight_version} were not computed for {layouts[0]}"
        if problem is None and ranks is None:
            problem = "it does not report checksums"
        if problem is not None or ranks is None:
            return "version", str(problem)
        if len(ranks) != info.num_ranks:
            return None, f"{len(ranks)} of its ranks returned checksums instead of {info.num_ranks}"
        results = {layout: self._find_differences(ranks, expected[layout]) for layout in layouts if layout in expected}
        if (outcome := self._names_problem(ranks[0], next(expected[layout][0] for layout in results))) is not None:
            return outcome
        layout, differing = min(results.items(), key=lambda item: len(item[1]))
        hidden = [name for name, digest in ranks[0].items() if not digest]
        if not differing and hidden:
            return "version", f"{len(hidden)} of its {len(ranks[0])} parameters have no digest, such as {hidden[0]}"
        if not differing:
            server.digest_dtype = layout.dtype
            return "digests", ""
        names = sorted({name for name, _ in differing})
        on_ranks = ", ".join(str(rank) for rank in sorted({rank for _, rank in differing}))
        return None, (
            f"{len(names)} of its {len(ranks[0])} parameters differ from the trainer's version {weight_version}: "
            f"{', '.join(names[:3])}{' and others' if len(names) > 3 else ''}, on rank {on_ranks} "
            f"(compared as {' or '.join(str(item) for item in results)})"
        )

    def _find_differences(self, ranks: list[dict[str, str]], expected: RankDigests) -> list[tuple[str, int]]:
        """Returns (name, rank) for each digest that differs; skips parameters without a digest."""
        return [
            (name, rank)
            for rank, (served, trained) in enumerate(zip(ranks, expected, strict=True))
            for name, digest in served.items()
            if digest and name in trained and trained[name] != digest
        ]

    def _names_problem(
        self, served: Mapping[str, str], trained: Mapping[str, str]
    ) -> tuple[Verification | None, str] | None:
        """Returns the result of `verify` if the server's parameter names differ from the trainer's; otherwise None."""
        optional = {OUTPUT_HEAD} if OUTPUT_HEAD in self.form.skip_names else set()
        extra = sorted(set(served) - set(trained))
        missing = sorted(set(trained) - set(served) - optional)
        if not extra and not missing:
            return None
        differences = " and ".join(
            f"{len(names)} parameters that the {side} does not have ({', '.join(names[:3])})"
            for names, side in ((extra, "trainer"), (missing, "server"))
            if names
        )
        if all(_USUAL.fullmatch(name) for name in extra + missing):
            return None, f"it serves a different model: there are {differences}"
        return "version", f"there are {differences}"


async def verify_servers(
    sync: SyncServers, weight_version: int, verifier: WeightVerifier | None
) -> dict[str, Verification]:
    """Returns which check each server passed; a server with a wrong version or wrong parameters is lost."""
    infos = await sync.ask(lambda server: server.client.model_info(timeout_s=sync.timeout_s))
    for server, info in infos.items():
        if str(info.get("weight_version")) != str(weight_version):
            sync.lose(server, f"it reports version {info.get('weight_version')!r} instead of {weight_version}")
    digests = await sync.ask(lambda server: server.client.digests(timeout_s=sync.timeout_s))
    checked: dict[Server, Verification] = dict.fromkeys(digests, "version")
    if verifier is not None:
        await in_thread(verifier.finish, weight_version)
        for server, ranks in digests.items():
            check, problem = verifier.verify(server, weight_version, ranks)
            if check is None:
                sync.lose(server, problem)
            else:
                checked[server] = check
    others = {
        server: (len(ranks), hashlib.sha256(json.dumps(ranks, sort_keys=True).encode()).hexdigest())
        for server in sync.left
        if checked[server] == "version" and (ranks := digests[server])
    }
    for server, agrees in _agree_with_majority(others).items():
        if agrees:
            checked[server] = "replicas"
        else:
            sync.lose(server, f"its weights have checksum {others[server][1][:12]}, unlike the other servers' weights")
    return {server.url: checked[server] for server in sync.left}


def _agree_with_majority(checksum_of: Mapping[Server, tuple[int, str]]) -> dict[Server, bool]:
    """Returns per server whether most servers with as many ranks share its checksum; omits servers without peers."""
    agrees: dict[Server, bool] = {}
    for num_ranks in {num for num, _ in checksum_of.values()}:  # a rank's weights depend on the number of ranks
        group = {server: checksum for server, (num, checksum) in checksum_of.items() if num == num_ranks}
        ranked = Counter(group.values()).most_common(2)
        majority = ranked[0][0] if len(ranked) == 1 or ranked[0][1] > ranked[1][1] else None
        if len(group) > 1:
            agrees |= {server: checksum == majority for server, checksum in group.items()}
    return agrees
