import copy
import os
from pathlib import Path

import pytest
import yaml

POLICY = {
    "config": {
        "model_type": "llama",
        "vocab_size": 12,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 32,
    },
    "tokenizer": "tiny_task.tokenizer",
}


@pytest.fixture
def settings():
    """A run that is complete and takes a second; a test changes what it is about."""
    return {
        "model": {
            "class_path": "GRPO",
            "init_args": {
                "policy": copy.deepcopy(POLICY),
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


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Writes settings to a file in the working folder, which is empty else, and gives its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning's, as the command sets it
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # so that what a test seeds is undone with it

    def write(settings, name="run.yaml"):
        Path(name).write_text(yaml.safe_dump(settings))
        return name

    return write
