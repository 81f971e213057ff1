"""A trainer that is killed amid a weight sync, and resumed: nothing is trained twice, no server outlives it."""

import os
import sys
import time
from pathlib import Path

import forked
import psutil
import sglang_run
import torch
from tiny_run import are_equal, weights

DEADLINE_S = 600.0  # on a loaded machine


def test_a_trainer_killed_during_a_sync_leaves_no_server_and_continues_as_if_it_had_not_been(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    command = [sys.executable, sglang_run.__file__, str(tmp_path)]
    with forked.Popen(command, env=environment) as trainer:
        deadline = time.monotonic() + DEADLINE_S
        while not (tmp_path / "reached").exists():
            assert trainer.poll() is None, (tmp_path / "output.txt").read_text()
            assert time.monotonic() < deadline, (tmp_path / "output.txt").read_text()
            time.sleep(0.02)
        # The folder of the version is whole, the server is at it.
        while not list(tmp_path.glob(f"lightrl-engine-*/weights/version-{sglang_run.KILLED_AT:08d}")):
            time.sleep(0.01)
        children = psutil.Process(trainer.pid).children(recursive=True)
        assert any("fake_sglang" in " ".join(child.cmdline()) for child in children)
        trainer.kill()
    _, alive = psutil.wait_procs(children, DEADLINE_S)
    assert not alive

    # The update of the version that was under way is lost, and done again from the checkpoint before.
    checkpoint = tmp_path / "last.ckpt"
    assert torch.load(checkpoint)["global_step"] == sglang_run.KILLED_AT - 1
    resumed = sglang_run.fit(tmp_path, checkpoint=checkpoint)
    whole_folder = tmp_path / "whole"
    whole_folder.mkdir()
    whole = sglang_run.fit(whole_folder)
    assert len(whole.trained) == sglang_run.MAX_STEPS
    assert resumed.trained == whole.trained[sglang_run.KILLED_AT - 1 :]
    assert are_equal(weights(resumed), weights(whole))
