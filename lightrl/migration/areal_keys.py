"""AReaL's settings, a row for each: what it is in lightrl, or why it has no counterpart.

The names are those of AReaL's `areal/api/cli_args.py` and of its example configurations since August 2025. A `*`
stands for whatever no row names; rows above others come first.
"""

from __future__ import annotations

import fnmatch
from typing import Any

from lightrl.migration.areal_rules import (
    RHYTHMS,
    Outcome,
    Rule,
    activation_checkpointing,
    actor_backend,
    allocation,
    checkpoints,
    clip_bounds,
    completions,
    decoupled,
    dynamic,
    for_critic,
    left,
    max_length,
    nodes,
    normalization,
    old_group_norm,
    only,
    other_reference,
    overlong,
    policy,
    precision,
    recomputed,
    recover_mode,
    reference_kl,
    repeats,
    retries,
    rollout_backend,
    run_folder,
    shaping,
    staleness,
    switch,
    to,
    top_k,
    train_data,
    transport,
    used_by,
    validation_epochs,
    validation_steps,
    wandb,
    warmup,
)

_OWN_SCRIPT = "how processes are placed is in launch: (docs/clusters.md)"
_NO_COPY = "prompts are text: there is nothing to copy to a GPU or to decode"
_WANDB = "set it in the environment (WANDB_ENTITY, WANDB_API_KEY, …), or in WandbLogger's dict_kwargs"

