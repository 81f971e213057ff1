"""A table with one row for each AReaL setting: its counterpart in lightrl, or why it has none.

The names are those in AReaL's `areal/api/cli_args.py` and in its example configurations since August 2025. The row
with the exact name applies or, if there is none, the first row with a matching pattern (`*`).
"""

from __future__ import annotations

import datetime
import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lightrl.commands.launch import Launch, layout_of
from lightrl.trajectory import JsonMapping, JsonObject

# lightrl's names are dotted: `model.`, `data.`, `engine.` and `strategy.` stand for the init_args of the class,
# `callbacks.NAME.` and `loggers.NAME.` for a callback's or logger's.


@dataclass(frozen=True)
class Outcome:
    """The result for one key: lightrl settings (none if their defaults do the same), or why it has no counterpart."""

    settings: JsonMapping = field(default_factory=dict)
    note: str = ""  # how the run still differs after conversion
    left: str = ""  # why it has no counterpart


Leaves = JsonMapping  # AReaL's settings by their dotted keys
Rule = Callable[[Any, Leaves], Outcome]
_GROUP_OR_BATCH = ("group", "batch")


def to(name: str) -> Rule:
    """Returns a rule that copies the value to lightrl's setting `name`; null keeps the default."""
    return lambda value, areal: Outcome() if value is None else Outcome({name: value})


def left(reason: str) -> Rule:
    """Returns a rule for a key without a counterpart; null does not need one."""
    return lambda value, areal: Outcome() if value is None else Outcome(left=reason)


def only(*values: object, else_: str) -> Rule:
    """Returns a rule that accepts only these values, which lightrl always uses; refuses others with `else_`."""
    return lambda value, areal: Outcome() if value is None or value in values else Outcome(left=else_)


def repeats(key: str, else_: str = "") -> Rule:
    """Returns a rule for a key whose value must equal `key`'s; refuses other values with `else_`."""

    def rule(value: object, areal: Leaves) -> Outcome:
        if value in (None, "", areal.get(key)):
            return Outcome()
        return Outcome(left=else_ or f"lightrl has one setting for this and {key}, but their values differ")

    return rule


def used_by(key: str) -> Rule:
    """Returns a rule for a key that is converted together with another key."""
    return lambda value, areal: Outcome() if value is None or key in areal else Outcome(left=f"it needs {key}")


def has_critic(areal: Leaves) -> bool:
    return any(key.startswith("critic.") for key in areal)


def run_folder(value: object, areal: Leaves) -> Outcome:
    names = [areal.get("cluster.fileroot", "runs"), areal.get("experiment_name"), areal.get("trial_name")]
    return Outcome({"trainer.default_root_dir": "/".join(str(name) for name in names if name)})


def nodes(value: int, areal: Leaves) -> Outcome:
    if value == 1 or areal.get("scheduler.type") in ("slurm", "ray"):
        return Outcome({"launch.nodes": value})
    note = "launch.launcher is slurm, since several hosts need a launcher; or use ray, torchrun or kubernetes"
    return Outcome({"launch.nodes": value, "launch.launcher": "slurm"}, note)


def scheduler(kind: str | None, areal: Leaves) -> Outcome:
    if kind in ("slurm", "ray"):
        return Outcome({"launch.launcher": kind})
    return only("local", else_="launch.launcher must be local, slurm, ray, torchrun or kubernetes")(kind, areal)


def container(image: str | None, kind: object, mount: object) -> JsonObject:
    """Returns the settings that start each process in an image, as AReaL's Slurm launcher does."""
    command = f"apptainer exec --nv{f' --bind {mount}' if mount else ''} {image}"
    return {"launch.container": command} if image and kind != "none" else {}


def image(value: str | None, areal: Leaves) -> Outcome:
    names = ("container_type", "mount")
    settings = container(value, *(areal.get(f"launcher.slurm.{name}") for name in names))
    return Outcome(settings, _IMAGE if settings else "")


def variables(text: str | None, areal: Leaves) -> Outcome:
    def words(value: object) -> set[str]:
        return {word.strip() for word in str(value or "").split(",")} - {""}

    if words(text) - words(areal.get("launcher.trainer_env_vars", text)):
        return Outcome(left="a launch has one environment, which launcher.trainer_env_vars sets")
    pairs = (word.partition("=") for word in sorted(words(text)))
    return Outcome({f"launch.environment.{name}": value for name, _, value in pairs})


