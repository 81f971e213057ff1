"""Puts tests/ on the import path, for tiny.py; one thread for each of pytest's workers, which share the cores."""

import torch

torch.set_num_threads(1)
