"""Puts tests/ on the import path, for tiny.py; one thread for each of pytest's workers, which share the cores.

Agents' clients obey `http_proxy`, which would look for the tests' servers on the proxy's machine; within a Slurm
job Lightning would expect the job's tasks.
"""

import os

import pytest
import torch

torch.set_num_threads(1)
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost"
for name in [name for name in os.environ if name.startswith("SLURM_")]:
    del os.environ[name]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Skipped tests with a real SGLang are easily overlooked among dots."""
    texts = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])]
    found = [text[text.index("SGLang for this") :].rstrip("')\"") for text in texts if "SGLang for this" in text]
    if found:
        terminalreporter.write_line(f"!! {len(found)} tests with a real server were SKIPPED. {found[0]}", yellow=True)