def scheduling_spec(value: Any, areal: Leaves) -> Outcome:
    """Converts a section's `scheduling_spec`, a list with a mapping per kind of task; all sections share a launch."""
    first = areal.get("actor.scheduling_spec", value)
    if value not in (None, first):
        return Outcome(left="a launch has one container and environment, which actor.scheduling_spec sets")
    settings: JsonObject = {}
    dropped: set[str] = set()
    for spec in value or []:
        settings |= container(spec.get("image"), spec.get("container_type"), spec.get("mount"))
        settings |= {f"launch.environment.{name}": str(text) for name, text in (spec.get("env_vars") or {}).items()}
        settings |= {"launch.setup": spec["additional_bash_cmds"]} if spec.get("additional_bash_cmds") else {}
        if areal.get("scheduler.type") == "slurm":
            names = ("nodelist", "exclude", "reservation")
            settings |= {f"launch.options.{name}": spec[name] for name in names if spec.get(name)}
        dropped |= {name for name in ("cpu", "mem", "cmd", "srun_additional_args") if spec.get(name)}
    notes = [_IMAGE] if "launch.container" in settings else []
    if dropped:
        notes.append(f"dropped {', '.join(sorted(dropped))}: see launch.options, srun_options and rank_resources")
    return Outcome(settings, "; ".join(notes))


def allocation(text: str, areal: Leaves) -> Outcome:
    try:
        layout = layout_of(Launch(allocation=text), ranks=1)
    except ValueError as error:
        return Outcome(left=str(error))
    settings: JsonObject = {"launch.allocation": text}
    pp, tp = layout.trainer_pp or 1, layout.trainer_tp or 1
    if pp * tp > 1:
        settings |= {"strategy.class_path": "Parallel3DStrategy", "strategy.pp": pp, "strategy.tp": tp}
    elif layout.ranks > 1:
        settings |= {"strategy.class_path": "FSDP2Strategy"}  # the launch adds cp and ep
    if layout.engine == "VLLMEngine":
        settings |= {"engine.class_path": "VLLMEngine"}
    return Outcome(settings)


def rollout_backend(text: str | None, areal: Leaves) -> Outcome:
    trained = areal.get("actor.backend") or ""
    if not text or "allocation_mode" in areal:
        return Outcome()
    return allocation(f"{text}+{trained}" if ":" in trained else text, areal)


def actor_backend(text: str | None, areal: Leaves) -> Outcome:
    if not text or text in ("fsdp", "megatron") or areal.get("allocation_mode") or areal.get("rollout.backend"):
        return Outcome()
    return allocation(text, areal)


def offloaded(key: str, areal: Leaves, settings: JsonMapping) -> list[str]:
    """Returns what is offloaded; nothing for a key that the strategy refuses: parameters with divided experts."""
    ep = layout_of(Launch(allocation=settings["launch.allocation"]), ranks=1).ep
    names = [name for other, name in _OFFLOADS.items() if areal.get(other) and (ep == 1 or name != "parameters")]
    return names if _OFFLOADS[key] in names else []


_STRATEGIES = ("FSDP2Strategy", "Parallel3DStrategy")
_OFFLOADS = {"actor.fsdp.offload_params": "parameters", "actor.optimizer.offload": "optimizer"}


def of_strategy(name: str, value_of: Callable[[Leaves, JsonMapping], object], *kinds: str) -> Rule:
    """Returns a rule: if the key is true, sets a setting of these kinds of strategy to `value_of` AReaL's settings."""
    converters = {"allocation_mode": allocation, "rollout.backend": rollout_backend, "actor.backend": actor_backend}

    def rule(is_set: bool | None, areal: Leaves) -> Outcome:
        if not is_set:
            return Outcome()
        for settings in (convert(areal[key], areal).settings for key, convert in converters.items() if key in areal):
            if settings.get("strategy.class_path") in kinds and (converted := value_of(areal, settings)):
                return Outcome({f"strategy.{name}": converted})
        return Outcome(left=f"the converted run's strategy does not support it: see {name} of {kinds[0]}")

    return rule


def policy(path: str, areal: Leaves) -> Outcome:
    if not areal.get("actor.use_lora"):
        return Outcome({"model.policy": path})
    layers = areal.get("actor.target_modules") or "all-linear"
    lora = {"rank": areal.get("actor.lora_rank", 32), "alpha": areal.get("actor.lora_alpha", 16)}
    lora |= {"target_modules": "all-linear" if layers == ["all-linear"] else layers}
    return Outcome({"model.policy": {"model": path, "lora": lora}})


def precision(value: str, areal: Leaves) -> Outcome:
    if value == "float32":
        return Outcome({"trainer.precision": "32-true"})
    if value == "bfloat16":
        note = "weights stay in float32 and are multiplied in bfloat16; bf16-true keeps bfloat16 weights"
        return Outcome({"trainer.precision": "bf16-mixed"}, note)
    return Outcome(left="lightrl trains in float32 or bfloat16")


def clip_bounds(value: float, areal: Leaves) -> Outcome:
    high = areal.get("actor.eps_clip_higher")
    return Outcome({"model.clip_low": value, "model.clip_high": value if high is None else high})


