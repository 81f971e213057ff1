"""Teachers of some rows or with another prompt, against a plain forward of the teacher on its prompt and the answer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from several_run import CASES, TEACHERS, hint_of, taught_result
from tiny_run import POLICY

ROUNDING = 1e-5  # of logits up to 10 from sums of 16 products in float32: 16 * 2**-24 * 10


def check_teachers(found: dict[str, Any], teachers: dict[str, Any]) -> None:
    """Compares each answer's logprobs with those after the teacher's own prompt, row by row."""
    tensors, specs = found["tensors"], {**teachers.get("teachers", {}), None: teachers.get("teacher", POLICY)}
    models = {label: spec.load_model().eval() for label, spec in specs.items()}
    rows = zip(tensors["token_ids"], tensors["lengths"], tensors["loss_mask"], found["sources"], strict=True)
    for row, (token_ids, length, mask, source) in enumerate(rows):
        ids, start = token_ids[:length].tolist(), int(mask.nonzero()[0])
        prompt = ids[:start] if source == "short" else hint_of(ids, start)
        with torch.no_grad():
            logits = models.get(source, models[None])(torch.tensor([prompt + ids[start:]])).logits[0]
        wanted = torch.zeros(len(token_ids))
        answer = logits[len(prompt) - 1 : -1].log_softmax(-1)
        wanted[start:length] = answer.gather(1, torch.tensor(ids[start:])[:, None])[:, 0]
        actual = tensors["teacher_logprobs"][row]
        torch.testing.assert_close(actual[mask], wanted[mask], rtol=0, atol=ROUNDING)
        if "teacher_topk" in teachers:
            top = answer.topk(teachers["teacher_topk"]).values[mask[start:length]]  # not of observations
            torch.testing.assert_close(tensors["teacher_topk_logprobs"][row][mask], top, rtol=0, atol=ROUNDING)
    assert set(found["sources"]) == {"short", "turns", None}


@pytest.mark.parametrize("name", CASES)
def test_a_teacher_reads_its_own_prompt_and_the_policys_answer(name: str, tmp_path: Path, several_ranks: Any) -> None:
    teachers = CASES[name][0]
    alone = taught_result(tmp_path, teachers)
    check_teachers(alone, teachers)
    turns = [of for of in alone["sources"] if of == "turns"]
    assert len(turns) == 3
    for rank in several_ranks:  # two ranks, some cases with rows divided over both
        check_teachers(rank[name], teachers)
        for key, value in alone["weights"].items():
            scale = float(value.abs().max())
            torch.testing.assert_close(rank[name]["weights"][key], value, rtol=0, atol=1e-5 * scale)


def test_a_teacher_of_no_source_is_refused_before_a_model_is_built(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"teachers are named .*'games'.*, but the training data's sources"):
        taught_result(tmp_path, {"teachers": {"games": TEACHERS["teacher"]}})
