"""AReaL's allocation strings, such as `sglang.d4t2+d2p2t1`: who gets how many GPUs, and how a model is split over them.

The forms that AReaL has documented: on its reference page
(https://inclusionai.github.io/AReaL/en/reference/alloc_mode.html), on the page before backends became mandatory
(`docs/reference/alloc_mode.md` in the repository's history), and in the grammar of `areal/api/alloc_mode.py`. `+eval`
and `+cpu` are from memory: no page that was found shows them.

    sglang:d4t2                            one part: a backend and its sizes
    sglang:d4t2 + fsdp:d8                  `+`: each part has GPUs of its own
    sglang.d4p1m1+d2p2m1                   AReaL Core: m is t
    sglang.d4t2p1+d2p2t1                   older: a dot, and no backend for training: fsdp, or megatron with p or e
    sglang:d4+eval, sglang:d4+cpu          older: servers alone, and an evaluation without GPUs
    sglang[rollout]:d2+fsdp[actor]:d4      parts with names; also fsdp(actor):d4 and [actor]:d4
    fsdp[actor]:d4|fsdp[critic]:d4         `|`, which binds tighter than `+`: the same GPUs
    megatron:(attn:d4p2t2c2|ffn:d2p2t4e2)  experts split otherwise; the parentheses or the backend may be missing

Sizes: d data parallel (of servers: how many), t tensor, p pipeline, c context, e expert parallel. A part needs
d · t · p · c GPUs; e divides these once more.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from lightrl.trajectory import JsonObject

_SERVERS, _TRAINERS = ("sglang", "vllm"), ("fsdp", "megatron", "archon")
_NAMES = {"d": "dp", "t": "tp", "p": "pp", "c": "cp", "e": "ep"}
_NAME = r"[A-Za-z_]\w*"
_PART = re.compile(
    rf"(?:(?P<backend>[a-z]+)?(?:\[(?P<name>{_NAME})\]|\((?P<old_name>{_NAME})\))?[:.])?(?P<sizes>[^:.]*)"
)
_EXPERTS = re.compile(r"\(?attn:([^|]*)\|ffn:([^|)]*)\)?")
_FORMS = "Such strings look like sglang:d4t2+fsdp:d8 or sglang.d4t2+d2p2t1; see lightrl/launch/allocation.py for all."


@dataclass(frozen=True)
class Part:
    """One part of an allocation: a backend, and its sizes."""

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


def parse_allocation(text: str) -> list[list[Part]]:
    """The parts of an allocation string; those of an inner list share their GPUs.

    Raises:
        ValueError: if it has none of the forms above, or sizes that do not fit.
    """
    words = re.sub(r"\s", "", text)
    if words in ("manual", "heuristic", "search") or re.search(r"[,=*]", words):
        raise _wrong(text, "AReaL Core's manual, heuristic and key-value modes place each model by itself, give sizes")
    groups = [_group(word, text) for word in _split(words, "+")]
    parts = [part for group in groups for part in group]
    names = [part.name for part in parts if part.name is not None]
    if len(names) != len(set(names)):
        raise _wrong(text, f"it has two parts of the same name among {', '.join(names)}")
    if len(parts) > 2 and len(names) < len(parts):
        raise _wrong(text, "with more than two parts each needs a name, as in fsdp[actor]:d4")
    return groups


def _group(word: str, text: str) -> list[Part]:
    """Parts on the same GPUs."""
    parts = [_part(one, text) for one in _split(word, "|")]
    sizes = {part.num_gpus for part in parts}
    if len(sizes) > 1:
        numbers = " and ".join(str(part.num_gpus) for part in parts)
        raise _wrong(text, f"parts that share GPUs must have the same number of them, but {word} has {numbers}")
    return parts


def _part(word: str, text: str) -> Part:
    if word in ("eval", "cpu"):
        return Part("eval")
    if experts := _EXPERTS.search(word):
        backend = word[: experts.start()].removesuffix(":") or "megatron"
        return _with_experts(Part(backend), experts[1], experts[2], text)
    match = _PART.fullmatch(word)
    if match is None:
        raise _wrong(text, f"{word!r} must be sizes such as d4t2, after a backend and a colon")
    sizes = _sizes(match["sizes"], "dtpce", text)
    is_plain = sizes.get("pp", 1) == sizes.get("ep", 1) == 1
    backend = match["backend"] or ("fsdp" if is_plain else "megatron")
    if backend not in (*_SERVERS, *_TRAINERS):
        raise _wrong(text, f"{backend!r} is not a backend: {', '.join((*_SERVERS, *_TRAINERS))}")
    allowed = {"sglang": "dtp", "vllm": "dtp", "fsdp": "dtcp"}.get(backend, "dtpce")
    if wrong := [letter for letter, name in _NAMES.items() if name in sizes and letter not in allowed]:
        raise _wrong(text, f"{backend} has no size {wrong[0]}, only {', '.join(allowed)}")
    return Part(backend, name=match["name"] or match["old_name"], **sizes)


def _with_experts(part: Part, attn: str, ffn: str, text: str) -> Part:
    """`attn` sizes the whole model; `ffn` says how the experts' layers are split over the same GPUs."""
    if part.backend not in _TRAINERS:
        raise _wrong(text, f"{part.backend!r} is not a training backend: {', '.join(_TRAINERS)}")
    model = replace(part, **_sizes(attn, "dtpc", text))
    experts = _sizes(ffn, "dtpe", text)
    pp = experts.get("pp", model.pp)
    if pp != model.pp:
        raise _wrong(text, f"p must be the same for attn ({model.pp}) and ffn ({pp})")
    rest = pp * experts.get("tp", 1) * experts.get("ep", 1)
    dp, left = divmod(model.num_gpus, rest)
    if left or experts.get("dp", dp) != dp:
        raise _wrong(text, f"ffn must use the same {model.num_gpus} GPUs as attn, got d·p·t·e = {ffn}")
    return replace(model, ep=experts.get("ep", 1), expert_tp=experts.get("tp", 1))


def _sizes(word: str, allowed: str, text: str) -> JsonObject:
    word = word if "t" in word else word.replace("m", "t")  # AReaL Core's letter
    pairs = re.findall(r"([a-z])([1-9]\d*)", word)
    if not pairs or "".join(letter + size for letter, size in pairs) != word:
        raise _wrong(text, f"{word!r} must be letters with a size each, such as d4t2")
    letters = [letter for letter, _ in pairs]
    if len(set(letters)) < len(letters) or not set(letters) <= set(allowed):
        raise _wrong(text, f"{word!r} may have each of {', '.join(allowed)} once")
    return {_NAMES[letter]: int(size) for letter, size in pairs}


def _split(word: str, mark: str) -> list[str]:
    """Splits at `mark`, but not within parentheses, nor between the two halves of `attn:…|ffn:…`."""
    return re.split(rf"\{mark}(?![^(]*\))(?!ffn:)", word)


def _wrong(text: str, why: str) -> ValueError:
    return ValueError(f"launch.allocation={text!r} cannot be read: {why}. {_FORMS}")