def decoupled(value: bool, areal: Leaves) -> Outcome:
    cap = areal.get("actor.behav_imp_weight_cap", areal.get("actor.behave_imp_weight_cap"))
    mode = areal.get("actor.behave_imp_weight_mode", "token_mask")
    if not value:
        return Outcome()
    if cap is None or mode == "disabled":
        return Outcome({"model.decoupled": True})
    if mode not in ("token_mask", "token_truncate"):
        return Outcome({"model.decoupled": True}, f"{mode}: set model.decoupled to ImportanceWeights with this bound")
    return Outcome({"model.decoupled": {"cap": cap, "mode": "mask" if mode == "token_mask" else "clamp"}})


def recomputed(value: bool, areal: Leaves) -> Outcome:
    is_same = not value or areal.get("actor.use_decoupled_loss")
    return Outcome(left="" if is_same else "without the decoupled loss, the clip is centered on the engine's logprobs")


def normalization(name: str) -> dict[str, Rule]:
    """Returns the rules for `reward_norm` or `adv_norm`. GRPO normalizes once; PPO whitens a batch's advantages."""
    section = f"actor.{name}"
    is_reward_norm = name == "reward_norm"

    def level(setting: str) -> Rule:
        def rule(value: str | None, areal: Leaves) -> Outcome:
            if has_critic(areal):  # PPO
                if is_reward_norm:
                    return left("PPO does not normalize rewards")(value, areal)
                return Outcome({"model.whiten_advantages": True}) if value == "batch" else _no_level(value)
            if not is_reward_norm and _has_levels("reward_norm", areal):
                return left("GRPO normalizes once, and reward_norm sets how")(value, areal)
            note = "" if is_reward_norm else "statistics count each trajectory once; AReaL's count each token"
            return Outcome({setting: value}, note) if value in (*_GROUP_OR_BATCH, None) else _no_level(value)

        return rule

    def null_section(value: None, areal: Leaves) -> Outcome:
        if has_critic(areal):
            return Outcome() if is_reward_norm else Outcome({"model.whiten_advantages": False})
        other = "adv_norm" if is_reward_norm else "reward_norm"
        if _has_levels(other, areal) or f"actor.{other}" not in areal:
            return Outcome()
        return Outcome({"model.advantage_mean": None, "model.advantage_std": None})

    def leave_one_out(value: bool, areal: Leaves) -> Outcome:
        return (to("model.leave_one_out") if value and not has_critic(areal) else only(False, else_=""))(value, areal)

    return {
        section: null_section,
        f"{section}.mean_level": level("model.advantage_mean"),
        f"{section}.std_level": level("model.advantage_std"),
        f"{section}.mean_leave1out": leave_one_out,
        f"{section}.std_unbiased": only(True, else_="the variance is divided by n - 1"),
        f"{section}.eps": only(1e-5, else_="1e-5 is added to the deviation"),
        f"{section}.group_size": repeats("gconfig.n_samples"),
    }


def _no_level(value: object) -> Outcome:
    return Outcome(left=f"this algorithm has no level {value!r}: see model.advantage_mean and whiten_advantages")


def _has_levels(name: str, areal: Leaves) -> bool:
    return any(areal.get(f"actor.{name}.{key}") is not None for key in ("mean_level", "std_level"))


def old_group_norm(value: bool, areal: Leaves) -> Outcome:
    if value and not has_critic(areal):
        return Outcome({"model.advantage_mean": "group", "model.advantage_std": "group"})
    return Outcome(left="this key does not determine the statistics: check model.advantage_mean and advantage_std")


def shaping(name: str, neutral: float | None, undone_by: Sequence[str] = ()) -> Rule:
    """Returns the rule for a reward's bias, scaling or clip; `neutral` is the value that changes nothing.

    Without a critic, a normalization that sets all levels in `undone_by` undoes the shaping.
    """

    def rule(value: float | None, areal: Leaves) -> Outcome:
        if value in (None, neutral):
            return Outcome()
        norm = "reward_norm" if _has_levels("reward_norm", areal) else "adv_norm"
        levels = [areal.get(f"actor.{norm}.{level}") for level in undone_by]
        if levels and not has_critic(areal) and all(level in _GROUP_OR_BATCH for level in levels):
            return Outcome(note="dropped, since subtracting the mean and dividing by the deviation undo it")
        return Outcome({f"model.reward_shaping.{name}": value})

    return rule


def reference_kl(value: float, areal: Leaves) -> Outcome:
    if not value or "ref.path" not in areal:
        return Outcome()
    estimator = areal.get("actor.kl_estimator", "k1")
    settings = {"model.reference.coef": value, "model.reference.model": areal["ref.path"]}
    if has_critic(areal):
        return Outcome({**settings, "model.reference.estimator": estimator})
    note = "the KL term is part of the loss; AReaL subtracts it from the rewards"
    if estimator == "k1":
        return Outcome(settings, f"{note}; k1 becomes k3, lightrl's default")
    return Outcome({**settings, "model.reference.estimator": estimator}, note)


