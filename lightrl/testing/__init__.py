"""For tests of your own code: a tiny policy, made-up trajectories, and servers that behave and fail as SGLang does.

Reading order:
    tiny_model.py           tiny_policy, its char_tokenizer, and QUIET, settings of a silent trainer
    trajectories.py         make_trajectory and make_groups, for rewards, losses and callbacks
    fake_server_process.py  FakeServerProcess starts a fake server and ends it
    fake_server.py          speaks SGLang's interface; fake_server_weights.py  its routes for weights
    fake_server_lora.py     its routes for adapters
    fake_server_faults.py   what goes wrong with which requests; fake_server_wrong_loads.py  with weights, in silence
    fake_server_cache.py    which prompts it has seen; fake_server_draft.py  its draft model
    fake_server_script.py, fake_server_model.py  its answers: by rule, or with a LocalEngine
    fake_server_layout.py   the names and shards under which SGLang holds parameters

`lightrl.FakeEngine` needs no server; docs/test-your-code.md shows how to use these. May import: everything up to
engines. Nothing in lightrl imports this room.
"""

from typing import TYPE_CHECKING

from lightrl import loaded_on_first_use

if TYPE_CHECKING:
    from lightrl.testing.fake_server_process import FakeServerProcess
    from lightrl.testing.tiny_model import QUIET, char_tokenizer, tiny_policy
    from lightrl.testing.trajectories import make_groups, make_trajectory

# Loaded on first use: a fake server with a script starts without torch.
_HOMES = {
    "FakeServerProcess": "fake_server_process",
    "QUIET": "tiny_model",
    "char_tokenizer": "tiny_model",
    "make_groups": "trajectories",
    "make_trajectory": "trajectories",
    "tiny_policy": "tiny_model",
}

__all__ = ["QUIET", "FakeServerProcess", "char_tokenizer", "make_groups", "make_trajectory", "tiny_policy"]  # fmt: skip

__getattr__ = loaded_on_first_use(__name__, _HOMES)
