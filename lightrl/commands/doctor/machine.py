"""Checks of `lightrl doctor run` before a model is loaded: devices, memory, disk, models, tokenizer, data."""

from __future__ import annotations

import os
import platform
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch

import lightrl
from lightrl.checks.disk_errors import nearest_folder
from lightrl.checks.printable import count_text, escape_unprintable
from lightrl.commands.doctor.data import first_prompts, read_split, repeats
from lightrl.commands.plan_run import planned
from lightrl.data import PromptDataModule
from lightrl.launch.memory import UnknownMemory, bytes_text, memory_line, misfits
from lightrl.models import context_tokens
from lightrl.module import RLModule

_MAX_ROWS = 20_000  # a minute reads as many of a split
_LEAST_FREE = 0.1  # with less of the host's memory, the run's start may already fail
_LEAST_DISK_BYTES = 2**30
_SHOWN_CHARS = 60  # the end of a prompt
_SHOWN_PROBLEMS = 3

Verdict = Literal["ok", "warning", "fails"]


@dataclass(frozen=True)
class Finding:
    """One paragraph of the report."""

    area: str  # such as `disk`
    text: str  # what was seen
    verdict: Verdict = "ok"
    fix: str = ""  # what to do about it, unless all is well

    def __str__(self) -> str:
        """Verdict, area and text, and the fix below."""
        width = max(shutil.get_terminal_size((120, 0)).columns, 60)
        start = f"{self.verdict:<8} {self.area:<12} "
        indent = " " * len(start)
        lines = textwrap.wrap(escape_unprintable(self.text), width, initial_indent=start, subsequent_indent=indent)
        fix, under = escape_unprintable(self.fix), f"{indent}     "
        return "\n".join([*lines, *textwrap.wrap(fix, width, initial_indent=f"{indent}fix: ", subsequent_indent=under)])


def judged(area: str, text: str, verdict: Verdict, fix: str, *, is_wrong: bool) -> Finding:
    """Makes a finding with this verdict and fix if something is wrong, otherwise ok."""
    return Finding(area, text, verdict, fix) if is_wrong else Finding(area, text)


def devices(trainer: L.Trainer) -> Iterator[Finding]:
    """Versions, the trainer's devices, and the memory that is free on them and on the host."""
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "lightning", "transformers"))
    yield Finding("environment", f"lightrl {lightrl.__version__}, Python {platform.python_version()}, {versions}")
    kind = trainer.strategy.root_device.type
    used = f"{trainer.world_size} x {kind}, {os.cpu_count()} CPU cores, {torch.get_num_threads()} threads per process"
    num_gpus = torch.cuda.device_count()
    text = f"The trainer uses {used}; this machine has {count_text(num_gpus, 'GPU')}."
    fix = "Set trainer.accelerator to auto or gpu."
    yield judged("devices", text, "warning", fix, is_wrong=num_gpus > 0 and kind == "cpu")
    memories = [("The host", *host_memory(), _LEAST_FREE, "End other processes.")]
    for index in range(num_gpus if kind == "cuda" else 0):
        fix = "Another process uses this GPU: nvidia-smi shows which. End it, or choose other trainer.devices."
        name = f"GPU {index}, {torch.cuda.get_device_name(index)}"
        memories.append((name, *torch.cuda.mem_get_info(index), 0.9, fix))
    for name, free, total, least, fix in memories:
        text = f"{name} has {bytes_text(free)} of {bytes_text(total)} free."
        yield judged("memory", text, "warning", fix, is_wrong=free < least * total)


def memory_on_paper(module: RLModule, trainer: Any, data: Any) -> Iterator[Finding]:
    """Compares the ranks' memory, as `lightrl plan` estimates it, with the GPU's."""
    try:
        run = planned(module, trainer, data)
    except UnknownMemory as error:
        yield Finding("memory", str(error), "warning", "lightrl plan shows the memory where the config can be read.")
        return
    assert run is not None
    yield Finding("memory", memory_line(run))
    if trainer.strategy.root_device.type == "cuda":
        total = torch.cuda.get_device_properties(trainer.strategy.root_device).total_memory
        for misfit in misfits(run, float(total)):
            yield Finding("memory", f"{misfit.text}.", "warning", "lightrl plan shows all of it.")