def for_critic(setting: str) -> Rule:
    def rule(value: float, areal: Leaves) -> Outcome:
        return Outcome({setting: value}) if has_critic(areal) else only(1, else_="only PPO discounts")(value, areal)

    return rule


def overlong(value: bool, areal: Leaves) -> Outcome:
    if not value:
        return Outcome()
    factor = areal.get("actor.overlong_penalty_factor")
    settings = {"model.overlong_penalty.buffer_tokens": areal["actor.overlong_tokens"]}
    return Outcome(settings | ({} if factor is None else {"model.overlong_penalty.factor": factor}))


def dynamic(value: bool, areal: Leaves) -> Outcome:
    note = "groups without variance are replaced with new ones, so the batch stays full"
    return Outcome({"callbacks.DynamicSampling.drop_zero_variance": True}, note) if value else Outcome()


def warmup(setting: str, *, takes_share: bool = False) -> Rule:
    def rule(value: float, areal: Leaves) -> Outcome:
        steps = areal.get("total_train_steps")
        if not value:
            return Outcome()
        if steps is None and takes_share and value < 1:
            return Outcome({setting: value}, f"{setting} below 1 is a fraction of the run, not a number of iterations")
        if steps is None:
            return Outcome(left=f"the data determines the number of steps: set {setting} to this fraction of it")
        return Outcome({setting: round(value * steps)})

    return rule


def min_lr(value: float, areal: Leaves) -> Outcome:
    if value and areal.get("actor.optimizer.lr_scheduler_type") in (None, "constant"):
        return Outcome(note="dropped, since a constant learning rate does not decay")
    return Outcome({"model.min_lr_ratio": value})


def staleness(value: int, areal: Leaves) -> Outcome:
    return Outcome({"callbacks.StalenessControl.max_staleness": 0 if areal.get("async_training") is False else value})


def transport(value: str, areal: Leaves) -> Outcome:
    transport = {"disk": "disk", "xccl": "distributed", "nccl": "distributed"}.get(value)
    return Outcome({"engine.transport": transport}) if transport else Outcome(left="see engine.transport")


def source(path: str) -> str | dict[str, str]:
    return {"source": path, "name": "main"} if path == "openai/gsm8k" else path


def train_data(path: str, areal: Leaves) -> Outcome:
    if path.rstrip("/").endswith("gsm8k"):
        return Outcome({"data.train": source(path), "model.reward": "lightrl.rewards.math_answer"})
    note = "AReaL's script defines the reward and the columns: set model.reward, and `columns` of the DataSource"
    return Outcome({"data.train": source(path)}, note)


def head(value: bool, areal: Leaves) -> Outcome:
    kind = areal.get("train_dataset.type") or ("rw" if value and "beta" not in areal else "sft")
    return only(kind == "rw", else_="only a RewardModel has a scalar head")(value, areal)


def completions(path: str, areal: Leaves) -> Outcome:
    rl = train_data(path, areal)
    note = rl.note and "AReaL's script defines the columns: set data.prompt_column and the completions' columns"
    return Outcome({name: value for name, value in rl.settings.items() if name != "model.reward"}, note)


def max_length(setting: str) -> Rule:
    return lambda value, areal: Outcome({} if value is None else {setting: value, "data.prompt_overflow": "drop"})


INTERVALS = {"steps": "every_n_train_steps", "secs": "train_time_interval", "epochs": "every_n_epochs"}


def _interval(section: str, areal: Leaves) -> tuple[str | None, object]:
    """Returns which of `freq_steps`, `freq_secs` and `freq_epochs` is set, and its value."""
    given = [(kind, areal.get(f"{section}.freq_{kind}")) for kind in INTERVALS]
    return next(((kind, value) for kind, value in given if value is not None), (None, None))


def checkpoints(section: str, kind: str) -> Rule:  # `section`: saver or recover; `kind`: a key of INTERVALS
    def rule(value: int | None, areal: Leaves) -> Outcome:
        is_off = section == "recover" and areal.get("recover.mode", "disabled") in ("disabled", "off")
        if value is None or is_off:
            return Outcome()
        if _interval(section, areal)[0] != kind:
            return Outcome(left=f"a ModelCheckpoint has one interval, which freq_{_interval(section, areal)[0]} sets")
        if section == "recover" and _interval("saver", areal) == (kind, value):
            return Outcome({"callbacks.ModelCheckpoint.save_last": True})  # the saver's callback can do both
        name = "callbacks.ModelCheckpoint" if section == "saver" else "callbacks.ModelCheckpoint:recover"
        saving = {f"{name}.save_top_k": -1} if section == "saver" else {f"{name}.save_last": True}
        interval = str(datetime.timedelta(seconds=value)) if kind == "secs" else value
        return Outcome({f"{name}.{INTERVALS[kind]}": interval, **saving})

    return rule


