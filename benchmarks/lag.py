"""Shows which loss still trains at which lag: reward relative to on-policy training, and how early warnings come.

    python -m benchmarks.lag [--run] [--losses TOPR,OAPL] [--staleness 16,64] [--seeds 0,1,...,31]
                             [--iterations 160] [--out benchmarks/lag] [--quick]

Task, reward and settings are those of `benchmarks.algorithms` (the largest of four digits, 16 groups of 16, two
updates), with a smaller policy, so that a run takes seconds of one core. The lag is simulated, and exact: a queue holds
the trajectories of η iterations, so iteration k trains on samples of the weights of iteration max(0, k - η). The rest
is lightrl's code: `score`, `MinibatchLoss`, the module's loss and optimizer, and the warning's rule. On one machine,
runs repeat bit for bit.

The reward is the current policy's, on the trajectories that an iteration puts into the queue. `fraction_of_on_policy`
is the mean reward of the last tenth of the iterations over all seeds, divided by that of GRPO without lag. Rows with
`provoked` use a learning rate so high that some losses collapse: the reward, as a mean over 10 iterations, falls by
`COLLAPSE` below its best. `ess_warning_lead_iterations` is the smallest number of iterations between a run's first
warning and its collapse: null if no run collapsed, negative or "missed" if the warning was late.

A collapse at that learning rate is *provoked*. At the usual rate, a configuration (a loss and a lag) is *healthy* if
none of its runs collapses, and *on the edge* if some do, even if the reward recovers; then a warning is right for every
seed. More seeds can show that a healthy configuration is on the edge, never the opposite.

The rows `warnings` count the collapses that a warning preceded by `LEAD` iterations, and the other runs with a warning.
There are rows for each loss, for all runs, for the seeds before `FIRST_HELD_OUT`, on which the warning's rule was
chosen, and for the seeds from it and from `FIRST_FRESH` on; see docs/algorithms.md.

Rows come from `runs.jsonl` in the output folder. `--run` adds missing runs, 10 s each; remove a line to repeat it.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.algorithms import last_reward, lightrl_seed, make_start, quiet
from benchmarks.report import Report
from lightrl import ImportanceWeights
from lightrl.callbacks.lag_probe import choose_rows, step_k3
from lightrl.callbacks.staleness import FIRST_ITERATIONS, LagWatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.nn import Module

    from lightrl.experience import Experience
    from lightrl.trajectory import Prompt

LR = 5e-4
PROVOKED = 4  # times the learning rate
COLLAPSE = 0.2  # of the reward
LEAD = 10  # iterations that a warning must come before
FIRST_HELD_OUT = 12  # seed
FIRST_FRESH = 16  # seed: warnings in these were not looked at before the rule was fixed
GROUPS = GROUP_SIZE = 16
MAX_NEW_TOKENS = 4
POLICY = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 16}

COLUMNS = ("reward", "ess_fraction", "kl_behavior_nats", "entropy_nats", "grad_norm", "step_k3_nats")

# Class and settings, besides the shared ones.
LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
    "GRPO": ("GRPO", {}),
    "decoupled": ("GRPO", {"decoupled": True}),
    "sequence mask": ("GRPO", {"decoupled": ImportanceWeights(level="product", cap=3.0)}),
    "M2PO": ("M2PO", {}),
    "GSPO": ("GSPO", {}),
    "DPPO": ("DPPO", {}),
    "TOPR": ("TOPR", {}),
    "TOPR with beta2 0.999": ("TOPR", {"betas": (0.9, 0.999)}),
    "OAPL": ("OAPL", {}),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--run", action="store_true", help="first do the runs that the records lack")
    parser.add_argument("--losses", default=",".join(LOSSES), help="names, separated by commas")
    parser.add_argument("--staleness", default="16,64", help="lags in iterations, separated by commas")
    parser.add_argument("--seeds", default=",".join(map(str, range(32))), help="separated by commas")
    parser.add_argument("--iterations", type=int, default=160)
    parser.add_argument("--out", type=Path, help="benchmarks/lag; with --quick runs/lag_quick")
    parser.add_argument("--quick", action="store_true", help="runs one, short; the numbers mean nothing")
    options = parser.parse_args(arguments)
    if options.quick:
        options.losses, options.staleness, options.seeds, options.iterations = "OAPL", "2", "0", 4
    options.out = options.out or Path("runs/lag_quick" if options.quick else "benchmarks/lag")
    losses, staleness, seeds = options.losses.split(","), numbers(options.staleness), numbers(options.seeds)
    unknown = [loss for loss in losses if loss not in LOSSES]
    if unknown:
        parser.error(f"unknown loss {unknown[0]!r}; choose from {', '.join(LOSSES)}")
    report = Report("lag", iterations=options.iterations, trajectories_per_iteration=GROUPS * GROUP_SIZE)
    settings = [("GRPO", 0, LR), *((loss, lag, LR) for lag in staleness for loss in losses)]
    settings += [] if options.quick else [(loss, max(staleness), LR * PROVOKED) for loss in losses]
    records = read_records(options.out / "runs.jsonl")
    if options.run or options.quick:
        make_start(options.out, steps=5 if options.quick else 50, lr=2e-3, **POLICY)
        for seed, setting in itertools.product(seeds, settings):
            loss, lag, lr = setting
            key = (*setting, seed)
            if key not in records:
                records[key] = train(loss, lag, lr, seed, options)
                with (options.out / "runs.jsonl").open("a") as file:
                    file.write(json.dumps(records[key], separators=(",", ":")) + "\n")
    for setting in settings:
        recorded = [seed for seed in seeds if (*setting, seed) in records and ("GRPO", 0, LR, seed) in records]
        if recorded:
            report.add(**row_of(records, *setting, recorded))
    for name, counts in warnings_of([run for run in records.values() if run["seed"] in seeds]).items():
        report.add("warnings", loss=name, **counts)
    report.finish()


def train(loss: str, lag: int, lr: float, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Trains one run in this process and returns its record."""
    import torch

    import lightrl
    from examples.quickstart.task import LargestDigit
    from lightrl.loops.score import score
    from lightrl.loops.update import MinibatchLoss, add_parts, values_of
    from lightrl.strategies import LogprobSettings, SingleModel
    from lightrl.strategies.sharded_experience.placement import minibatches, place_rows

    quiet()
    torch.set_num_threads(1)
    lightrl_seed(seed)
    kind, settings = LOSSES[loss]
    shared: dict[str, Any] = {"reward": len, "group_size": GROUP_SIZE, "num_minibatches": 2, "lr": lr}
    shared["sampling"] = lightrl.Sampling(max_new_tokens=MAX_NEW_TOKENS)
    module = getattr(lightrl, kind)(str(options.out / "start"), **{**shared, **settings})
    module.configure_model()
    model = SingleModel(module.policy, LogprobSettings(entropy_needs_gradient=module.needs_entropy_gradient))
    module.parallel_models["policy"] = model
    optimizer = module.configure_optimizers()
    draw, prompts = random.Random(seed), LargestDigit(GROUPS).make_prompts("train")
    start_s = time.process_time()
    queue = collections.deque(sample(module.policy, draw.sample(prompts, GROUPS), 0) for _ in range(lag))
    record: dict[str, Any] = {"loss": loss, "staleness": lag, "lr": lr, "seed": seed}
    columns: dict[str, list[float]] = {name: [] for name in COLUMNS}
    kept: tuple[Experience, torch.Tensor, torch.Tensor] | None = None  # with logprobs of the engine and of this version
    for iteration in range(options.iterations):
        fresh = sample(module.policy, draw.sample(prompts, GROUPS), iteration)
        queue.append(fresh)
        scored = score(module, queue.popleft())
        experience, ranks = scored.local, scored.ranks
        cut: Any = {"num_minibatches": module.num_minibatches, "seed": 1000 * seed + iteration, "unit": "trajectory"}
        metrics: dict[str, torch.Tensor] = {}
        for rows in minibatches(place_rows(scored, roles=[ranks], ranks=ranks, **cut), epochs=1, seed=0):
            minibatch = experience.select(rows)
            optimizer.zero_grad()
            losses = MinibatchLoss(module, minibatch)
            model.forward_backward(
                minibatch.microbatch_rows(module.microbatch_tokens)[1], losses, torch.Tensor.backward
            )
            norm = torch.nn.utils.clip_grad_norm_(module.policy.parameters(), 1.0)
            optimizer.step()
            add_parts(metrics, {**losses.parts, "grad_norm": torch.stack([norm, torch.ones(())])})
        values = {"reward": float(fresh.rewards.mean()), "step_k3_nats": 0.0, "ess_fraction": 1.0, **values_of(metrics)}
        if kept is not None:
            values["step_k3_nats"] = step_k3(*kept[1:], logprobs_of(module.policy, kept[0]))
        some = experience.select(list(choose_rows(len(experience), int(experience.loss_mask.sum()))))
        kept = (some, some.behavior_logprobs[some.loss_mask], logprobs_of(module.policy, some))
        for name, column in columns.items():
            column.append(float(f"{values[name]:.3g}"))
    return {**record, "cpu_s": round(time.process_time() - start_s, 1), **columns}