# Type of the data → the module that learns from given completions, without rollouts, and its data module.
SUPERVISED = {
    "sft": ("SFT", "SFTDataModule"),
    "rw": ("RewardModel", "PreferenceDataModule"),
    "dpo": ("DPO", "PreferenceDataModule"),
}
SUPERVISED_ROWS: dict[str, Rule] = {  # where they differ from the others
    "actor.is_critic": only(True, False, else_="the class has the head that it needs"),
    "*.mb_spec.*": left("a batch is one forward and backward: lower batch_size, raise trainer.accumulate_grad_batches"),
    "actor.optimizer.eps": only(1e-8, else_="AdamW's eps is 1e-8; override configure_optimizers"),
    "actor.optimizer.min_lr_ratio": only(0, else_="model.lr_decay ends at 0"),
    "actor.optimizer.warmup_steps_proportion": warmup("model.warmup_steps"),
    "ref.path": other_reference,
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
    "cluster.cluster_name": left(_OWN_SCRIPT),
    "cluster.name_resolve.*": left("lightrl keeps no key-value store; lightrl launch tells each process the addresses"),
    "allocation_mode": allocation,
    "rollout.backend": rollout_backend,
    "actor.backend": actor_backend,
    "seed": to("seed_everything"),
    "async_training": only(True, False, else_="see callbacks.StalenessControl"),
    "enable_offload": only(False, else_="see placement: colocated of SGLangEngine"),
    "server_only": only(False, else_="use lightrl serve"),
    "*workflow": left("a class of AReaL; lightrl's are for model.workflow (docs/write-an-environment.md)"),
    "rollout.openai.*": left("see AgentWorkflow for model.workflow (docs/train-an-agent.md)"),
    "beta": to("model.kl_coef"),
    "loss_type": only("sigmoid", "ipo", else_="DPO and IPO are lightrl's losses for pairs"),
    "*tokenizer_path": repeats("actor.path"),
    "total_train_epochs": to("trainer.max_epochs"),
    "total_train_steps": to("trainer.max_steps"),
    "total_train_n_seqs": left("runs are measured in iterations: set trainer.max_steps"),
    "scheduler.*": left(_OWN_SCRIPT),
    "launcher.*": left(f"{_OWN_SCRIPT}; images are launch.container, shell lines launch.setup"),
    "defaults": left("Hydra composes files; give the composed one"),
    # Rollouts
    "gconfig.n_samples": to("model.group_size"),
    "gconfig.max_new_tokens": to("model.sampling.max_new_tokens"),
    "gconfig.min_new_tokens": to("model.sampling.min_new_tokens"),
    "gconfig.temperature": to("model.sampling.temperature"),
    "gconfig.top_p": to("model.sampling.top_p"),
    "gconfig.top_k": top_k,
    "gconfig.stop_token_ids": to("model.sampling.stop_token_ids"),
    "gconfig.greedy": only(False, else_="a group's completions would be equal"),
    "gconfig.max_tokens": left("a completion is bounded by max_new_tokens and the model's context"),
    "gconfig.frequency_penalty": only(0, else_="tokens are drawn from the policy as it is, so that training is exact"),
    "gconfig.*": left("completions end at stop tokens; see model.sampling"),
    "rollout.max_head_offpolicyness": staleness,
    "rollout.max_concurrent_rollouts": to("callbacks.StalenessControl.max_concurrent"),
    "rollout.consumer_batch_size": repeats("train_dataset.batch_size"),
    "rollout.queue_size": left("max_staleness and max_concurrent bound what waits"),
    "rollout.enable_rollout_tracing": switch("callbacks.Trace", None),
    "rollout.dump_to_file": switch("callbacks.TrajectoryLog.every_n_iterations", 1),
    "rollout.setup_timeout": to("engine.timeouts.startup_s"),
    "rollout.request_timeout": left("another request continues a generation after 15 minutes"),
    "rollout.request_retries": left("a request is repeated at most 8 times"),
    "rollout.schedule_policy": left("SGLangEngine chooses the server of a request"),
    "rollout.check_trajectory_format": left("see docs/test-your-code.md"),
    "rollout.pause_grace_period": left("requests stop at a token and continue in the paused server"),
    # The policy
    "actor.path": policy,
    "actor.init_from_scratch": only(False, else_="give model.policy a config instead of a path"),
    "actor.disable_dropout": only(True, else_="models stay in evaluation mode: engine and trainer must agree"),
    "actor.gradient_checkpointing": activation_checkpointing,
    "actor.dtype": precision,
    "actor.grad_reduce_dtype": only("float32", else_="see FSDP2Strategy"),
    "actor.attn_impl": left("transformers' default; see attn_implementation of ModelSpec"),
    "actor.is_critic": only(False, else_="the policy is a language model"),
    "actor.mb_spec.max_tokens_per_mb": to("model.microbatch_tokens"),
    "actor.mb_spec.*": left("microbatches follow from model.microbatch_tokens"),
    "actor.pad_to_maximum": only(False, else_="microbatches are packed"),
    "actor.use_lora": used_by("actor.path"),
    "actor.lora_*": used_by("actor.path"),
    "actor.target_modules": used_by("actor.path"),
    "actor.peft_type": only("lora", else_="adapters are LoRA"),
    "actor.fsdp.offload_params": only(False, else_="set trainer.strategy.offload_to_cpu of FSDP2Strategy"),
    "actor.optimizer": left("the optimizer is a mapping with lr"),
    "actor.optimizer.type": only("adam", "adamw", else_="the optimizer is AdamW; override configure_optimizers"),
    "actor.optimizer.lr": to("model.lr"),
    "actor.optimizer.weight_decay": to("model.weight_decay"),
    "actor.optimizer.beta1": lambda value, areal: Outcome(
        {"model.betas": [value, areal.get("actor.optimizer.beta2", 0.999)]}
    ),
    "actor.optimizer.beta2": used_by("actor.optimizer.beta1"),
    "actor.optimizer.eps": to("model.eps"),
    "actor.optimizer.lr_scheduler_type": to("model.lr_decay"),
    "actor.optimizer.min_lr_ratio": to("model.min_lr_ratio"),
    "actor.optimizer.warmup_steps_proportion": warmup("model.warmup_iterations", takes_share=True),
    "actor.optimizer.gradient_clipping": to("trainer.gradient_clip_val"),
    "actor.optimizer.offload": only(False, else_="set trainer.strategy.offload_to_cpu of FSDP2Strategy"),
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
    "actor.reward_bias": shaping("bias", 0),
    "actor.reward_scaling": shaping("scaling", 1),
    "actor.reward_clip": shaping("clip", None),
    "actor.kl_ctl": reference_kl,
    "actor.kl_estimator": used_by("actor.kl_ctl"),
    "actor.discount": for_critic("model.gamma"),
    "actor.gae_lambda": for_critic("model.lam"),
    "actor.overlong_reward_penalty": overlong,
    "actor.overlong_*": used_by("actor.overlong_reward_penalty"),
    "actor.mask_no_eos_with_zero": only(False, else_="truncated completions are judged by the reward like others"),
    "actor.dynamic_sampling": dynamic,
    "actor.log_agent_stats*": only(False, [], else_="what a reward returns beside `reward` is logged"),
    "*.scheduling_spec": left(_OWN_SCRIPT),
    "actor.fsdp.*": left("see FSDP2Strategy"),
    "actor.megatron.*": left("see Parallel3DStrategy"),
    "actor.archon.*": left("see Parallel3DStrategy"),
    "ref.path": lambda value, areal: Outcome(),
    "ref.scheduling_strategy.*": left("roles share the trainer's GPUs, or have a mesh: of their own"),
    "critic.path": to("model.critic.model"),
    "critic.is_critic": only(True, else_="a critic gives one number per position"),
    "critic.optimizer.lr": to("model.critic.lr"),
    "critic.optimizer.weight_decay": to("model.critic.weight_decay"),
    "critic.eps_clip": to("model.value_clip"),
    # Servers
    "sglang.model_path": repeats("actor.path"),
    "sglang.enable_multithread_load": only(False, else_="it is AReaL's, not SGLang's"),
    "sglang.enable_fast_load": only(False, else_="it is AReaL's, not SGLang's"),
    "vllm.*": left("lightrl's servers are SGLang's"),
    # Data
    "train_dataset.path": train_data,
    "valid_dataset.path": to("data.validation"),
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
    "*_dataset": only(else_="give it a path"),
    # What is written
    **{f"{section}.freq_{kind}": checkpoints(section, kind) for section in ("saver", "recover") for kind in RHYTHMS},
    "recover.mode": recover_mode,
    "recover.retries": retries,
    "checkpointer.*": left("a run without a ModelCheckpoint saves every 10 minutes (last-timed.ckpt)"),  # 2025-08
    "evaluator.freq_steps": validation_steps,
    "evaluator.freq_epochs": validation_epochs,
    "evaluator.freq_secs": left("validation counts iterations or epochs"),
    "stats_logger.wandb.mode": wandb,
    "stats_logger.wandb.project": used_by("stats_logger.wandb.mode"),
    "stats_logger.wandb.name": used_by("stats_logger.wandb.mode"),
    "stats_logger.wandb.*": left(_WANDB),
    "stats_logger.swanlab.*": only("disabled", else_="use a logger of Lightning, or SwanLab's own for it"),
    "stats_logger.tensorboard.path": to("loggers.TensorBoardLogger.save_dir"),
    "perf_tracer": left("use the callback Trace"),
    "perf_tracer.enabled": switch("callbacks.Trace", None),
    "perf_tracer.save_interval": left("Trace writes while it runs"),
    "perf_tracer.session_tracer.*": only(False, else_="the callbacks Trace and TrajectoryLog show each rollout"),
    "*.experiment_name": repeats("experiment_name"),
    "*.trial_name": repeats("trial_name"),
    "*.fileroot": repeats("cluster.fileroot"),
}  # fmt: skip

