"""EvaluationCommand: evaluates the policy during training with any program that calls an OpenAI API."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lightrl.callbacks.rl_callback import RLCallback
from lightrl.checks.bounds import check_bounds, check_positive, finite_number
from lightrl.concurrency.child_process import ChildProcess, ending_of
from lightrl.models.chat_template import with_stop_tokens
from lightrl.module import RLModule
from lightrl.strategies import ranks_of

if TYPE_CHECKING:
    import lightning as L

    from lightrl.rollout.rl_trainer import RLTrainer
    from lightrl.workflows.agent_workflow import PolicyAccess

log = logging.getLogger(__name__)

MODEL = "policy"  # the model's name in requests
_TICK_S = 0.2
_GRACE_S = 5.0
_SHOWN_CHARS = 2000  # the end of a failed command's output


class EvaluationFailed(Exception):
    """The command failed or wrote no results; the message gives the reason."""


class EvaluationCommand(RLCallback):
    """Runs a command after every n-th iteration, and logs the results that it writes as `eval/<task>/<metric>`.

    The command reaches the policy at an OpenAI URL on 127.0.0.1 (`/completions`, `/chat/completions`, `/models`). It
    gets these environment variables; most can also be placeholders in its arguments:

        OPENAI_BASE_URL {base_url}     OPENAI_API_KEY     LIGHTRL_MODEL {model}     LIGHTRL_RESULTS {results}

    The command writes JSON files into the {results} folder: lm-eval's, or `{"task/metric": number}`. The folder is
    `evaluations/<iteration>` in the run's folder; its `output.log` contains the command's output. If the command fails,
    a warning shows the end of its output, and the run continues.

    All requests from one evaluation use the weight version that the engine has at the end of the iteration: training
    waits until the command exits, so no weights are loaded meanwhile. With `max_staleness` above 0, rollouts continue
    during the wait and share the engine. If the run stops, it terminates the command and its children. A resumed run
    does not repeat the evaluations before its checkpoint.

    Args:
        command: the program and its arguments, for example `[lm-eval, run, --model, local-completions, --model_args,
            "model={model},base_url={base_url}/completions,tokenizer=Qwen/Qwen3-0.6B", --tasks, my_task, --output_path,
            "{results}"]`.
        every_n_iterations: number of iterations between two evaluations.
        timeout_s: the command is terminated after this many seconds.

    Raises:
        ValueError: before the run starts, if the program does not exist or the run has no engine.
    """

    run_folder_output = "evaluations"  # two runs must not write it at the same time

    def __init__(self, command: Sequence[str], *, every_n_iterations: int, timeout_s: float = 3600.0) -> None:
        if isinstance(command, str) or not command:
            raise ValueError(f"command must be a list of a program and its arguments, got {command!r:.80}.")
        check_bounds(1, every_n_iterations=every_n_iterations)
        check_positive(timeout_s=timeout_s)
        self.command = list(command)
        self.every_n_iterations = every_n_iterations
        self.timeout_s = timeout_s

    def before_fit(self, trainer: RLTrainer, module: Any, data: Any) -> None:
        if not isinstance(module, RLModule) or getattr(data, "recorded_groups", None) is not None:
            raise ValueError("EvaluationCommand needs a run with an engine, but this one does not roll out. Remove it.")
        if trainer.is_global_zero and shutil.which(self.command[0]) is None:
            raise ValueError(f"command[0]={self.command[0]!r} must be a program on PATH. Install it, or give its path.")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        if trainer.global_step % self.every_n_iterations:
            return
        root = Path(trainer.log_dir or trainer.default_root_dir)  # log_dir is a collective, so all ranks read it
        ranks, results = ranks_of(trainer.strategy), {}
        with ranks.own_deadline():
            if ranks.is_main:
                results = self._evaluate(cast("RLTrainer", trainer), cast(RLModule, pl_module), root.absolute())
            results = ranks.broadcast_json(results)
        for name, value in results.items():
            pl_module.log(f"eval/{name}", value, on_step=True, on_epoch=False)

    def _evaluate(self, trainer: RLTrainer, module: RLModule, root: Path) -> dict[str, float]:
        """Returns the command's results; if it fails, warns and returns {}."""
        from lightrl.workflows.agent_workflow import serving_policy

        folder = root / "evaluations" / str(trainer.global_step)
        shutil.rmtree(folder, ignore_errors=True)  # left by a run that was killed in this iteration
        folder.mkdir(parents=True)
        output = folder / "output.log"
        started_s, version = time.monotonic(), trainer.rollout.weight_version
        try:
            with serving_policy(_access(trainer, module)) as (base_url, key):
                self._run(trainer, {"base_url": base_url, "model": MODEL, "results": str(folder)}, key, output)
            if trainer.received_sigterm:
                return {}
            results = read_results(folder)
        except (EvaluationFailed, OSError) as error:
            end = output.read_text(errors="replace")[-_SHOWN_CHARS:] if output.exists() else ""
            text = "The evaluation of weight version %d failed; training continues. %s %s ends with:\n%s"
            log.warning(text, version, error, output, end)
            return {}
        seconds = time.monotonic() - started_s
        log.info("Evaluated weight version %d in %.1f s: %s.", version, seconds, _text_of(results))
        return results

    def _run(self, trainer: RLTrainer, values: Mapping[str, str], key: str, output: Path) -> None:
        """Runs the command until it exits, the run is stopped or time is up; leaves none of its processes behind."""
        program, *arguments = self.command
        variables = {"OPENAI_BASE_URL": values["base_url"], "OPENAI_API_KEY": key, "LIGHTRL_MODEL": values["model"]}
        filled = [re.sub(r"\{(\w+)\}", lambda each: values.get(each[1], each[0]), word) for word in arguments]
        environment = {**os.environ, **variables, "LIGHTRL_RESULTS": values["results"]}
        deadline_s = time.monotonic() + self.timeout_s
        with output.open("wb") as file:
            child = ChildProcess([program, *filled], environment=environment, grace_s=_GRACE_S, log=file.fileno())
        try:
            while not child.wait(_TICK_S):
                if trainer.received_sigterm:
                    return
                if time.monotonic() > deadline_s:
                    raise EvaluationFailed(f"{program} did not exit within timeout_s={self.timeout_s:g}.")
        finally:
            code = child.end(_GRACE_S)
        if code != 0:
            raise EvaluationFailed(f"{program} ended with {ending_of(code)}.")