def validation_steps(value: int | None, areal: Leaves) -> Outcome:
    settings = {"trainer.val_check_interval": value, "trainer.check_val_every_n_epoch": None}
    return Outcome({} if value is None else settings)


def validation_epochs(value: int | None, areal: Leaves) -> Outcome:
    if value is not None and areal.get("evaluator.freq_steps") is not None:
        return Outcome(left="validation has one interval, which freq_steps sets")
    return to("trainer.check_val_every_n_epoch")(value, areal)


def recover_mode(value: str, areal: Leaves) -> Outcome:
    is_off = value in ("disabled", "off")
    command = "launch" if any(key.startswith(_LAUNCHED) for key in areal) else "fit"
    return Outcome(note="" if is_off else f"continue a run with lightrl {command} --config … --ckpt_path last")


def retries(value: int, areal: Leaves) -> Outcome:
    is_off = areal.get("recover.mode", "disabled") in ("disabled", "off")
    return Outcome({} if is_off else {"launch.recover.retries": value})


def wandb(value: str, areal: Leaves) -> Outcome:
    if value == "disabled":
        return Outcome()
    names = {name: areal.get(f"stats_logger.wandb.{name}") for name in ("project", "name")}
    given = {f"loggers.WandbLogger.{name}": text for name, text in names.items() if text is not None}
    return Outcome({"loggers.WandbLogger.offline": value == "offline", **given})


def switch(setting: str, on: object) -> Rule:
    """Returns a rule for a switch: true sets `setting` to `on`, false keeps lightrl's default."""
    return lambda value, areal: Outcome({setting: on} if value else {})


# keys that are converted to lightrl launch settings
_LAUNCHED = ("allocation_mode", "rollout.backend", "actor.backend", "cluster.n_nodes", "scheduler.", "launcher.")
_IMAGE = "the image must contain lightrl; with pyxis or enroot, use launch.srun_options instead"
_ONE_CONTAINER = "a launch has one container, which launcher.slurm.trainer_image sets"
_PLACEMENT = "launch: places the processes (docs/clusters.md)"
_NO_COPY = "prompts are text: there is nothing to copy to a GPU or to decode"
_WANDB = "set it in the environment (WANDB_ENTITY, WANDB_API_KEY, …), or in WandbLogger's dict_kwargs"

# Data type → the module that trains on completions in the data, without rollouts, and its data module.
SUPERVISED = {
    "sft": ("SFT", "SFTDataModule"),
    "rw": ("RewardModel", "PreferenceDataModule"),
    "dpo": ("DPO", "PreferenceDataModule"),
}
SUPERVISED_ROWS: dict[str, Rule] = {  # used instead of the rows in ROWS
    "actor.is_critic": head,
    "*.mb_spec.*": left("a batch is one forward and backward: lower batch_size, raise trainer.accumulate_grad_batches"),
    "actor.optimizer.eps": only(1e-8, else_="AdamW's eps is 1e-8; override configure_optimizers"),
    "actor.optimizer.min_lr_ratio": only(0, else_="model.lr_decay ends at 0"),
    "actor.optimizer.warmup_steps_proportion": warmup("model.warmup_steps"),
    "ref.path": lambda path, areal: Outcome({} if path == areal.get("actor.path") else {"model.reference": path}),
    "train_dataset.path": completions,
    "train_dataset.max_length": max_length("data.max_tokens"),
}

