"""Forward and backward of the update, in tokens per second: lightrl's forms against padded Hugging Face.

    python -m benchmarks.packing [--quick] [--models 1M,27M] [--threads 2] [--device cpu]

The same work for all: a float32 model with the same weights, one iteration's trajectories, the logprob of each
completion token, a weighted sum of them as the loss, the gradients of all parameters. Token counts include prompts and
exclude padding. The run ends if the gradients differ from those of the padded form by more than rounding.

    padded      as in TRL: all rows as wide as the longest, an attention mask, logits of every position, in microbatches
                of the number of rows that was fastest
    rectangles  lightrl without prefix sharing: rows of similar length together, the output head at loss tokens only
    shared      lightrl: a group's prompt also goes through the model only once

On a GPU both lightrl forms are one packed row instead (strategies/single.py). Workloads, 16 groups of 8 trajectories:

    short   prompts of 5 tokens, completions of 2 to 4
    skewed  prompts of 32 tokens, completions of lengths.py with a cap of 128
"""

from __future__ import annotations

import argparse
import functools
import random
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.lengths import skewed_lengths
from benchmarks.local_engine import make_model
from benchmarks.report import PeakMemory, Report, interleaved, median_ratio
from lightrl.experience import Experience
from lightrl.models import Outputs
from lightrl.strategies import LogprobSettings, SingleModel
from lightrl.strategies.layouts.shared_prefix import Layout
from lightrl.trajectory import Prompt, Trajectory

GROUP_SIZE = 8
MICROBATCH_TOKENS = 16384  # RLModule's default
PADDED_ROWS = (8, 16, 32, 64, 128)  # tried for the padded form
LARGEST_DIFFERENCE = 1e-4  # of the gradients, relative, in float32


def make_experience(prompt_tokens: int, lengths: Sequence[int], vocab_size: int) -> Experience:
    return Experience.from_trajectories(make_trajectories(prompt_tokens, lengths, vocab_size))


def make_trajectories(prompt_tokens: int, lengths: Sequence[int], vocab_size: int) -> list[Trajectory]:
    """Groups of GROUP_SIZE random completions of these lengths; a group has one prompt."""
    generator = random.Random(0)
    trajectories = []
    for row, length in enumerate(lengths):
        group, sample = divmod(row, GROUP_SIZE)
        if sample == 0:
            prompt_ids = [generator.randrange(2, vocab_size) for _ in range(prompt_tokens)]
        completion_ids = [generator.randrange(2, vocab_size) for _ in range(length)]
        trajectories.append(
            Trajectory(
                prompt=Prompt(id=str(group), token_ids=prompt_ids),
                group_id=group,
                sample=sample,
                token_ids=prompt_ids + completion_ids,
                loss_mask=[False] * prompt_tokens + [True] * length,
                behavior_logprobs=[0.0] * (prompt_tokens + length),
                weight_versions=[-1] * prompt_tokens + [0] * length,
                completion_ids=completion_ids,
                completion="",
                reward=generator.gauss(0.0, 1.0),
            )
        )
    return trajectories


def weighted_sum(experience: Experience, logprobs: Tensor) -> Tensor:
    """A loss with a different gradient for every trajectory."""
    return -(logprobs * experience.loss_mask * experience.rewards[:, None]).sum()


def run_padded(model: PreTrainedModel, experience: Experience, rows: int) -> None:
    columns = torch.arange(experience.token_ids.shape[1], device=experience.token_ids.device)
    attention_mask = (columns < experience.lengths[:, None]).long()
    for part in torch.arange(len(experience)).split(rows):
        token_ids = experience.token_ids[part]
        logits = model(input_ids=token_ids, attention_mask=attention_mask[part], use_cache=False).logits[:, :-1]
        logprobs = logits.float().log_softmax(-1).gather(-1, token_ids[:, 1:, None])[..., 0]
        logprobs = torch.nn.functional.pad(logprobs, (1, 0))
        loss = -(logprobs * experience.loss_mask[part] * experience.rewards[part, None]).sum()
        loss.backward()


def run_lightrl(model: SingleModel, experience: Experience, layouts: dict[str, Layout]) -> None:
    model.forms.layouts = layouts

    def loss(part: Experience, outputs: Outputs) -> Tensor:
        return weighted_sum(part, outputs.logprobs)

    model.forward_backward(experience.microbatch_rows(MICROBATCH_TOKENS)[1], loss, lambda value: value.backward())


