"""Word problems that SmolLM2-135M-Instruct cannot compute, and a calculator that it may call before it answers."""

from __future__ import annotations

import random
import re
from typing import Any

from lightrl.trajectory import Trajectory
from lightrl.workflows.tools import ToolCall, ToolEnvironment, calculator

_WORDINGS = {  # a wording's sign says how its numbers make the answer
    "A box holds {a} screws. How many screws do {b} boxes hold?": "*",
    "A ticket costs {a} euros. How much do {b} tickets cost?": "*",
    "Each of {b} shelves carries {a} books. How many books are there?": "*",
    "A train drives {a} km every day. How far does it drive in {b} days?": "*",
    "A farm has {a} sheep and {b} goats. How many animals does it have?": "+",
    "Ann has {a} stamps and buys {b} more. How many does she have now?": "+",
    "There are {a} people in one town and {b} in another. How many are there in both?": "+",
    "A tank holds {a} liters. After a leak, {b} liters are gone. How many are left?": "-",
    "A shop had {a} apples and sold {b}. How many apples remain?": "-",
    "Tom is {a} km from home and walks {b} km towards it. How far is it now?": "-",
}
_NEW_WORDINGS = {
    "A page has {a} words. How many words do {b} pages have?": "*",
    "A school has {a} girls and {b} boys. How many children does it have?": "+",
    "A book has {a} pages, of which Eva has read {b}. How many has she still to read?": "-",
}
_WORKED = [  # before each problem
    ("A box holds 240 nails. How many nails do 12 boxes hold?", "240 * 12", "2880"),
    ("A farm has 310 sheep and 45 goats. How many animals does it have?", "310 + 45", "355"),
    ("A tank holds 900 liters. After a leak, 35 liters are gone. How many are left?", "900 - 35", "865"),
]
_CALL = re.compile(r"calculator\(([^()]+)\)")


def problems(split: str = "train") -> list[dict[str, Any]]:
    """Makes 1,000 problems for training, 100 for `test`, and 100 in other words for `new_wordings`.

    A question is a list of messages: three worked examples, then the problem.
    """
    worked = []
    for question, expression, result in _WORKED:
        worked += [{"role": "user", "content": question}, {"role": "assistant", "content": f"calculator({expression})"}]
        worked += [{"role": "tool", "content": result}, {"role": "assistant", "content": result}]
    rng = random.Random(split)
    wordings = _NEW_WORDINGS if split == "new_wordings" else _WORDINGS
    rows = []
    for _ in range(1000 if split == "train" else 100):
        wording, sign = rng.choice(list(wordings.items()))
        larger, smaller = rng.randint(500, 9999), rng.randint(12, 499)
        answer = {"*": larger * smaller, "+": larger + smaller, "-": larger - smaller}[sign]
        question = [*worked, {"role": "user", "content": wording.format(a=larger, b=smaller)}]
        rows.append({"question": question, "answer": str(answer)})
    return rows


def tools() -> ToolEnvironment:
    return ToolEnvironment([calculator], parser=calls_of)


def calls_of(completion: str) -> list[ToolCall]:
    """Returns the first `calculator(...)` of a completion; a later one would be a guess at what it returns."""
    call = _CALL.search(completion)
    return [ToolCall("calculator", {"expression": call[1]})] if call else []


def right_number(trajectory: Trajectory) -> dict[str, float]:
    """Returns 1 if the last turn ends by itself and is the answer alone."""
    number = trajectory.completion.strip().removesuffix(".").replace(",", "")
    is_right = trajectory.finish_reason == "stop" and number == trajectory.prompt.fields["answer"]
    return {"reward": float(is_right), "accuracy": float(is_right)}