ROWS: dict[str, Rule] = {
    # The run
    "experiment_name": run_folder,
    "trial_name": used_by("experiment_name"),
    "cluster.fileroot": run_folder,
    "cluster.n_nodes": nodes,
    "cluster.n_gpus_per_node": to("launch.gpus_per_node"),
    "cluster.cluster_name": left(_PLACEMENT),
    "cluster.name_resolve.*": left("lightrl has no key-value store; lightrl launch passes addresses to each process"),
    "allocation_mode": allocation,
    "rollout.backend": rollout_backend,
    "actor.backend": actor_backend,
    "seed": to("seed_everything"),
    "async_training": only(True, False, else_="see callbacks.StalenessControl"),
    "enable_offload": only(False, else_="see SGLangEngine's placement: colocated"),
    "server_only": only(False, else_="use lightrl serve"),
    "*workflow": left("an AReaL class; set model.workflow to a lightrl class (docs/write-an-environment.md)"),
    "rollout.openai.*": left("set model.workflow to AgentWorkflow (docs/train-an-agent.md)"),
    "beta": to("model.kl_coef"),
    "loss_type": only("sigmoid", "ipo", else_="lightrl's losses for pairs are DPO and IPO"),
    "*tokenizer_path": repeats("actor.path"),
    "total_train_epochs": to("trainer.max_epochs"),
    "total_train_steps": to("trainer.max_steps"),
    "total_train_n_seqs": left("runs are measured in iterations: set trainer.max_steps"),
    "scheduler.type": scheduler,
    "scheduler.*": left(_PLACEMENT),
    "launcher.slurm.trainer_image": image,
    "launcher.slurm.inference_server_image": repeats("launcher.slurm.trainer_image", _ONE_CONTAINER),
    "launcher.slurm.mount": used_by("launcher.slurm.trainer_image"),
    "launcher.slurm.container_type": used_by("launcher.slurm.trainer_image"),
    "launcher.trainer_env_vars": variables,
    "launcher.inference_server_env_vars": variables,
    "launcher.*": left(f"{_PLACEMENT}; see launch.options, srun_options and setup"),
    "defaults": left("Hydra composes files; convert the composed file"),
    # Rollouts
    "gconfig.n_samples": to("model.group_size"),
    "gconfig.max_new_tokens": to("model.sampling.max_new_tokens"),
    "gconfig.min_new_tokens": to("model.sampling.min_new_tokens"),
    "gconfig.temperature": to("model.sampling.temperature"),
    "gconfig.top_p": to("model.sampling.top_p"),
    "gconfig.top_k": lambda value, areal: Outcome({"model.sampling.top_k": value} if 1 <= value < 10**6 else {}),
    "gconfig.stop_token_ids": to("model.sampling.stop_token_ids"),
    "gconfig.greedy": only(False, else_="a group's completions would be equal"),
    "gconfig.max_tokens": left("a completion is bounded by max_new_tokens and the model's context"),
    "gconfig.frequency_penalty": only(0, else_="training assumes that tokens are sampled from the policy itself"),
    "gconfig.*": left("completions end at stop tokens; see model.sampling"),
    "rollout.max_head_offpolicyness": staleness,
    "rollout.max_concurrent_rollouts": to("callbacks.StalenessControl.max_concurrent"),
    "rollout.consumer_batch_size": repeats("train_dataset.batch_size"),
    "rollout.queue_size": left("max_staleness and max_concurrent bound the queue"),
    "rollout.enable_rollout_tracing": switch("callbacks.Trace", None),
    "rollout.dump_to_file": switch("callbacks.TrajectoryLog.every_n_iterations", 1),
    "rollout.setup_timeout": to("engine.timeouts.startup_s"),
    "rollout.request_timeout": left("after 15 minutes, a new request continues the generation"),
    "rollout.request_retries": left("a request is retried at most 8 times"),
    "rollout.schedule_policy": left("SGLangEngine chooses the server of a request"),
    "rollout.check_trajectory_format": left("see docs/test-your-code.md"),
    "rollout.pause_grace_period": left("a weight load pauses requests, which then continue"),
    # The policy
    "actor.path": policy,
    "actor.init_from_scratch": only(False, else_="give model.policy a config instead of a path"),
    "actor.disable_dropout": only(True, else_="models stay in evaluation mode, so that engine and trainer agree"),
    "actor.gradient_checkpointing": of_strategy("activation_checkpointing", lambda *_: True, *_STRATEGIES),
    "actor.dtype": precision,
    "actor.grad_reduce_dtype": only("float32", else_="see FSDP2Strategy"),
    "actor.attn_impl": left("transformers' default applies; see attn_implementation in ModelSpec"),
    "actor.is_critic": only(False, else_="the policy is a language model"),
    "actor.mb_spec.max_tokens_per_mb": to("model.microbatch_tokens"),
    "actor.mb_spec.*": left("model.microbatch_tokens determines the microbatches"),
    "actor.pad_to_maximum": only(False, else_="microbatches are packed"),
    "actor.use_lora": used_by("actor.path"),
    "actor.lora_*": used_by("actor.path"),
    "actor.target_modules": used_by("actor.path"),
    "actor.peft_type": only("lora", else_="adapters are LoRA"),
    **{key: of_strategy("offload_to_cpu", partial(offloaded, key), "FSDP2Strategy") for key in _OFFLOADS},
    "actor.optimizer": left("the optimizer must be a mapping with lr"),
    "actor.optimizer.type": only("adam", "adamw", else_="the optimizer is AdamW; override configure_optimizers"),
    "actor.optimizer.lr": to("model.lr"),
    "actor.optimizer.weight_decay": to("model.weight_decay"),
    "actor.optimizer.beta1": lambda value, areal: Outcome(
        {"model.betas": [value, areal.get("actor.optimizer.beta2", 0.999)]}
    ),
    "actor.optimizer.beta2": used_by("actor.optimizer.beta1"),
    "actor.optimizer.eps": to("model.eps"),
    "actor.optimizer.lr_scheduler_type": to("model.lr_decay"),
    "actor.optimizer.min_lr_ratio": min_lr,
    "actor.optimizer.warmup_steps_proportion": warmup("model.warmup_iterations", takes_share=True),
    "actor.optimizer.gradient_clipping": to("trainer.gradient_clip_val"),
    "actor.optimizer.*": left("gradients are not scaled: lightrl trains in float32 or bfloat16"),
    "actor.weight_update_mode": transport,
    # The loss
    "actor.group_size": repeats("gconfig.n_samples"),
    "actor.temperature": repeats("gconfig.temperature"),
    "actor.max_new_tokens": repeats("gconfig.max_new_tokens"),
    "actor.ppo_n_minibatches": to("model.num_minibatches"),
    "actor.eps_clip": clip_bounds,
    "actor.eps_clip_higher": used_by("actor.eps_clip"),
    "actor.c_clip": to("model.dual_clip"),
    "actor.importance_sampling_level": to("model.ratio_level"),
    "actor.m2_threshold": left("use class_path: M2PO with second_moment_threshold"),
    "actor.use_decoupled_loss": decoupled,
    "actor.recompute_logprob": recomputed,
    "actor.behav*_imp_weight_*": used_by("actor.use_decoupled_loss"),
    "actor.rejection_sampling*": left("see cap, floor, mode, level and metric of model.decoupled (ImportanceWeights)"),
    **normalization("reward_norm"),
    **normalization("adv_norm"),
    "actor.group_*_norm": old_group_norm,
    "actor.reward_bias": shaping("bias", 0, ["mean_level"]),
    "actor.reward_scaling": shaping("scaling", 1, ["mean_level", "std_level"]),
    "actor.reward_clip": shaping("clip", None),
    "actor.kl_ctl": reference_kl,
    "actor.kl_estimator": used_by("actor.kl_ctl"),
    "actor.discount": for_critic("model.gamma"),
    "actor.gae_lambda": for_critic("model.lam"),
    "actor.overlong_reward_penalty": overlong,
    "actor.overlong_*": used_by("actor.overlong_reward_penalty"),
    "actor.mask_no_eos_with_zero": only(False, else_="truncated completions get a reward like any other"),
    "actor.dynamic_sampling": dynamic,
    "actor.log_agent_stats*": only(False, [], else_="lightrl logs every value that a reward returns"),
    "*.scheduling_spec": scheduling_spec,
    "actor.fsdp.*": left("see FSDP2Strategy"),
    "actor.megatron.*": left("see Parallel3DStrategy"),
    "actor.archon.*": left("see Parallel3DStrategy"),
    "ref.path": lambda value, areal: Outcome(),
    "ref.scheduling_strategy.*": left("roles share the trainer's GPUs, or have a separate mesh"),
    "critic.path": to("model.critic.model"),
    "critic.is_critic": only(True, else_="a critic returns one number per position"),
    "critic.optimizer.lr": to("model.critic.lr"),
    "critic.optimizer.weight_decay": to("model.critic.weight_decay"),
    "critic.eps_clip": to("model.value_clip"),
    # Servers
    "sglang.model_path": repeats("actor.path"),
    "sglang.enable_multithread_load": only(False, else_="AReaL has this option, but SGLang does not"),
    "sglang.enable_fast_load": only(False, else_="AReaL has this option, but SGLang does not"),
    "vllm.*": left("VLLMEngine takes these as its server_args"),
    # Data
    "train_dataset.path": train_data,
    "valid_dataset.path": lambda path, areal: Outcome({"data.validation": source(path)}),
    "train_dataset.batch_size": to("data.batch_size"),
    "valid_dataset.batch_size": to("data.validation_batch_size"),
    "train_dataset.shuffle": to("data.shuffle"),
    "valid_dataset.shuffle": only(False, else_="validation reads prompts in order; the metrics are the same"),
    "train_dataset.max_length": max_length("data.max_prompt_tokens"),
    "valid_dataset.max_length": repeats("train_dataset.max_length"),
    "*_dataset.type": only("rl", *SUPERVISED, else_="lightrl has no data of this type"),
    "*_dataset.drop_last": only(True, else_="an iteration has batch_size prompts"),
    "*_dataset.pin_memory": left(_NO_COPY),
    "*_dataset.num_workers": left(_NO_COPY),
    "*_dataset": only(else_="set its path"),
    # Output
    **{f"{section}.freq_{kind}": checkpoints(section, kind) for section in ("saver", "recover") for kind in INTERVALS},
    "recover.mode": recover_mode,
    "recover.retries": retries,
    "checkpointer.*": left("a run without a ModelCheckpoint saves every 10 minutes (last-timed.ckpt)"),  # 2025-08
    "evaluator.freq_steps": validation_steps,
    "evaluator.freq_epochs": validation_epochs,
    "evaluator.freq_secs": left("validation runs every n iterations or epochs"),
    "stats_logger.wandb.mode": wandb,
    "stats_logger.wandb.project": used_by("stats_logger.wandb.mode"),
    "stats_logger.wandb.name": used_by("stats_logger.wandb.mode"),
    "stats_logger.wandb.*": left(_WANDB),
    "stats_logger.swanlab.*": only("disabled", else_="use a Lightning logger, or SwanLab's own logger for Lightning"),
    "stats_logger.tensorboard.path": to("loggers.TensorBoardLogger.save_dir"),
    "perf_tracer": left("use the callback Trace"),
    "perf_tracer.enabled": switch("callbacks.Trace", None),
    "perf_tracer.save_interval": left("Trace writes while it runs"),
    "perf_tracer.session_tracer.*": only(False, else_="the callbacks Trace and TrajectoryLog show each rollout"),
    "*.experiment_name": repeats("experiment_name"),
    "*.trial_name": repeats("trial_name"),
    "*.fileroot": repeats("cluster.fileroot"),
}  # fmt: skip