def sample(policy: Module, prompts: list[Prompt], version: int) -> Experience:
    """Samples `GROUP_SIZE` trajectories of each prompt; all prompts have the same length."""
    import torch

    from examples.quickstart.task import VOCABULARY
    from lightrl.experience import Experience

    end = VOCABULARY.index("<eos>")
    token_ids = torch.tensor([prompt.token_ids for prompt in prompts]).repeat_interleave(GROUP_SIZE, 0)
    logprobs, mask = torch.zeros(token_ids.shape), torch.zeros(token_ids.shape, dtype=torch.bool)
    is_going = torch.ones(len(token_ids), dtype=torch.bool)
    for _ in range(MAX_NEW_TOKENS):
        with torch.no_grad():  # equal beginnings once
            beginnings, which = torch.unique(token_ids, dim=0, return_inverse=True)
            logits = policy(input_ids=beginnings, use_cache=False).logits[:, -1].float()
        of_all = torch.log_softmax(logits, -1)[which]
        drawn = torch.where(is_going, torch.multinomial(of_all.exp(), 1)[:, 0], 0)
        drawn_logprobs = torch.where(is_going, of_all.gather(1, drawn[:, None])[:, 0], 0.0)
        token_ids = torch.cat([token_ids, drawn[:, None]], 1)
        logprobs = torch.cat([logprobs, drawn_logprobs[:, None]], 1)
        mask = torch.cat([mask, is_going[:, None]], 1)
        is_going = is_going & (drawn != end)
        if not is_going.any():
            break
    width = len(prompts[0].token_ids)
    answers = torch.tensor([prompt.fields["answer_ids"] for prompt in prompts]).repeat_interleave(GROUP_SIZE, 0)
    written = token_ids[:, width : width + 2]
    is_right = (mask.sum(1) == 2) & (written == answers[:, : written.shape[1]]).all(1)
    return Experience(
        token_ids=token_ids,
        loss_mask=mask,
        behavior_logprobs=logprobs,
        weight_versions=torch.where(mask, version, -1),
        rewards=is_right.float(),
        group_ids=torch.arange(len(prompts)).repeat_interleave(GROUP_SIZE),
        is_truncated=is_going,
        lengths=width + mask.sum(1),
    )