def host_memory() -> tuple[int, int]:
    """Available and total bytes of the host's memory."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total
    kib = {name: int(value.split()[0]) for name, value in (line.split(":", 1) for line in lines)}
    return kib["MemAvailable"] * 1024, kib["MemTotal"] * 1024


def disk(root: str, needed_bytes: float = 0) -> Finding:
    """Whether the run's folder can be written, and has room for `needed_bytes`."""
    folder = nearest_folder(Path(root))
    if not os.access(folder, os.W_OK):
        fix = "Set trainer.default_root_dir to another folder."
        return Finding("disk", f"{folder} cannot be written.", "fails", fix)
    free = shutil.disk_usage(folder).free
    needs = f"; the run writes about {bytes_text(needed_bytes)}" if needed_bytes else ""
    fix = "Free disk space, set trainer.default_root_dir to another disk, or keep fewer checkpoints (save_top_k)."
    verdict: Any = "fails" if free < needed_bytes else "warning"
    is_wrong = free < max(needed_bytes, _LEAST_DISK_BYTES)
    return judged("disk", f"{folder} has {bytes_text(free)} free{needs}.", verdict, fix, is_wrong=is_wrong)


def models(module: RLModule) -> Iterator[Finding]:
    """Configuration, tokenizer and context of each model that is loaded here."""
    for name, role in module.models().items():
        if role.spec.url is not None:
            yield Finding("model", f"{name}: served at {role.spec.url}")
            continue
        config = role.spec.load_config()
        context = context_tokens(config) or "not stated"
        yield Finding("model", f"{name}: {config.model_type}, {role.spec.path or 'random weights'}, context {context}")
    tokenizer, text = module.tokenizer, module.policy_spec.load_config().get_text_config()
    sizes = f"{len(tokenizer)} tokens for {text.vocab_size} embeddings, end token {tokenizer.eos_token!r}"
    fix = "Use the tokenizer that belongs to the model, or a larger vocab_size."
    yield judged("tokenizer", sizes, "fails", fix, is_wrong=len(tokenizer) > text.vocab_size)


def data(module: RLModule, datamodule: Any) -> Iterator[Finding]:
    """How the first prompt ends, where the policy begins to write; rows, lengths, what train and validation share."""
    for prompt in first_prompts(module, datamodule, 1):
        end = str(module.tokenizer.decode(prompt.token_ids or []))[-_SHOWN_CHARS:]
        is_plain = module.tokenizer.chat_template is None
        how = "Without a chat template the first prompt is plain text" if is_plain else "The chat template renders it"
        fix = "Set data.chat_template, unless the model was trained on plain text."
        is_wrong = is_plain and prompt.messages is not None
        yield judged("template", f"{how}; the policy continues {end!r}.", "warning", fix, is_wrong=is_wrong)
    if not isinstance(datamodule, PromptDataModule):
        yield Finding("data", f"{type(datamodule).__name__} makes its own prompts; those of the trial are checked.")
        return
    reports = [read_split(datamodule, "train", _MAX_ROWS), read_split(datamodule, "validation", _MAX_ROWS)]
    for report in reports:
        read = f"the first {_MAX_ROWS} rows: " if report.is_cut else ""
        problems = "; ".join(["", *report.problems[:_SHOWN_PROBLEMS]])
        text = f"{report.name}: {read}{report.counts_text()}{problems}"
        fix = "Fix these; lightrl doctor data lists all."
        yield judged("data", text, "fails", fix, is_wrong=bool(report.problems))
    for text in repeats(*reports):
        yield Finding("data", f"{text[0].upper()}{text[1:]}.", "warning", "Remove the copies, unless they are meant.")