# AReaL's defaults that differ from lightrl's, by section; they apply if the file has the section.
DEFAULTS: dict[str, JsonObject] = {
    "gconfig.": {"gconfig.n_samples": 1, "gconfig.max_new_tokens": 16384},
    "actor.": {"actor.ppo_n_minibatches": 4},
    "actor.optimizer.": {
        "actor.optimizer.lr": 1e-3, "actor.optimizer.weight_decay": 0.01, "actor.optimizer.beta1": 0.9,
        "actor.optimizer.gradient_clipping": 1.0,
    },
    "ref.": {"actor.kl_ctl": 0.1},
    "critic.": {"actor.gae_lambda": 1.0, "critic.eps_clip": 0.5},
}  # fmt: skip
SUPERVISED_DEFAULTS = DEFAULTS["actor.optimizer."] | {"actor.optimizer.lr_scheduler_type": "constant"}


# AReaL's names before August 2025 (AReaL Core) and the new names; a prefix ends with a dot or an underscore.
CORE = {
    "n_nodes": "cluster.n_nodes", "n_gpus_per_node": "cluster.n_gpus_per_node", "group_size": "gconfig.n_samples",
    "ppo.gen.n": "gconfig.n_samples", "ppo.gen.": "gconfig.", "ppo.ppo_n_minibatches": "actor.ppo_n_minibatches",
    "ppo.reward_output_scaling": "actor.reward_scaling", "ppo.reward_output_bias": "actor.reward_bias",
    "ppo.max_reward_clip": "actor.reward_clip", "ppo.value_eps_clip": "critic.eps_clip", "ppo.": "actor.",
    "dataset.train_bs_n_seqs": "train_dataset.batch_size", "dataset.max_prompt_len": "train_dataset.max_length",
    "dataset.path": "train_dataset.path", "actor_train.mb_spec.": "actor.mb_spec.", "actor.sglang.": "sglang.",
    "max_head_offpolicyness": "rollout.max_head_offpolicyness", "wandb.": "stats_logger.wandb.",
    "max_concurrent_rollouts": "rollout.max_concurrent_rollouts", "tensorboard.": "stats_logger.tensorboard.",
    "exp_ctrl.total_train_epochs": "total_train_epochs", "exp_ctrl.save_freq_": "saver.freq_",
    "exp_ctrl.eval_freq_": "evaluator.freq_", "exp_ctrl.ckpt_freq_": "recover.freq_", "recover_mode": "recover.mode",
    "recover_retries": "recover.retries", "model.": "actor.",  # the SFT section
}  # fmt: skip