def logprobs_of(policy: Module, experience: Experience) -> Tensor:
    """Returns the logprobs of the loss tokens, [N]."""
    import torch

    from lightrl.functional import token_logprobs

    with torch.no_grad():
        logits = policy(input_ids=experience.token_ids, use_cache=False).logits
        return token_logprobs(logits, experience.token_ids)[0][experience.loss_mask]


def row_of(
    records: dict[tuple[Any, ...], dict[str, Any]], loss: str, lag: int, lr: float, seeds: list[int]
) -> dict[str, Any]:
    runs = [records[loss, lag, lr, seed] for seed in seeds]
    rewards = [last_reward(run["reward"]) for run in runs]
    on_policy = [last_reward(records["GRPO", 0, LR, seed]["reward"]) for seed in seeds]
    watches = [watched(run) for run in runs]
    collapses = [(collapse_of(run["reward"]), warning) for run, (warning, _) in zip(runs, watches, strict=True)]
    leads = [None if warning is None else collapse - warning for collapse, warning in collapses if collapse is not None]
    return {
        "measurement": "trained" if lr == LR else "provoked",
        "loss": loss,
        "staleness": lag,
        "lr": lr,
        "seeds": len(seeds),
        "fraction_of_on_policy": round(statistics.mean(rewards) / statistics.mean(on_policy), 3),
        "last_rewards": [round(reward, 3) for reward in rewards],
        "collapsed": len(leads),
        "ess_warning_lead_iterations": "missed" if None in leads else min(leads, default=None),  # type: ignore[type-var]
        "warned_without_collapse": sum(collapse is None and warning is not None for collapse, warning in collapses),
        "lowest_ess_fraction": min((round(min(ess), 2) for _, (ess, _, _) in watches)),
        "highest_kl_nats": max((round(max(kl), 2) for _, (_, kl, _) in watches)),
        "largest_step_by_root_gradient": max((round(max(step), 4) for _, (_, _, step) in watches)),
    }


