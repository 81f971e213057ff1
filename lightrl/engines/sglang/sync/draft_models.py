"""DraftModels: whether the draft models of speculative decoding hold what they should.

A draft proposes tokens, which the target accepts or replaces: its weights decide how fast tokens are sampled, never
which. So a wrong draft is reported, and the server stays.

Source: SGLang 0.5.23, managers/scheduler_components/weight_updater.py, speculative/eagle_worker_v2.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SHARED = ("embed_tokens.weight", "lm_head.weight")  # which most drafts take from the target
RankDigests = list[dict[str, str]]  # by rank: parameter name → digest


class DraftModels:
    """Compares the drafts of one server's process with its target and with themselves.

    A parameter that the draft shares with the target must still equal the target's. Any other one is the draft's own,
    which no run trains: it must stay as it was, unless the server loaded the target's parameter of that name into it.
    """

    def __init__(self) -> None:
        self._first: RankDigests | None = None  # what they held when the process was first asked
        self._sources: list[dict[str, str]] = []  # by rank: a shared parameter → the target's parameter that it is

    def note(self, answer: Mapping[str, Any] | None) -> tuple[int, int]:
        """Remembers what the drafts hold now, if this is the first answer.

        Returns:
            How many parameters they share with the target, and how many they have of their own, on the first rank.
        """
        if self._first is None:
            ranks = digests_by_rank(answer or {})
            names = [{digest: name for name, digest in target.items()} for target, _ in ranks]
            self._sources = [
                {name: known[digest] for name, digest in draft.items() if name.endswith(_SHARED) and digest in known}
                for known, (_, draft) in zip(names, ranks, strict=True)
            ]
            self._first = [draft for _, draft in ranks]
        num_shared = len(self._sources[0]) if self._sources else 0
        return num_shared, len(self._first[0]) - num_shared if self._first else 0

    def problem(self, answer: Mapping[str, Any] | None) -> str:
        """Which parameters of the drafts are wrong; empty if none is."""
        self.note(answer)
        first = self._first or []
        stale: set[str] = set()
        changed: set[str] = set()
        for rank, (target, draft) in enumerate(digests_by_rank(answer or {})[: len(first)]):
            for name, digest in draft.items():
                source = self._sources[rank].get(name)
                if source is not None and digest != target.get(source):
                    stale.add(name)
                elif source is None and digest not in (first[rank].get(name), target.get(_bare(name))):
                    changed.add(name)
        return " and ".join(
            f"{len(names)} parameters that {what} ({', '.join(sorted(names)[:3])})"
            for names, what in ((stale, "no longer equal the policy's, which it shared"), (changed, "changed"))
            if names
        )


def digests_by_rank(answer: Mapping[str, Any]) -> list[tuple[dict[str, str], dict[str, str]]]:
    """Digests by name, from an answer of `/weights_checker`: of each rank's target and of its draft models."""
    by_rank: list[tuple[int, dict[str, str], dict[str, str]]] = []
    for entry in answer.get("ranks") or []:
        infos = entry.get("parallelism_info") or {}
        infos = infos if isinstance(infos, list) else [infos]
        roles = tuple(f"{info['role']}." for info in infos if info.get("role", "target") != "target")
        digests: dict[str, str] = entry["checksums"]
        draft = {name: digest for name, digest in digests.items() if name.startswith(roles)}
        others = {name: digest for name, digest in digests.items() if name not in draft}
        target = {name.replace(".base_layer.", "."): digest for name, digest in others.items()}  # with `enable_lora`
        by_rank.append((int(infos[0].get("tp_rank") or 0) if infos else 0, target, draft))
    return [(target, draft) for _, target, draft in sorted(by_rank, key=lambda item: item[0])]


def target_digests(answer: Mapping[str, Any]) -> RankDigests:
    """Those of each rank's target, without those of draft models."""
    return [target for target, _ in digests_by_rank(answer)]


def _bare(name: str) -> str:
    """Without the draft's role, by which SGLang tells it from the target's parameter."""
    return name.partition(".")[2]