def sglang_argument(name: str) -> Rule:
    """Returns a rule for an SGLang server setting, which a run with vLLM servers does not have."""

    def rule(value: object, areal: Leaves) -> Outcome:
        if any(str(areal.get(key)).startswith("vllm") for key in ("allocation_mode", "rollout.backend")):
            return Outcome(left="the allocation has vLLM servers")
        return to(f"engine.server_args.{name}")(value, areal)

    return rule


def areal_key(key: str) -> str:
    """Returns the current name of a setting; the longest matching prefix in `CORE` applies."""
    fitting = [old for old in CORE if key == old or (old[-1] in "._" and key.startswith(old))]
    old = max(fitting, key=len, default="")
    return CORE[old] + key.removeprefix(old) if old else key


def rule_of(key: str, *, is_supervised: bool = False) -> Rule | None:
    """Returns the rule for an AReaL key; None if there is none."""
    for pattern, rule in SUPERVISED_ROWS.items() if is_supervised else ():
        if fnmatch.fnmatchcase(key, pattern):
            return rule
    if key in ROWS:
        return ROWS[key]
    if key.startswith("sglang."):
        return sglang_argument(key.removeprefix("sglang."))
    for section in ("ref", "critic"):
        twin = key.replace(f"{section}.", "actor.", 1)
        if key.startswith(f"{section}.") and rule_of(twin) is not None:
            return repeats(twin)
    return next((rule for pattern, rule in ROWS.items() if fnmatch.fnmatchcase(key, pattern)), None)
