"""Launch: the `launch:` section of a run's YAML: the launcher, and the numbers of hosts and GPUs.

`launch.allocation` accepts AReaL's strings, such as `sglang.d4t2+d2p2t1`, which say how many GPUs each part gets and
how a model is split over them. The supported forms are documented on AReaL's reference page
(https://inclusionai.github.io/AReaL/en/reference/alloc_mode.html), on its version before backends became mandatory
(`docs/reference/alloc_mode.md` in the repository's history), and in the grammar of `areal/api/alloc_mode.py`. No
source was found for `+eval` and `+cpu`.

    sglang:d4t2                            one part: a backend and its sizes
    sglang:d4t2 + fsdp:d8                  `+`: parts on separate GPUs
    sglang.d4p1m1+d2p2m1                   AReaL Core: m means t
    sglang.d4t2p1+d2p2t1                   older: a dot; the training backend is fsdp, or megatron with p or e
    sglang:d4+eval, sglang:d4+cpu          older: only servers, and an evaluation that uses no GPUs
    sglang[rollout]:d2+fsdp[actor]:d4      parts with names; also fsdp(actor):d4 and [actor]:d4
    fsdp[actor]:d4|fsdp[critic]:d4         `|`, which binds tighter than `+`: parts on the same GPUs
    megatron:(attn:d4p2t2c2|ffn:d2p2t4e2)  a different split of experts; parentheses or backend may be omitted

Sizes: d data parallel (the number of servers), t tensor, p pipeline, c context, e expert parallel. A part needs
d · t · p · c GPUs; e subdivides them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from lightrl.checks.bounds import check_bounds, check_positive
from lightrl.trajectory import JsonMapping, JsonObject

LauncherName = Literal["local", "torchrun", "slurm", "kubernetes", "ray"]


@dataclass(frozen=True)
class Recover:
    """How a run recovers when one of its processes fails.

    Args:
        retries: maximum number of restarts from the newest checkpoint.
    """

    retries: int = 0

    def __post_init__(self) -> None:
        check_bounds(0, retries=self.retries)


@dataclass(frozen=True)
class Resources:
    """Resources that Ray or Kubernetes reserves for each rank or server, in addition to its GPUs.

    Args:
        cpus: CPU cores; None reserves one core per process on Ray, and none on Kubernetes.
        memory_gb: memory of the host, in 1e9 bytes; None reserves none.
        node_selector: labels that a node must have, such as `{gpu: h200}`; set them with Kubernetes or `ray start`.
    """

    cpus: int | None = None
    memory_gb: float | None = None
    node_selector: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_bounds(1, cpus=self.cpus)
        check_positive(memory_gb=self.memory_gb)


@dataclass(frozen=True)
class Launch:
    """Where a run's trainer and servers run; `lightrl launch` reads it, `lightrl fit` ignores it.

    Args:
        launcher: the program that starts the processes.
        nodes: number of hosts.
        gpus_per_node: GPUs, or with `accelerator: cpu` the number of ranks and servers, on each host. None means this
            machine's GPUs or, for other launchers, the number that the run needs.
        allocation: a string in AReaL's format, such as `sglang.d4t2+d2p2t1`, instead of `ranks`, `servers` and `tp`; it
            also sets the strategy: Parallel3DStrategy if it has p or t, and cp and ep in either strategy.
        ranks: number of trainer ranks; None means `trainer.devices` times `trainer.num_nodes`.
        servers: number of SGLangEngine or VLLMEngine servers; None uses the engine's `servers`.
        tp: GPUs per server; None uses the engine's `tp`.
        placement: whether servers are `separate` from the trainer's GPUs or `colocated` on them.
        gpu_memory_gb: each GPU's memory, in 1e9 bytes; a model that cannot fit is refused. None skips this check.
        hosts: names or addresses of the hosts, for torchrun; other launchers find them.
        port: port for the trainer's store; servers and weight receivers use the 64 ports above it. None chooses one.
        time_limit: a job's limit, in Slurm's format: minutes, `hours:minutes:seconds` or `days-hours:minutes:seconds`.
        warning_s: seconds before the time limit at which the run is asked to save its checkpoint and end.
        setup: shell lines to run before each process, such as `module load cuda`.
        environment: variables for every process, such as `{NCCL_SOCKET_IFNAME: ib0, GLOO_SOCKET_IFNAME: ib0}`.
        container: for Kubernetes the image; for other launchers a command to put before each process's command, such
            as `apptainer exec --nv run.sif`.
        options: other options for the launcher: sbatch's by name, such as `{partition: gpu}`, Kubernetes' `namespace`
            and `runtime`, or Ray's `address`.
        srun_options: with Slurm, options for every `srun` by name, such as `{container-image: lab/lightrl.sqsh}`.
        server_options: with Slurm, sbatch options that differ for hosts with only servers; the job is then
            heterogeneous.
        rank_resources: CPUs and memory for each trainer rank, and labels for its node, with Ray or Kubernetes. With
            Slurm use sbatch's options, such as `{mem: 500G, constraint: h200}`.
        server_resources: CPUs, memory and node labels for each server.
        recover: what to do after a process fails.
    """

    launcher: LauncherName = "local"
    nodes: int = 1
    gpus_per_node: int | None = None
    allocation: str | None = None
    ranks: int | None = None
    servers: int | None = None
    tp: int | None = None
    placement: Literal["separate", "colocated"] = "separate"
    gpu_memory_gb: float | None = None
    hosts: list[str] = field(default_factory=list)
    port: int | None = None
    time_limit: str | None = None
    warning_s: int = 300
    setup: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    container: str | None = None
    options: dict[str, str] = field(default_factory=dict)
    srun_options: dict[str, str] = field(default_factory=dict)
    server_options: dict[str, str] = field(default_factory=dict)
    rank_resources: Resources = Resources()
    server_resources: Resources = Resources()
    recover: Recover = Recover()

    @classmethod
    def of(cls, section: JsonMapping) -> Launch:
        """Builds the settings from the parsed section."""
        kinds = {"recover": Recover, "rank_resources": Resources, "server_resources": Resources}
        return cls(**{**section, **{name: kind(**(section.get(name) or {})) for name, kind in kinds.items()}})

    def __post_init__(self) -> None:
        check_bounds(1, nodes=self.nodes, gpus_per_node=self.gpus_per_node, ranks=self.ranks, tp=self.tp)
        check_bounds(0, servers=self.servers, warning_s=self.warning_s)
        check_positive(**{"launch.gpu_memory_gb": self.gpu_memory_gb})
        check_bounds(1024, 65535 - 64, **{"launch.port": self.port})
        if self.allocation is not None and (self.ranks, self.servers, self.tp) != (None, None, None):
            raise ValueError("Set either launch.allocation, or launch.ranks, servers and tp.")
        if self.launcher == "local" and self.nodes > 1:
            raise ValueError(
                f"launch.nodes={self.nodes} needs a launcher that reaches other hosts: slurm, ray, torchrun or "
                "kubernetes. local only starts processes on this machine."
            )
        for name in ("server_options", "srun_options"):
            if getattr(self, name) and self.launcher != "slurm":
                raise ValueError(f"launch.{name} needs launcher: slurm, but launch.launcher is {self.launcher}.")
        for name in ("rank_resources", "server_resources"):
            if getattr(self, name) != Resources() and self.launcher not in ("ray", "kubernetes"):
                how = "launch.options, such as {mem: 500G, constraint: h200}, and server_options for servers"
                other = f"Set {how}" if self.launcher == "slurm" else "Remove it: this launcher reserves nothing"
                raise ValueError(f"launch.{name} needs launcher: ray or kubernetes, got {self.launcher}. {other}.")
        if self.recover.retries and self.launcher in ("torchrun", "kubernetes"):
            how = "To continue a run, start it again with --ckpt_path last"
            raise ValueError(f"launch.recover needs launcher: local, slurm or ray, got {self.launcher}. {how}.")
        if self.time_limit is not None and self.launcher != "slurm":
            raise ValueError(f"launch.time_limit needs launcher: slurm, got {self.launcher}. Remove it.")
        if self.hosts and len(self.hosts) != self.nodes:
            raise ValueError(f"launch.hosts must name all {self.nodes} nodes, got {len(self.hosts)}.")
        if self.launcher == "kubernetes" and self.container is None:
            raise ValueError("launcher: kubernetes needs launch.container, the image with lightrl and SGLang.")


@dataclass(frozen=True)
class Layout:
    """The numbers of ranks and servers, and how the model is split."""

    ranks: int
    servers: int = 0
    tp: int = 1  # GPUs per server
    placement: Literal["separate", "colocated"] = "separate"
    trainer_pp: int | None = None  # None if the strategy decides
    trainer_tp: int | None = None
    cp: int = 1  # 1 leaves the choice of cp and ep to the strategy
    ep: int = 1
    engine: str | None = None  # the servers' engine class; None means the run's or, if it has none, SGLangEngine


def layout_of(launch: Launch, *, ranks: int, servers: int = 0, tp: int = 1) -> Layout:
    """Returns the layout of a launch; `ranks`, `servers` and `tp` are used if the launch does not set them.

    Raises ValueError if the allocation string cannot be read, or has parts that lightrl cannot train or serve.
    """
    if launch.allocation is not None:
        return _layout_of_parts(launch.allocation, parse_allocation(launch.allocation))
    return Layout(
        ranks=ranks if launch.ranks is None else launch.ranks,
        servers=servers if launch.servers is None else launch.servers,
        tp=tp if launch.tp is None else launch.tp,
        placement=launch.placement,
    )


def _layout_of_parts(text: str, groups: Sequence[Sequence[Part]]) -> Layout:
    def refused(why: str) -> ValueError:
        return ValueError(f"launch.allocation={text!r} is understood, but {why}.")

    parts = [part for group in groups for part in group]
    served = [part for part in parts if part.is_served]
    trained = [part for part in parts if part.num_gpus and not part.is_served]
    if not trained:
        raise refused("it trains nothing. To run only servers, use lightrl serve; to evaluate, use lightrl test")
    if len(served) > 1:
        raise refused("lightrl supports only one group of servers")
    num_trained_groups = sum(any(part in trained for part in group) for group in groups)
    if len({part.num_gpus for part in trained}) > 1 or num_trained_groups > 1:
        raise refused(
            "its trained models are on different GPUs. Use one part for all of them, and in the model's section set "
            "`mesh: {first_rank: …, num_ranks: …}` for each role with separate ranks"
        )
    model = trained[0]
    if any(part.pp > 1 for part in served):
        raise refused("lightrl's servers have d and t, but no p")
    if model.expert_tp > 1:
        raise refused("lightrl divides experts only by e and cannot split an expert, so ffn's t must be 1")
    (servers,) = served or [Part("sglang", dp=0)]
    is_colocated = any(servers in group and model in group for group in groups)
    return Layout(
        model.num_gpus,
        servers.dp,
        servers.tp,
        "colocated" if is_colocated else "separate",
        model.pp,
        model.tp,
        cp=model.cp,
        ep=model.ep,
        engine={"sglang": "SGLangEngine", "vllm": "VLLMEngine"}[servers.backend] if served else None,
    )


_SERVERS, _TRAINERS = ("sglang", "vllm"), ("fsdp", "megatron", "archon")
_NAMES = {"d": "dp", "t": "tp", "p": "pp", "c": "cp", "e": "ep"}
_NAME = r"[A-Za-z_]\w*"
_PART = re.compile(
    rf"(?:(?P<backend>[a-z]+)?(?:\[(?P<name>{_NAME})\]|\((?P<old_name>{_NAME})\))?[:.])?(?P<sizes>[^:.]*)"
)
_EXPERTS = re.compile(r"\(?attn:([^|]*)\|ffn:([^|)]*)\)?")
_FORMS = "Examples: sglang:d4t2+fsdp:d8 and sglang.d4t2+d2p2t1; commands/launch/settings.py lists all forms."


@dataclass(frozen=True)
class Part:
    """One part of an allocation: a backend and its sizes."""

    backend: str  # sglang or vllm for servers; fsdp, megatron or archon for training; `eval` has no GPUs
    name: str | None = None
    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    expert_tp: int = 1

    @property
    def is_served(self) -> bool:
        return self.backend in _SERVERS

    @property
    def num_gpus(self) -> int:
        return 0 if self.backend == "eval" else self.dp * self.tp * self.pp * self.cp


def allocation_of(layout: Layout) -> str:
    """Returns the allocation string from which `layout_of` makes this layout."""
    split = [("p", layout.trainer_pp or 1), ("t", layout.trainer_tp or 1), ("c", layout.cp), ("e", layout.ep)]
    sizes = "".join(f"{letter}{size}" for letter, size in split if size > 1)
    dp = layout.ranks // math.prod(size for letter, size in split if letter != "e")
    trainer = f"{'megatron' if {'p', 'e'} & {*sizes} else 'fsdp'}:d{dp}{sizes}"
    backend = "vllm" if layout.engine == "VLLMEngine" else "sglang"
    served = f"{backend}:d{layout.servers}" + (f"t{layout.tp}" if layout.tp > 1 else "")
    mark = "|" if layout.placement == "colocated" else "+"
    return f"{served}{mark}{trainer}" if layout.servers else trainer


def parse_allocation(text: str) -> list[list[Part]]:
    """Parses an allocation string; parts in an inner list share GPUs. Raises ValueError for a wrong form or sizes."""
    words = re.sub(r"\s", "", text)
    if words in ("manual", "heuristic", "search") or re.search(r"[,=*]", words):
        raise _wrong(text, "AReaL Core's manual, heuristic and key-value modes place models separately: use sizes")
    groups = [_parse_group(word, text) for word in _split(words, "+")]
    parts = [part for group in groups for part in group]
    names = [part.name for part in parts if part.name is not None]
    if len(names) != len(set(names)):
        raise _wrong(text, f"part names must be unique, got {', '.join(names)}")
    if len(parts) > 2 and len(names) < len(parts):
        raise _wrong(text, "with more than two parts, each needs a name, as in fsdp[actor]:d4")
    return groups


def _parse_group(word: str, text: str) -> list[Part]:
    """Parses parts that share GPUs."""
    parts = [_parse_part(one, text) for one in _split(word, "|")]
    sizes = {part.num_gpus for part in parts}
    if len(sizes) > 1:
        numbers = " and ".join(str(part.num_gpus) for part in parts)
        raise _wrong(text, f"parts that share GPUs must have the same number of them, but {word} has {numbers}")
    return parts


def _parse_part(word: str, text: str) -> Part:
    if word in ("eval", "cpu"):
        return Part("eval")
    if experts := _EXPERTS.search(word):
        backend = word[: experts.start()].removesuffix(":") or "megatron"
        return _with_experts(Part(backend), experts[1], experts[2], text)
    match = _PART.fullmatch(word)
    if match is None:
        raise _wrong(text, f"{word!r} must be sizes such as d4t2, after a backend and a colon")
    sizes = _parse_sizes(match["sizes"], "dtpce", text)
    is_plain = sizes.get("pp", 1) == sizes.get("ep", 1) == 1
    backend = match["backend"] or ("fsdp" if is_plain else "megatron")
    if backend not in (*_SERVERS, *_TRAINERS):
        raise _wrong(text, f"{backend!r} is not a backend; choose from {', '.join((*_SERVERS, *_TRAINERS))}")
    allowed = {"sglang": "dtp", "vllm": "dtp", "fsdp": "dtcp"}.get(backend, "dtpce")
    if wrong := [letter for letter, name in _NAMES.items() if name in sizes and letter not in allowed]:
        fix = f". Write megatron:{match['sizes']}, which lightrl trains with ep of its own strategies"
        fix = fix if backend == "fsdp" else ""  # in AReaL's strings only megatron has e
        raise _wrong(text, f"{backend} has no size {wrong[0]}, only {', '.join(allowed)}{fix}")
    return Part(backend, name=match["name"] or match["old_name"], **sizes)


def _with_experts(part: Part, attn: str, ffn: str, text: str) -> Part:
    """Applies `attn`, the sizes of the whole model, and `ffn`, the split of its experts over the same GPUs."""
    if part.backend not in _TRAINERS:
        raise _wrong(text, f"{part.backend!r} is not a training backend; choose from {', '.join(_TRAINERS)}")
    model = replace(part, **_parse_sizes(attn, "dtpc", text))
    experts = _parse_sizes(ffn, "dtpe", text)
    pp = experts.get("pp", model.pp)
    if pp != model.pp:
        raise _wrong(text, f"p must be the same for attn ({model.pp}) and ffn ({pp})")
    dp, remainder = divmod(model.num_gpus, pp * experts.get("tp", 1) * experts.get("ep", 1))
    if remainder or experts.get("dp", dp) != dp:
        raise _wrong(text, f"ffn must use the same {model.num_gpus} GPUs as attn, got d·p·t·e = {ffn}")
    return replace(model, ep=experts.get("ep", 1), expert_tp=experts.get("tp", 1))


def _parse_sizes(word: str, allowed: str, text: str) -> JsonObject:
    word = word if "t" in word else word.replace("m", "t")  # AReaL Core writes m for t
    pairs = re.findall(r"([a-z])([1-9]\d*)", word)
    if not pairs or "".join(letter + size for letter, size in pairs) != word:
        raise _wrong(text, f"{word!r} must be letters, each with a size, such as d4t2")
    letters = [letter for letter, _ in pairs]
    if len(set(letters)) < len(letters) or not set(letters) <= set(allowed):
        raise _wrong(text, f"{word!r} may have each of {', '.join(allowed)} at most once")
    return {_NAMES[letter]: int(size) for letter, size in pairs}


def _split(word: str, mark: str) -> list[str]:
    """Splits at `mark`, except within parentheses and between the two halves of `attn:…|ffn:…`."""
    return re.split(rf"\{mark}(?![^(]*\))(?!ffn:)", word)


def _wrong(text: str, why: str) -> ValueError:
    return ValueError(f"launch.allocation={text!r} cannot be read: {why}. {_FORMS}")
