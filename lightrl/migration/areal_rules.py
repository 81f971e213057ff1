"""Rules for the settings of AReaL: the same value under our name, something computed from it, or a reason.

Our names are dotted: `model.`, `data.`, `engine.` and `strategy.` stand for the class's init_args, `callbacks.NAME.`
and `loggers.NAME.` for those of a callback or logger.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightrl.launch.settings import Launch, layout_of


@dataclass(frozen=True)
class Outcome:
    """The outcome for one key; without a reason in `left` it is converted, if only to what lightrl does anyway."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""  # how the run differs although the setting is converted
    left: str = ""  # why it has no counterpart


Leaves = Mapping[str, Any]  # AReaL's settings by dotted key
Rule = Callable[[Any, Leaves], Outcome]
_GROUP_OR_BATCH = ("group", "batch")


def to(name: str) -> Rule:
    """The same value under our name; null leaves our default."""
    return lambda value, areal: Outcome() if value is None else Outcome({name: value})


def left(reason: str) -> Rule:
    """No counterpart; null asks for nothing."""
    return lambda value, areal: Outcome() if value is None else Outcome(left=reason)


def only(*values: Any, else_: str) -> Rule:
    """Accepts the value that lightrl always uses; another value has no counterpart."""
    return lambda value, areal: Outcome() if value is None or value in values else Outcome(left=else_)


def repeats(key: str) -> Rule:
    """A key that must say the same as another one."""

    def rule(value: Any, areal: Leaves) -> Outcome:
        if value in (None, "", areal.get(key)):
            return Outcome()
        return Outcome(left=f"lightrl has one setting for this and {key}, which differs")

    return rule


def used_by(key: str) -> Rule:
    """Read by the rule of another key."""
    return lambda value, areal: Outcome() if value is None or key in areal else Outcome(left=f"it needs {key}")


def has_critic(areal: Leaves) -> bool:
    return any(key.startswith("critic.") for key in areal)


def run_folder(value: Any, areal: Leaves) -> Outcome:
    names = [areal.get("cluster.fileroot", "runs"), areal.get("experiment_name"), areal.get("trial_name")]
    return Outcome({"trainer.default_root_dir": "/".join(str(name) for name in names if name)})


def nodes(value: int, areal: Leaves) -> Outcome:
    if value == 1:
        return Outcome({"launch.nodes": 1})
    note = "launch.launcher is slurm, since several hosts need a launcher; torchrun and kubernetes are the others"
    return Outcome({"launch.nodes": value, "launch.launcher": "slurm"}, note)


def allocation(text: str, areal: Leaves) -> Outcome:
    try:
        layout = layout_of(Launch(allocation=text), ranks=1)
    except ValueError as error:
        return Outcome(left=str(error))
    settings: dict[str, Any] = {"launch.allocation": text}
    pp, tp = layout.trainer_pp or 1, layout.trainer_tp or 1
    if pp * tp > 1:
        settings |= {"strategy.class_path": "Parallel3DStrategy", "strategy.pp": pp, "strategy.tp": tp}
    elif layout.ranks > 1:
        settings |= {"strategy.class_path": "FSDP2Strategy"}
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


def activation_checkpointing(value: bool | None, areal: Leaves) -> Outcome:
    if not value:
        return Outcome()
    rules = {"allocation_mode": allocation, "rollout.backend": rollout_backend, "actor.backend": actor_backend}
    if any("strategy.class_path" in rule(areal[key], areal).settings for key, rule in rules.items() if key in areal):
        return Outcome({"strategy.activation_checkpointing": True})
    return Outcome(left="one process recomputes no activations; set trainer.strategy to FSDP2Strategy with it")


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
    if not value or areal.get("actor.use_decoupled_loss"):
        return Outcome()
    return Outcome(left="without the decoupled loss, the clip is centered on the logprobs of the engine")