def timed(model: PreTrainedModel, function: Callable[[], None], cpu_seconds: list[float] | None = None) -> float:
    """Seconds of one forward and backward with new gradients; appends the processor time of all threads."""
    model.zero_grad(set_to_none=True)
    is_cuda = next(model.parameters()).is_cuda
    if is_cuda:
        torch.cuda.synchronize()
    start, cpu_start = time.perf_counter(), time.process_time()
    function()
    if is_cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    if cpu_seconds is not None:
        cpu_seconds.append(time.process_time() - cpu_start)
    return seconds


def gradients(model: PreTrainedModel, function: Callable[[], None]) -> Tensor:
    timed(model, function)
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def measure(report: Report, name: str, workload: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Adds all rows of one model and workload; returns the ratios."""
    model = make_model(name).to(arguments.device)
    count, cap = arguments.groups * GROUP_SIZE, arguments.cap
    prompt_tokens, lengths = (5, [2 + row % 3 for row in range(count)])
    if workload == "skewed":
        prompt_tokens, lengths = (32, skewed_lengths(count, cap))
    experience = make_experience(prompt_tokens, lengths, model.config.vocab_size).to(arguments.device)
    single = SingleModel(model, LogprobSettings(entropy_needs_gradient=False))
    assert single.forms.layouts

    padded = {rows: functools.partial(run_padded, model, experience, rows) for rows in PADDED_ROWS if rows <= count}
    timed(model, padded[min(padded)])
    tried = {rows: min(timed(model, function) for _ in range(2)) for rows, function in padded.items()}
    rows = min(tried, key=lambda rows: tried[rows])
    forms: dict[str, Callable[[], None]] = {
        "padded": padded[rows],
        "rectangles": functools.partial(run_lightrl, single, experience, {}),
        "shared": functools.partial(run_lightrl, single, experience, single.forms.layouts),
    }
    expected = gradients(model, forms["padded"])
    differences: dict[str, float] = {}
    memory: dict[str, dict[str, float]] = {}
    for form, function in forms.items():
        with PeakMemory() as peak:
            actual = gradients(model, function)
        memory[form] = peak.values()
        differences[form] = float((actual - expected).norm() / expected.norm())
        assert differences[form] < LARGEST_DIFFERENCE, f"{form}: gradients differ by {differences[form]:.1e}"
    cpu: dict[str, list[float]] = {form: [] for form in forms}
    runs = {form: functools.partial(timed, model, function, cpu[form]) for form, function in forms.items()}
    seconds = {form: times[1:] for form, times in interleaved(runs, repeats=arguments.repeats + 1).items()}
    num_tokens = int(experience.lengths.sum())
    ratios = {}
    for form, times in seconds.items():
        against: dict[str, float] = {}
        if form != "padded":
            against = median_ratio(seconds["padded"], times)
            against["cpu_ratio"] = median_ratio(cpu["padded"][1:], cpu[form][1:])["ratio"]
        report.add(
            workload,
            model=name,
            form=form,
            tokens=num_tokens,
            padded_tokens=experience.token_ids.numel(),
            rows_per_forward=rows if form == "padded" else None,
            tokens_per_s=round(num_tokens / statistics.median(times), 1),
            seconds=round(statistics.median(times), 4),
            cpu_seconds=round(statistics.median(cpu[form][1:]), 4),
            **against,
            gradient_difference=float(f"{differences[form]:.1e}"),
            **memory[form],
        )
        if against:
            ratios[f"ratio_{name}_{workload}_{form}"] = against["ratio"]
    return ratios


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="1M,27M")
    parser.add_argument("--workloads", default="short,skewed")
    parser.add_argument("--groups", type=int, default=16, help=f"of {GROUP_SIZE} trajectories")
    parser.add_argument("--cap", type=int, default=128, help="longest completion of the skewed workload, in tokens")
    parser.add_argument("--repeats", type=int, default=5, help="measured rounds; one more warms up")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="1M, 2 groups, cap 16, one round")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.models, arguments.groups, arguments.cap, arguments.repeats = "1M", 2, 16, 1
    torch.set_num_threads(arguments.threads)
    report = Report("packing", dtype="float32", threads=arguments.threads, device=arguments.device)
    ratios: dict[str, float] = {}
    for name in arguments.models.split(","):
        for workload in arguments.workloads.split(","):
            ratios |= measure(report, name, workload, arguments)
    report.finish(
        [
            "measurement", "model", "form", "tokens", "padded_tokens", "tokens_per_s", "seconds", "ratio",
            "cpu_ratio", "gradient_difference", "start_rss_mib", "peak_rss_mib",
        ],
        **ratios,
    )  # fmt: skip


if __name__ == "__main__":
    main()
