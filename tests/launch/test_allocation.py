"""AReaL's allocation strings: every documented form, and what is refused."""

import pytest

from lightrl.commands.launch.settings import Part, parse_allocation


def sizes(part: Part) -> dict[str, int]:
    found = {letter: getattr(part, name) for letter, name in zip("dtpce", ("dp", "tp", "pp", "cp", "ep"), strict=True)}
    return {letter: size for letter, size in found.items() if size > 1}


# Examples of AReaL's documentation; the numbers of GPUs are those of its tables.
FORMS = {
    "fsdp:d8": [[("fsdp", {"d": 8}, 8)]],
    "d8": [[("fsdp", {"d": 8}, 8)]],
    "sglang:d2t4": [[("sglang", {"d": 2, "t": 4}, 8)]],
    "sglang:d2t4 + fsdp:d4t2": [[("sglang", {"d": 2, "t": 4}, 8)], [("fsdp", {"d": 4, "t": 2}, 8)]],
    "sglang:d4t4 + megatron:d2p2t4e4": [
        [("sglang", {"d": 4, "t": 4}, 16)],
        [("megatron", {"d": 2, "p": 2, "t": 4, "e": 4}, 16)],
    ],
    "d2p2t4": [[("megatron", {"d": 2, "p": 2, "t": 4}, 16)]],
    "p1t1d2": [[("fsdp", {"d": 2}, 2)]],
    "t2d4": [[("fsdp", {"d": 4, "t": 2}, 8)]],
    "e2d2": [[("megatron", {"d": 2, "e": 2}, 2)]],
    "sglang.d4t2+d2p2t1": [[("sglang", {"d": 4, "t": 2}, 8)], [("megatron", {"d": 2, "p": 2}, 4)]],
    "sglang.d4p1m2+d2p2m1": [[("sglang", {"d": 4, "t": 2}, 8)], [("megatron", {"d": 2, "p": 2}, 4)]],
    "sglang.d2t2p1+d1t4p1": [[("sglang", {"d": 2, "t": 2}, 4)], [("fsdp", {"t": 4}, 4)]],
    "vllm:d2t2p2+archon:d4c2": [[("vllm", {"d": 2, "t": 2, "p": 2}, 8)], [("archon", {"d": 4, "c": 2}, 8)]],
    "sglang:d4p1t1+eval": [[("sglang", {"d": 4}, 4)], [("eval", {}, 0)]],
    "sglang.d4p1t1+cpu": [[("sglang", {"d": 4}, 4)], [("eval", {}, 0)]],
    "megatron:(attn:d4p2t2c2|ffn:d2p2t4e2)": [[("megatron", {"d": 4, "p": 2, "t": 2, "c": 2, "e": 2}, 32)]],
    "attn:d4p2t2|ffn:e2": [[("megatron", {"d": 4, "p": 2, "t": 2, "e": 2}, 16)]],
}


@pytest.mark.parametrize("text", FORMS)
def test_every_documented_form_is_read(text):
    found = [[(part.backend, sizes(part), part.num_gpus) for part in group] for group in parse_allocation(text)]
    assert found == FORMS[text]


def test_parts_have_names_and_a_bar_binds_tighter_than_a_plus():
    groups = parse_allocation("sglang[r]:d2+fsdp[a]:d4|fsdp(c):d4")
    assert [[part.name for part in group] for group in groups] == [["r"], ["a", "c"]]
    assert parse_allocation("[actor]:d4")[0][0] == Part("fsdp", name="actor", dp=4)


REFUSED = {
    "": "letters, each with a size",
    "sglang": "letters, each with a size",
    "sglang:": "letters, each with a size",
    "sglang:d4:d4": "after a backend and a colon",
    "heuristic": "manual, heuristic and key-value modes",
    "actor_gen:d4m1p1,*:d2m2p1": "manual, heuristic and key-value modes",
    "tpu:d4": "'tpu' is not a backend",
    "sglang:d4e2": "sglang has no size e",
    "fsdp:d4e2": "fsdp has no size e, .* Write megatron:d4e2, which lightrl trains with ep of its own strategies",
    "fsdp:d0": "letters, each with a size",
    "fsdp:d4d2": "each of",
    "fsdp:x4": "each of",
    "sglang:d2+": "letters, each with a size",
    "fsdp[a]:d4|fsdp[b]:d2": "4 and 2",
    "sglang:d1+fsdp:d1+fsdp:d1": "each needs a name",
    "sglang[a]:d1+fsdp[a]:d1": "must be unique",
    "megatron:(attn:d4p2|ffn:p4)": "p must be the same",
    "megatron:(attn:d4p2|ffn:d8e2)": "the same 8 GPUs",
    "sglang:(attn:d4|ffn:e4)": "not a training backend",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_cannot_be_read_is_refused_with_its_reason(text):
    with pytest.raises(ValueError, match=REFUSED[text]) as error:
        parse_allocation(text)
    assert f"launch.allocation={text!r}" in str(error.value)