def collapse_of(rewards: Sequence[float]) -> int | None:
    """Returns the first iteration, from 0, whose mean over the last 10 is `COLLAPSE` below the best so far, or None."""
    means = means_of_10(rewards)
    best = list(itertools.accumulate(means, max))
    return next((index + 9 for index, mean in enumerate(means) if mean < best[index] - COLLAPSE), None)


def means_of_10(values: Sequence[float]) -> list[float]:
    """Returns the mean of each value and the 9 before it, or of all values if there are fewer."""
    return [statistics.fmean(values[max(0, end - 10) : end]) for end in range(min(10, len(values)), len(values) + 1)]


def watched(run: dict[str, Any]) -> tuple[int | None, list[list[float]]]:
    """Returns the iteration, from 0, of StalenessControl's first warning, or None; and the means that it watches.

    The means of sample size, KL and step ÷ √gradient are a list each, with a value for each iteration from the first
    that counts.
    """
    watch, warnings, means = LagWatch(), [], []
    steps = [0.0] * FIRST_ITERATIONS + run.get("step_k3_nats", [])[FIRST_ITERATIONS:]
    columns = (run["ess_fraction"], run["kl_behavior_nats"], steps, run.get("grad_norm", []))
    for index, numbers in enumerate(itertools.zip_longest(*columns, fillvalue=0.0)):
        warnings += [index] if watch.new_problem(*numbers) else []
        means += [watch.means] if watch.means else []
    return min(warnings, default=None), [list(values) for values in zip(*means, strict=True)]


def warnings_of(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Counts, by name of the row, collapses with a warning `LEAD` iterations ahead, and other runs with a warning."""
    outcomes = [(run, collapse_of(run["reward"]), watched(run)[0]) for run in runs]
    usual = [(run["loss"], run["staleness"], collapse) for run, collapse, _ in outcomes if run["lr"] == LR]
    edge = {(loss, lag) for loss, lag, collapse in usual if collapse is not None}

    def counts(is_counted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        leads: dict[str, list[int]] = {"provoked": [], "on the edge": []}
        has_warning: dict[str, list[bool]] = {"provoked": [], "on the edge": [], "healthy": []}
        for run, collapse, warning in outcomes:
            if not is_counted(run):
                continue
            is_edge = (run["loss"], run["staleness"]) in edge
            kind = "provoked" if run["lr"] > LR else "on the edge" if is_edge else "healthy"
            if collapse is None:
                has_warning[kind].append(warning is not None)
            else:
                leads[kind].append(-1 if warning is None else collapse - warning)
        in_time = {kind: [lead for lead in values if lead >= LEAD] for kind, values in leads.items()}
        return {
            "runs": sum(is_counted(run) for run in runs),
            "provoked_collapses": len(leads["provoked"]),
            "warned_in_time": len(in_time["provoked"]),
            "least_lead_iterations": min(in_time["provoked"], default=None),
            "provoked_without_collapse": len(has_warning["provoked"]),
            "of_these_with_a_warning": sum(has_warning["provoked"]),
            "on_the_edge": len(leads["on the edge"]) + len(has_warning["on the edge"]),
            "edge_collapses": len(leads["on the edge"]),
            "edge_warned_in_time": len(in_time["on the edge"]),
            "edge_warned_without_collapse": sum(has_warning["on the edge"]),
            "healthy": len(has_warning["healthy"]),
            "healthy_with_a_warning": sum(has_warning["healthy"]),
        }

    return {
        **{loss: counts(lambda run, loss=loss: run["loss"] == loss) for loss in LOSSES},
        f"seeds before {FIRST_HELD_OUT}": counts(lambda run: run["seed"] < FIRST_HELD_OUT),
        f"seeds {FIRST_HELD_OUT} to {FIRST_FRESH - 1}": counts(lambda run: FIRST_HELD_OUT <= run["seed"] < FIRST_FRESH),
        f"seeds from {FIRST_FRESH} on": counts(lambda run: run["seed"] >= FIRST_FRESH),
        "all": counts(lambda run: True),
    }


def read_records(path: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Returns the records by loss, lag, learning rate and seed."""
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {(one["loss"], one["staleness"], one["lr"], one["seed"]): one for one in records}


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
