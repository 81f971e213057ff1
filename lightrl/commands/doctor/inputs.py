"""What `lightrl doctor run` checks of model, tokenizer and data, before a model is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightrl.commands.doctor.completions import first_prompts
from lightrl.commands.doctor.data import SplitReport, read_splits
from lightrl.commands.doctor.findings import Finding, judged, ok
from lightrl.data import ChatRenderer, PromptDataModule
from lightrl.module import RLModule
from lightrl.trajectory import Prompt

MAX_ROWS = 20_000  # of a split: what a minute reads
_SHOWN_CHARS = 60  # of a prompt's end
_SHOWN_PROBLEMS = 3


def model(module: RLModule) -> Iterator[Finding]:
    """Configuration, tokenizer and context of each model that is loaded here."""
    from lightrl.strategies.costs import num_parameters

    for name, role in module.models().items():
        if role.spec.url is not None:
            yield ok("model", f"{name}: served at {role.spec.url}")
            continue
        config = role.spec.load_config()
        text = config.get_text_config()
        context = getattr(text, "max_position_embeddings", None)
        size = f"about {num_parameters(text):,} parameters, " if hasattr(text, "num_hidden_layers") else ""
        where = role.spec.path or "random weights"
        yield ok("model", f"{name}: {config.model_type}, {where}, {size}context {context or 'not stated'}")
    tokenizer, text = module.tokenizer, module.policy_spec.load_config().get_text_config()
    yield judged(
        "tokenizer",
        f"{len(tokenizer)} tokens for {text.vocab_size} embeddings, end token {tokenizer.eos_token!r}",
        "fails",
        "Use the tokenizer that belongs to the model, or a larger vocab_size.",
        is_wrong=len(tokenizer) > text.vocab_size,
    )


def data(module: RLModule, datamodule: Any) -> Iterator[Finding]:
    """Rows, lengths, and what train and validation share."""
    prompts = first_prompts(module, datamodule, 1)
    yield from _template(module, datamodule, prompts)
    if not isinstance(datamodule, PromptDataModule):
        yield ok("data", f"{type(datamodule).__name__} makes its own prompts; those of the trial are checked.")
        return
    reports = read_splits(datamodule, max_rows=MAX_ROWS)
    for report in reports:
        yield _split(report)
    lengths = [length for report in reports for length in report.num_tokens]
    if lengths:
        yield _lengths(max(lengths), module)
    train, validation = reports
    if train.num_repeated:
        fix = "Remove the copies, unless they are meant."
        yield Finding("data", "warning", f"{train.num_repeated} train prompts repeat another one.", fix)
    shared = validation.num_shared(train)
    if shared:
        text = f"{shared} of {len(validation.num_tokens)} validation prompts are train prompts too."
        yield Finding("data", "warning", text, "Remove them: they do not show how the policy does on new prompts.")
    elif validation.num_tokens:
        yield ok("data", "No validation prompt is a train prompt.")


def _template(module: RLModule, datamodule: Any, prompts: list[Prompt]) -> Iterator[Finding]:
    """How the first prompt ends, which is where the policy begins to write."""
    if not prompts:
        return
    end = str(module.tokenizer.decode(prompts[0].token_ids or []))[-_SHOWN_CHARS:]
    template = ChatRenderer(module.tokenizer, chat_template=getattr(datamodule, "chat_template", None)).chat_template
    yield judged(
        "template",
        f"{'The chat template renders' if template else 'Without a chat template'} the first prompt"
        f"{'' if template else ' is plain text'}; the policy continues {end!r}.",
        "warning",
        "Set data.chat_template, unless the model was trained on plain text.",
        is_wrong=template is None and prompts[0].messages is not None,
    )


def _split(report: SplitReport) -> Finding:
    read = f"the first {MAX_ROWS} rows: " if report.is_cut else ""
    problems = "; ".join(report.problems[:_SHOWN_PROBLEMS])
    return judged(
        "data",
        f"{report.name}: {read}{report.counts_text()}" + (f". {problems}" if problems else ""),
        "fails",
        "Fix these rows; lightrl doctor data lists all.",
        is_wrong=bool(report.problems),
    )


def _lengths(longest: int, module: RLModule) -> Finding:
    new, context = module.sampling.max_new_tokens, module.context_tokens
    text = f"The longest prompt has {longest} tokens, and a completion up to {new}"
    if context is None:
        return ok("context", f"{text}; the model states no context length.")
    return judged(
        "context",
        f"{text}: {longest + new} of the context's {context}.",
        "fails",
        "Lower sampling.max_new_tokens, or set data.max_prompt_tokens and prompt_overflow: drop.",
        is_wrong=longest + new > context,
    )