def normalization(name: str) -> dict[str, Rule]:
    """The rows of `reward_norm` and `adv_norm`: GRPO normalizes once, PPO its advantages over the batch."""
    section = f"actor.{name}"
    is_first = name == "reward_norm"

    def level(setting: str) -> Rule:
        def rule(value: str | None, areal: Leaves) -> Outcome:
            if has_critic(areal):
                if is_first:
                    return left("PPO does not normalize rewards")(value, areal)
                return Outcome({"model.whiten_advantages": True}) if value == "batch" else _no_level(value)
            if not is_first and _has_levels("reward_norm", areal):
                return left("GRPO normalizes once, here as reward_norm says")(value, areal)
            note = "" if is_first else "statistics count each trajectory once, AReaL's count tokens"
            return Outcome({setting: value}, note) if value in (*_GROUP_OR_BATCH, None) else _no_level(value)

        return rule

    def whole(value: None, areal: Leaves) -> Outcome:
        if has_critic(areal):
            return Outcome() if is_first else Outcome({"model.whiten_advantages": False})
        other = "adv_norm" if is_first else "reward_norm"
        if _has_levels(other, areal) or f"actor.{other}" not in areal:
            return Outcome()
        return Outcome({"model.advantage_mean": None, "model.advantage_std": None})

    def leave_one_out(value: bool, areal: Leaves) -> Outcome:
        return (
            to("model.leave_one_out")(value, areal)
            if value and not has_critic(areal)
            else only(False, else_="")(value, areal)
        )

    return {
        section: whole,
        f"{section}.mean_level": level("model.advantage_mean"),
        f"{section}.std_level": level("model.advantage_std"),
        f"{section}.mean_leave1out": leave_one_out,
        f"{section}.std_unbiased": only(True, else_="the variance is divided by n - 1"),
        f"{section}.eps": only(1e-5, else_="1e-5 is added to the deviation"),
        f"{section}.group_size": repeats("gconfig.n_samples"),
    }


def _no_level(value: Any) -> Outcome:
    return Outcome(left=f"{value!r} is no level of this algorithm: see model.advantage_mean and whiten_advantages")


def _has_levels(name: str, areal: Leaves) -> bool:
    return any(areal.get(f"actor.{name}.{key}") is not None for key in ("mean_level", "std_level"))


def old_group_norm(value: bool, areal: Leaves) -> Outcome:
    if value and not has_critic(areal):
        return Outcome({"model.advantage_mean": "group", "model.advantage_std": "group"})
    return Outcome(left="it does not say which statistics are used instead: check model.advantage_mean and _std")


def shaping(name: str, neutral: float | None) -> Rule:
    """Bias, scaling and clip of rewards; without a critic, normalization may undo the first two."""

    def rule(value: float | None, areal: Leaves) -> Outcome:
        if value in (None, neutral):
            return Outcome()
        shaped = Outcome({f"model.reward_shaping.{name}": value})
        if has_critic(areal):
            return shaped
        norm = "reward_norm" if _has_levels("reward_norm", areal) else "adv_norm"
        needed = {"bias": ["mean_level"], "scaling": ["mean_level", "std_level"], "clip": ["-"]}[name]
        if all(areal.get(f"actor.{norm}.{level}") in _GROUP_OR_BATCH for level in needed):
            return Outcome(note="dropped, since subtracting the mean and dividing by the deviation undo it")
        return shaped

    return rule


def reference_kl(value: float, areal: Leaves) -> Outcome:
    if not value or "ref.path" not in areal:
        return Outcome()
    estimator = areal.get("actor.kl_estimator", "k1")
    settings = {"model.reference.coef": value, "model.reference.model": areal["ref.path"]}
    if has_critic(areal):
        return Outcome({**settings, "model.reference.estimator": estimator})
    settings |= {"model.reference.estimator": estimator} if estimator != "k1" else {}
    return Outcome(settings, "the KL term is in the loss, AReaL's is taken off the rewards; k1 becomes k3")


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
    if not value:
        return Outcome()
    note = "groups without variance are replaced by new ones, so that the batch stays full"
    return Outcome({"callbacks.DynamicSampling.drop_zero_variance": True}, note)


def warmup(setting: str, *, takes_share: bool = False) -> Rule:
    def rule(value: float, areal: Leaves) -> Outcome:
        steps = areal.get("total_train_steps")
        if not value:
            return Outcome()
        if steps is None and takes_share:
            return Outcome({setting: value})
        if steps is None:
            return Outcome(left=f"the data decide the number of steps: set {setting} to this share of it")
        return Outcome({setting: round(value * steps)})

    return rule


def staleness(value: int, areal: Leaves) -> Outcome:
    return Outcome({"callbacks.StalenessControl.max_staleness": 0 if areal.get("async_training") is False else value})


