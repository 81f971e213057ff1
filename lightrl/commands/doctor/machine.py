"""What `lightrl doctor run` checks before a model is loaded: devices, memory, ports, disk, models, tokenizer, data."""

from __future__ import annotations

import os
import platform
import shutil
import socket
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import lightning as L
import torch

import lightrl
from lightrl.commands.doctor.data import first_prompts, read_splits
from lightrl.commands.doctor.findings import Finding, judged
from lightrl.commands.plan_run import planned
from lightrl.data import PromptDataModule
from lightrl.engines import SGLangEngine
from lightrl.launch.memory import UnknownMemory, bytes_text, memory_line, misfits
from lightrl.module import RLModule
from lightrl.strategies.costs import num_parameters

MAX_ROWS = 20_000  # of a split: what a minute reads
_CONNECT_S = 2.0
_LEAST_FREE = 0.1  # of the host's memory: less, and the run's start may already fail
_LEAST_DISK_BYTES = 2**30
_SHOWN_CHARS = 60  # of a prompt's end
_SHOWN_PROBLEMS = 3


def devices(trainer: L.Trainer) -> Iterator[Finding]:
    """Versions, the trainer's devices, and the memory that is free on them and on the host."""
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "lightning", "transformers"))
    yield Finding("environment", f"lightrl {lightrl.__version__}, Python {platform.python_version()}, {versions}")
    kind = trainer.strategy.root_device.type
    used = f"{trainer.world_size} x {kind}, {os.cpu_count()} CPU cores, {torch.get_num_threads()} threads per process"
    num_gpus = torch.cuda.device_count()
    text = f"The trainer uses {used}; this machine has {num_gpus} GPUs."
    fix = "Set trainer.accelerator to auto or gpu."
    yield judged("devices", text, "warning", fix, is_wrong=num_gpus > 0 and kind == "cpu")
    for index in range(num_gpus if kind == "cuda" else 0):
        free, total = torch.cuda.mem_get_info(index)
        name = f"GPU {index}, {torch.cuda.get_device_name(index)}"
        fix = "Another process uses this GPU: nvidia-smi shows which. End it, or choose other trainer.devices."
        yield _free(name, free, total, fix, least=0.9)
    yield _free("The host", *host_memory(), "End other processes.", least=_LEAST_FREE)


def _free(name: str, free: int, total: int, fix: str, *, least: float) -> Finding:
    text = f"{name} has {bytes_text(free)} of {bytes_text(total)} free."
    return judged("memory", text, "warning", fix, is_wrong=free < least * total)


def memory_on_paper(module: RLModule, trainer: Any, data: Any) -> Iterator[Finding]:
    """What `lightrl plan` says of the ranks' memory, and what of it the GPU does not have."""
    try:
        run = planned(module, trainer, data)
    except UnknownMemory as error:
        yield Finding("memory", str(error), "warning", "lightrl plan shows the memory where the config can be read.")
        return
    assert run is not None
    yield Finding("memory", memory_line(run))
    if trainer.strategy.root_device.type == "cuda":
        total = torch.cuda.get_device_properties(trainer.strategy.root_device).total_memory
        for found in misfits(run, float(total)):
            yield Finding("memory", f"{found.text}.", "warning", "lightrl plan shows all of it.")


def host_memory() -> tuple[int, int]:
    """Available and total bytes of the host's memory."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total
    kib = {name: int(value.split()[0]) for name, value in (line.split(":", 1) for line in lines)}
    return kib["MemAvailable"] * 1024, kib["MemTotal"] * 1024


def ports(engine: Any, port: int | None) -> Iterator[Finding]:
    """Whether servers that run already answer, and the trainer's port is free.

    Args:
        engine: the run's.
        port: that the ranks meet at; None if the run chooses one.
    """
    urls: Sequence[str] = engine.urls or () if isinstance(engine, SGLangEngine) else ()
    for url in urls:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https"):
            continue
        address = (str(parts.hostname), parts.port or (443 if parts.scheme == "https" else 80))
        try:
            socket.create_connection(address, timeout=_CONNECT_S).close()
            yield Finding("ports", f"The server {url} can be reached.")
        except OSError as error:
            fix = "Start the server (lightrl serve), or correct engine.urls."
            yield Finding("ports", f"The server {url} cannot be reached: {error}.", "fails", fix)
    try:
        with socket.create_server(("" if port else "127.0.0.1", port or 0)) as server:
            yield Finding("ports", f"Port {server.getsockname()[1]}, where ranks can meet, is free.")
    except OSError as error:
        fix = "End the process that listens there (ss -ltnp shows it), or set another MASTER_PORT or launch.port."
        yield Finding("ports", f"Port {port}, where the ranks meet, cannot be opened: {error}.", "fails", fix)


def disk(root: str, needed_bytes: float = 0) -> Finding:
    """Whether the run's folder can be written, and has room for `needed_bytes`."""
    folder = Path(root).absolute()
    while not folder.exists():
        folder = folder.parent
    if not os.access(folder, os.W_OK):
        return Finding(
            "disk", f"{folder} cannot be written.", "fails", "Set trainer.default_root_dir to another folder."
        )
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
        text = config.get_text_config()
        context = getattr(text, "max_position_embeddings", None) or "not stated"
        size = f"about {num_parameters(text):,} parameters, " if hasattr(text, "num_hidden_layers") else ""
        where = role.spec.path or "random weights"
        yield Finding("model", f"{name}: {config.model_type}, {where}, {size}context {context}")
    tokenizer, text = module.tokenizer, module.policy_spec.load_config().get_text_config()
    said = f"{len(tokenizer)} tokens for {text.vocab_size} embeddings, end token {tokenizer.eos_token!r}"
    fix = "Use the tokenizer that belongs to the model, or a larger vocab_size."
    yield judged("tokenizer", said, "fails", fix, is_wrong=len(tokenizer) > text.vocab_size)


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
    train, validation = reports = read_splits(datamodule, max_rows=MAX_ROWS)
    for report in reports:
        read = f"the first {MAX_ROWS} rows: " if report.is_cut else ""
        problems = "; ".join(["", *report.problems[:_SHOWN_PROBLEMS]])
        text, fix = (
            f"{report.name}: {read}{report.counts_text()}{problems}",
            "Fix these; lightrl doctor data lists all.",
        )
        yield judged("data", text, "fails", fix, is_wrong=bool(report.problems))
    if longest := max((length for report in reports for length in report.num_tokens), default=0):
        new, context = module.sampling.max_new_tokens, module.context_tokens
        text = (
            f"The longest prompt has {longest} tokens and a completion up to {new}: {longest + new} of the context's "
        )
        fix = "Lower sampling.max_new_tokens, or set data.max_prompt_tokens and prompt_overflow: drop."
        is_wrong = context is not None and longest + new > context
        yield judged("context", f"{text}{context or '(not stated)'}.", "fails", fix, is_wrong=is_wrong)
    if train.num_repeated:
        fix = "Remove the copies, unless they are meant."
        yield Finding("data", f"{train.num_repeated} train prompts repeat another one.", "warning", fix)
    if validation.num_tokens:
        text = (
            f"{validation.num_shared(train)} of {len(validation.num_tokens)} validation prompts are train prompts too."
        )
        fix = "Remove them: they do not show how the policy does on new prompts."
        yield judged("data", text, "warning", fix, is_wrong=validation.num_shared(train) > 0)