def _access(trainer: RLTrainer, module: RLModule) -> PolicyAccess:
    from lightrl.workflows.agent_workflow import PolicyAccess
    from lightrl.workflows.multi_turn import TurnRenderer

    engine = trainer.rollout.engine
    assert engine is not None, "rank 0 has it"
    renderer = TurnRenderer(module.tokenizer)
    module.complete_template(renderer)
    contexts = [tokens for tokens in (module.context_tokens, engine.max_context) if tokens is not None]
    sampling = with_stop_tokens(module.validation_sampling, module.stop_token_ids())
    return PolicyAccess(engine, renderer, sampling, min(contexts, default=2**31))


def read_results(folder: Path) -> dict[str, float]:
    """Returns the numbers in a folder's JSON files, by `task/metric`.

    lm-eval's metrics are named `acc` or, with a filter, `exact_match_strict-match`; its non-numeric values are omitted.

    Raises:
        EvaluationFailed: if a file has no results, or there is no file.
    """
    numbers: dict[str, float] = {}
    for file in sorted(folder.rglob("*.json")):
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise EvaluationFailed(f"{file} is not JSON: {error}.") from error
        tasks = content.get("results") if isinstance(content, dict) else None
        if isinstance(tasks, dict):  # lm-eval's
            for task, metrics in tasks.items():
                for key, value in metrics.items():
                    metric, comma, name = key.partition(",")
                    if comma and (number := _number(value)) is not None:
                        numbers[f"{task}/{metric}" + ("" if name == "none" else f"_{name}")] = number
        elif isinstance(content, dict) and all(_number(value) is not None for value in content.values()):
            numbers.update({name: float(value) for name, value in content.items()})
        else:
            raise EvaluationFailed(f'{file} must be a JSON object of finite numbers, or have "results" like lm-eval.')
    if not numbers:
        raise EvaluationFailed(f"The command wrote no JSON results to {folder}, its {{results}} folder.")
    return numbers


def _number(value: object) -> float | None:
    return None if isinstance(value, bool) or not isinstance(value, int | float) else finite_number(value)


def _text_of(results: Mapping[str, float]) -> str:
    shown = ", ".join(f"{name} {value:.4g}" for name, value in list(results.items())[:8])
    return shown + ", ..." * (len(results) > 8)
