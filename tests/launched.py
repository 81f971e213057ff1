"""Settings of a run that takes a second, and of an engine with fake servers, for tests of the command and of launches.

Their modules are in tests/commands: tiny_task.py, tiny_rewards.py.
"""

from pathlib import Path
from typing import Any

from fake_sglang import python_of_fakes

_CONFIG = {"model_type": "llama", "vocab_size": 12, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
_CONFIG |= {"num_attention_heads": 2, "max_position_embeddings": 32}


def run_settings() -> dict[str, Any]:
    """A run that is complete; a test changes what it is about."""
    return {
        "model": {
            "class_path": "GRPO",
            "init_args": {
                "policy": {"config": dict(_CONFIG), "tokenizer": "tiny_task.tokenizer"},
                "reward": "tiny_rewards.exact",
                "group_size": 2,
                "sampling": {"max_new_tokens": 2},
            },
        },
        "data": {"class_path": "tiny_task.Digits"},
        "trainer": {
            "max_steps": 2,
            "log_every_n_steps": 1,
            "accelerator": "cpu",
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "callbacks": [{"class_path": "StalenessControl", "init_args": {"max_staleness": 1}}],
        },
    }


def engine(folder: Path, **settings: Any) -> dict[str, Any]:
    """An SGLangEngine whose servers are fake, with the run's model."""
    program = python_of_fakes(folder, "--with-model")
    return {"class_path": "SGLangEngine", "init_args": {"sglang_python": program, **settings}}
