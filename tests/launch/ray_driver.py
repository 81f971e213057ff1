"""A launcher on Ray that starts its plan and stays until it ends; a test kills it, or the cluster.

Arguments: its folder, the cluster, its token.
"""

import os
import sys
from pathlib import Path

from test_local import WAITS
from test_ray import plan_of

from lightrl.commands.launch.ray import RayLauncher

folder, address, os.environ["RAY_AUTH_TOKEN"] = sys.argv[1:]
os.environ["RAY_AUTH_MODE"] = "token"
plan = plan_of(Path(folder), {"trainer-0": WAITS, "servers-0": WAITS}, options={"address": address})
launcher = RayLauncher(plan)
launcher.start()
sys.exit(launcher.wait())