def transport(value: str, areal: Leaves) -> Outcome:
    transport = {"disk": "disk", "xccl": "distributed", "nccl": "distributed"}.get(value)
    return Outcome({"engine.transport": transport}) if transport else Outcome(left="see engine.transport for ours")


def top_k(value: int, areal: Leaves) -> Outcome:
    return Outcome() if value < 1 or value >= 10**6 else Outcome({"model.sampling.top_k": value})


def train_data(path: str, areal: Leaves) -> Outcome:
    if path.rstrip("/").endswith("gsm8k"):
        hub = {"data.name": "main"} if path == "openai/gsm8k" else {}
        return Outcome({"data.train": path, "model.reward": "lightrl.rewards.math_answer", **hub})
    note = "AReaL's script has the reward and reads the columns: set model.reward, and data.columns where they differ"
    return Outcome({"data.train": path}, note)


def completions(path: str, areal: Leaves) -> Outcome:
    rl = train_data(path, areal)
    note = rl.note and "AReaL's script reads the columns: set data.prompt_column and those of the completions"
    return Outcome({name: value for name, value in rl.settings.items() if name != "model.reward"}, note)


def other_reference(path: str, areal: Leaves) -> Outcome:
    return Outcome({} if path == areal.get("actor.path") else {"model.reference": path})


def max_length(setting: str) -> Rule:
    return lambda value, areal: Outcome({} if value is None else {setting: value, "data.prompt_overflow": "drop"})


RHYTHMS = {"steps": "every_n_train_steps", "secs": "train_time_interval", "epochs": "every_n_epochs"}


def _rhythm(section: str, areal: Leaves) -> tuple[str | None, Any]:
    """The one of `freq_steps`, `freq_secs` and `freq_epochs` that a callback follows, and its value."""
    given = [(kind, areal.get(f"{section}.freq_{kind}")) for kind in RHYTHMS]
    return next(((kind, value) for kind, value in given if value is not None), (None, None))


def checkpoints(section: str, kind: str) -> Rule:
    def rule(value: int | None, areal: Leaves) -> Outcome:
        is_off = section == "recover" and areal.get("recover.mode", "disabled") in ("disabled", "off")
        if value is None or is_off:
            return Outcome()
        if _rhythm(section, areal)[0] != kind:
            return Outcome(left=f"a ModelCheckpoint has one rhythm, here freq_{_rhythm(section, areal)[0]}")
        if section == "recover" and _rhythm("saver", areal) == (kind, value):
            return Outcome({"callbacks.ModelCheckpoint.save_last": True})
        name = "callbacks.ModelCheckpoint" if section == "saver" else "callbacks.ModelCheckpoint:recover"
        saving = {f"{name}.save_top_k": -1} if section == "saver" else {f"{name}.save_last": True}
        interval = str(datetime.timedelta(seconds=value)) if kind == "secs" else value
        return Outcome({f"{name}.{RHYTHMS[kind]}": interval, **saving})

    return rule


def validation_steps(value: int | None, areal: Leaves) -> Outcome:
    if value is None:
        return Outcome()
    return Outcome({"trainer.val_check_interval": value, "trainer.check_val_every_n_epoch": None})


def validation_epochs(value: int | None, areal: Leaves) -> Outcome:
    if value is not None and areal.get("evaluator.freq_steps") is not None:
        return Outcome(left="validation has one rhythm, here freq_steps")
    return to("trainer.check_val_every_n_epoch")(value, areal)


def recover_mode(value: str, areal: Leaves) -> Outcome:
    is_off = value in ("disabled", "off")
    return Outcome(note="" if is_off else "a run goes on with lightrl fit --config … --ckpt_path last")


def retries(value: int, areal: Leaves) -> Outcome:
    is_off = areal.get("recover.mode", "disabled") in ("disabled", "off")
    return Outcome({} if is_off else {"launch.recover.retries": value})


def wandb(value: str, areal: Leaves) -> Outcome:
    if value == "disabled":
        return Outcome()
    names = {name: areal.get(f"stats_logger.wandb.{name}") for name in ("project", "name")}
    given = {f"loggers.WandbLogger.{name}": text for name, text in names.items() if text is not None}
    return Outcome({"loggers.WandbLogger.offline": value == "offline", **given})


def switch(setting: str, on: Any) -> Rule:
    """A switch that sets `setting` to `on`, and off leaves our default."""
    return lambda value, areal: Outcome({setting: on} if value else {})
