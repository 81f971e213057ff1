"""Models: roles, how their models are loaded and saved, and what a strategy can do with a model.

Reading order:
    role.py           Role: a model in a run, how it is trained and on which ranks (RoleMesh); loads and checks it
    model_spec.py     ModelSpec: the source of a role's model and tokenizer
    parallel_model.py Outputs, and ParallelModel, which each strategy implements
    conversion.py     converts names and layouts between checkpoints or servers and a model's modules
    tuning.py         the weights that training changes: all, or adapters (lora.py) on a frozen base (quantized.py)
    moe.py            MoE blocks and their routers; expert_parallel.py: experts divided over ranks
    routes.py         records the experts that the engine chose for each token, and replays them
    images.py         images in prompts, and the models that read them
    hybrids.py        models with convolution or recurrent layers besides attention
    model_folder.py   Hugging Face model folders, written completely or not at all
    optimizer.py      parameter groups by role, and the learning-rate schedule; muon.py and bf16_adamw.py: optimizers
    precision.py      modules that stay float32 in bfloat16 models; warns when updates are lost to rounding
    trials.py         runs a trial of an empty model once per configuration
    chat_template.py  renders chats, reads what the policy generated, and lists stop tokens

May import: errors, checks, trajectory, experience, functional, weights. Another model family
needs no code here: transformers loads it. strategies/parallel_3d/tensor_plans.py decides which families can be split.
"""

from lightrl.models.images import Attachments, auto_model, forward_inputs, keep_shown, new_model, vision_kind
from lightrl.models.lora import LoRA
from lightrl.models.model_spec import (
    CONTEXT,
    LONGROPE_LENGTH,
    ModelSpec,
    context_tokens,
    is_silent,
    scalar_head,
    untrained_reward_model,
)
from lightrl.models.parallel_model import Backward, Candidates, LossFunction, Metric, Outputs, ParallelModel
from lightrl.models.role import Role, RoleMesh, models_made_by
from lightrl.models.routes import check_compiled, recompute_contexts, wrap_blocks

__all__ = ["LoRA"]
__all__ += ["CONTEXT", "LONGROPE_LENGTH", "ModelSpec", "context_tokens", "is_silent", "scalar_head"]
__all__ += ["Attachments", "auto_model", "forward_inputs", "keep_shown", "new_model", "untrained_reward_model"]
__all__ += ["vision_kind"]
__all__ += ["Backward", "Candidates", "LossFunction", "Metric", "Outputs", "ParallelModel"]
__all__ += ["Role", "RoleMesh", "check_compiled", "models_made_by", "recompute_contexts", "wrap_blocks"]