# What AReaL takes where a file says nothing and lightrl would take something else, by the section that must be there.
DEFAULTS: dict[str, dict[str, Any]] = {
    "gconfig.": {"gconfig.n_samples": 1, "gconfig.max_new_tokens": 16384},
    "actor.": {"actor.ppo_n_minibatches": 4},
    "actor.optimizer.": {
        "actor.optimizer.lr": 1e-3,
        "actor.optimizer.weight_decay": 0.01,
        "actor.optimizer.beta1": 0.9,
        "actor.optimizer.gradient_clipping": 1.0,
    },
    "ref.": {"actor.kl_ctl": 0.1},
    "critic.": {"actor.gae_lambda": 1.0, "critic.eps_clip": 0.5},
}
SUPERVISED_DEFAULTS = DEFAULTS["actor.optimizer."] | {"actor.optimizer.lr_scheduler_type": "constant"}


# Names of AReaL before August 2025 (AReaL Core) and what they are now; a prefix ends with a dot.
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
    "recover_retries": "recover.retries", "model.": "actor.",  # SFT's section
}  # fmt: skip


def areal_key(key: str) -> str:
    """The name of a setting as the rows have it; the longest of `CORE` that begins it counts."""
    fitting = [old for old in CORE if key == old or (old[-1] in "._" and key.startswith(old))]
    old = max(fitting, key=len, default="")
    return CORE[old] + key.removeprefix(old) if old else key


def rule_of(key: str, *, is_supervised: bool = False) -> Rule | None:
    """The row of a key of AReaL; None if there is none."""
    for pattern, rule in SUPERVISED_ROWS.items() if is_supervised else ():
        if fnmatch.fnmatchcase(key, pattern):
            return rule
    if key in ROWS:
        return ROWS[key]
    if key.startswith("sglang."):
        return to(f"engine.server_args.{key.removeprefix('sglang.')}")
    for section in ("ref", "critic"):
        twin = key.replace(f"{section}.", "actor.", 1)
        if key.startswith(f"{section}.") and rule_of(twin) is not None:
            return repeats(twin)
    return next((rule for pattern, rule in ROWS.items() if fnmatch.fnmatchcase(key, pattern)), None)
