"""Ranks that wait for one another in gloo's collectives, of which one stops or is killed: `FOLDER HOW RANK`.

How: `stop in sync`, whose phase has its own deadline; `stop in update`; `kill in update`; `kill in rollout`, where the
others wait for nothing yet; `late in share`, which the rank does not report to the others.
"""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from rank_scripts import fork_runs

from lightrl.callbacks.weight_sync import shared
from lightrl.strategies.ranks import watch as rank_watch
from lightrl.strategies.ranks.processes import ProcessRanks, watch_all
from lightrl.weights import Bucket, SharedFolder

_, folder, how, culprit = sys.argv
SIGNALS = {"stop": signal.SIGSTOP, "kill": signal.SIGKILL}


def play(size: int) -> None:
    rank_watch.POLL_S, rank_watch.GRACE_S = 0.1, 2.0
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    watch = watch_all(group, main_address="127.0.0.1", hang_timeout_s=4)
    ranks = ProcessRanks(dp_group=group, control_group=group, device=torch.device("cpu"), watch=watch)
    ranks.begin()
    signal_name, _, place = how.partition(" in ")
    if place == "share":
        if ranks.rank == int(culprit):
            time.sleep(12)  # its connections stay open until the others' deadline
        else:
            list(shared(iter([Bucket({}, is_last=True)]), SharedFolder(folder, None, [], timeout_s=4.0), ranks))
        return
    for phase in ("rollout", "update", "sync"):
        with ranks.phase(phase, has_own_deadline=phase in ("rollout", "sync")):
            if phase == place:
                if ranks.rank == int(culprit):
                    if ranks.rank == 0:
                        time.sleep(0.3)  # it holds the store: the others have read its phase by then
                    os.kill(os.getpid(), SIGNALS[signal_name])
                elif phase == "rollout":
                    time.sleep(600)
            try:
                ranks.total(torch.ones(1))
            except RuntimeError as error:
                ranks.fail(error)
                raise
    ranks.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(fork_runs([3], play, ends_others=False))
