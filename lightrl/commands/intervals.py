"""Confidence intervals for pass@k, which `lightrl validate` and `lightrl test` print below their metrics."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

_SOLVED = re.compile(r"(val|test)/(accuracy_fraction|pass_at_(\d+)_fraction)(/.*)?$")
_Z = 1.959963984540054  # 95% of the normal distribution lies between -z and z


def wilson_interval(fraction: float, num: int, z: float = _Z) -> tuple[float, float]:
    """Returns Wilson's score interval for a fraction of `num` independent outcomes of 0 or 1.

    If outcomes may also lie between 0 and 1, as with a graded accuracy, their variance is smaller and the interval is
    wider than necessary. Source: Wilson (1927), https://doi.org/10.1080/01621459.1927.10502953.
    """
    center = (fraction + z**2 / (2 * num)) / (1 + z**2 / num)
    half = z / (1 + z**2 / num) * math.sqrt(fraction * (1 - fraction) / num + z**2 / (4 * num**2))
    return max(0.0, center - half), min(1.0, center + half)


def interval_lines(metrics: Mapping[str, object]) -> str:
    """Returns a line for each pass@k among the metrics, with its 95% interval; empty if there is none.

    Each prompt is one independent outcome, solved by its k completions or not, so Wilson's interval is valid for any k.
    With one completion per prompt, pass@1 is the accuracy.
    """
    values = {name: float(value) for name, value in metrics.items()}  # type: ignore[arg-type]
    sampled = {(match[1], match[4]) for name in values if (match := _SOLVED.match(name)) and match[3]}
    lines = []
    for name, value in values.items():
        match = _SOLVED.match(name)
        if match is None or (match[3] is None and (match[1], match[4]) in sampled) or not 0 <= value <= 1:
            continue
        num = int(values.get(f"{match[1]}/prompts{match[4] or ''}", 0))
        if num:
            low, high = wilson_interval(value, num)
            label = f"{match[1]}{match[4] or ''} pass@{match[3] or 1}"
            lines.append(f"{label} {value:.4f}, 95% interval {low:.4f} to {high:.4f} (Wilson, {num} prompts)")
    return "\n".join(lines)
