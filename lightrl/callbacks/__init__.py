"""Callbacks: what happens around an iteration. Each is a Lightning callback with added RL hooks.

Reading order:
    rl_callback.py      the hooks, and when each is called
    weight_sync.py      loads the trainer's weights into the engine, with a version; decides which ranks write
      probe.py          after a load, checks that trainer and engine agree on a few sequences, up to rounding
      lag_probe.py      measures how far the policy moves in one version, and in several
      answer_check.py   compares sampled tokens with the trainer under the weights that sampled them
    staleness.py        bounds how many versions a trajectory may be behind
    group_selection.py  drops and replaces groups by their rewards; selects prompts by past success
    rollout_metrics.py  the numbers logged in each iteration; monitors.py finds mistyped metric names
    self_play.py        older versions as opponents of the policy
    expert_balance.py   balances the load of an MoE model's experts
    progress.py         the progress bar and permanent lines; bottleneck.py: the slowest part, and what would change it
    trace/              records what each process did when, and where the time went
    trajectory_log.py   trajectories as JSONL, and periodically as a table; learning_curve.py: reward plots
    run_files.py        the run's README, log lines, state for `lightrl status`, problems, timed checkpoint
    loggers.py          tables, plots, models and settings for the loggers that accept them
    prometheus.py       serves the metrics on a port; run_cost.py: device hours and their price
    export.py           the policy as a Hugging Face folder; evaluation_command.py: programs that evaluate the policy

May import everything up to module and data, but not loops or trainer. To add one, subclass RLCallback and override the
hooks that you need; a test runs it in a real Trainer with FakeEngine.
"""

from lightrl.callbacks.evaluation_command import EvaluationCommand
from lightrl.callbacks.expert_balance import ExpertBalance
from lightrl.callbacks.export import HuggingFaceExport
from lightrl.callbacks.group_selection import DynamicSampling, PromptCurriculum, SuccessRateCurriculum
from lightrl.callbacks.learning_curve import LearningCurve
from lightrl.callbacks.progress import RolloutProgressBar
from lightrl.callbacks.prometheus import PrometheusMetrics
from lightrl.callbacks.rl_callback import RLCallback
from lightrl.callbacks.rollout_metrics import RolloutMetrics
from lightrl.callbacks.run_cost import RunCost
from lightrl.callbacks.staleness import StalenessControl
from lightrl.callbacks.trace import Trace
from lightrl.callbacks.trajectory_log import TrajectoryLog
from lightrl.callbacks.weight_sync import WeightSync

__all__ = ["DynamicSampling", "EvaluationCommand", "ExpertBalance", "HuggingFaceExport", "LearningCurve"]
__all__ += ["PrometheusMetrics", "PromptCurriculum", "RLCallback", "RolloutMetrics", "RolloutProgressBar", "RunCost"]
__all__ += ["StalenessControl", "SuccessRateCurriculum", "Trace", "TrajectoryLog", "WeightSync"]
