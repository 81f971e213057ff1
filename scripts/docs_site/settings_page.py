"""Generates the pages of all YAML settings and their defaults from the constructors, which are the configuration.

python scripts/docs_site/settings_page.py    # prints them as Markdown
"""

from __future__ import annotations

import dataclasses
import html
import inspect
import re
from collections.abc import Iterator
from typing import Any

import docstring_parser

import lightrl
from lightrl.algorithms.supervised import SupervisedModule
from lightrl.callbacks.self_play import SelfPlay
from lightrl.commands.launch.settings import Launch, Recover, Resources
from lightrl.data import DataSource
from lightrl.data.completions import CompletionDataModule
from lightrl.data.tasks import Task
from lightrl.engines import ServerEngine, Timeouts
from lightrl.workflows import MultiAgent, OpenEnv

_OTHERS = {
    kind.__name__: kind
    for kind in (
        CompletionDataModule, DataSource, Launch, MultiAgent, OpenEnv, Recover, Resources, SelfPlay, ServerEngine,
        SupervisedModule, Task, Timeouts,
    )
}  # fmt: skip
# file name → the page's title, the YAML section of its classes, and their names
PAGES = {
    "trainer": ("Trainer", "trainer", ["Trainer"]),
    "engines": ("Engines", "trainer.engine", ["LocalEngine", "SGLangEngine", "VLLMEngine", "ServerEngine", "Timeouts"]),
    "strategies": ("Strategies", "trainer.strategy", ["FSDP2Strategy", "Parallel3DStrategy"]),
    "callbacks": ("Callbacks", "trainer.callbacks", [*lightrl._NAMES["callbacks"], "SelfPlay"]),
    "algorithms": (
        "Algorithms", "model", [
            *lightrl._NAMES["algorithms"], "RLModule", "SupervisedModule", "Sampling",
            "ImportanceWeights", "RewardShaping", "OverlongPenalty",
        ],
    ),
    "models": ("Models and roles", "model", ["ModelSpec", "Role", "RoleMesh", "LoRA"]),
    "workflows": ("Workflows", "model.workflow", [*lightrl._NAMES["workflows"], "MultiAgent", "OpenEnv"]),
    "data": ("Data", "data", [*lightrl._NAMES["data"], "CompletionDataModule", "DataSource", "Task"]),
    "launch": ("Launch", "launch", ["Launch", "Recover", "Resources"]),
}  # fmt: skip
_FIELD = re.compile(r"^    (\w+): [^#\n]+  # (.+)$", re.MULTILINE)
_ABOVE = re.compile(r"^    # (.+)\n    (\w+): ", re.MULTILINE)
_NO_DEFAULT = inspect.Parameter.empty


@dataclasses.dataclass
class Setting:
    """A constructor argument, defined by the class itself or by one of its base classes (`home`)."""

    name: str
    kind: str
    default: Any
    text: str
    home: type


def settings_of(cls: type) -> list[Setting]:
    """Returns the class's own settings, then those that it passes on to its base classes in lightrl."""
    settings: dict[str, Setting] = {}
    homes = [home for home in cls.__mro__ if home.__module__.startswith("lightrl.")]
    texts = {name: text for home in reversed(homes) for name, text in _texts(home).items() if text}
    for home in homes:
        if "__init__" not in vars(home):
            continue
        parameters = list(inspect.signature(home.__init__).parameters.values())[1:]
        for parameter in parameters:
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or parameter.name in settings:
                continue
            kind = parameter.annotation if isinstance(parameter.annotation, str) else _name(parameter.annotation)
            default = _default(home, parameter)
            settings[parameter.name] = Setting(parameter.name, kind, default, texts.get(parameter.name, ""), home)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    return list(settings.values())


def pages() -> dict[str, str]:
    """Returns file name without suffix → Markdown."""
    return {file: _page(*page) for file, page in PAGES.items()}


def class_of(name: str) -> type:
    return _OTHERS.get(name) or getattr(lightrl, name)


def with_fields(markdown: str) -> str:
    """Replaces `<!-- fields: Class -->` with a table of the data class's fields and their comments."""

    def table(mark: re.Match[str]) -> str:
        rows = [f"| `{one.name}` | {_cell(one.text)} |" for one in settings_of(getattr(lightrl, mark[1]))]
        return "\n".join(["| field | |", "|---|---|", *rows])

    return re.sub(r"<!-- fields: (\w+) -->", table, markdown)


def _page(title: str, section: str, names: list[str]) -> str:
    lines = [
        f"# Settings: {title}",
        "",
        f"These are in the `{section}:` section of a run's YAML. A class's settings are under `init_args:` next to "
        "its `class_path:`; `lightrl fit --model.help GRPO` prints the same.",
        "",
    ]
    if title == "Trainer":
        lines += [
            "The section also takes every argument of Lightning's Trainer; `trainer.callbacks`, `trainer.logger`, "
            "`optimizer` and `lr_scheduler` take Lightning's and torch's classes.",
            "",
            "| Lightning's, often set | here |",
            "|---|---|",
            "| `max_steps`, `max_epochs`, `max_time` | the length of the run; a step is an iteration |",
            "| `devices`, `num_nodes`, `accelerator` | processes and what they run on; `launch:` sets them too |",
            "| `val_check_interval` | iterations between validations, with `check_val_every_n_epoch: null` |",
            "| `gradient_clip_val` | bound of each update's gradient norm |",
            "| `default_root_dir`, `logger` | where runs and metrics are written |",
            "",
        ]
    for name in names:
        lines += _class_lines(class_of(name), name, names)
    return "\n".join(lines)


def _class_lines(cls: type, name: str, on_page: list[str]) -> Iterator[str]:
    settings = settings_of(cls)
    yield from (f"## {name}", "", _first_sentence(cls), "")
    if not settings:
        yield from ("No settings.", "")
        return
    own = [setting for setting in settings if setting.home is cls]
    inherited = [setting for setting in settings if setting.home is not cls]
    if own:
        yield from ("| setting | type | default | |", "|---|---|---|---|")
        for setting in own:
            default = "required" if setting.default is _NO_DEFAULT else _code(repr(setting.default))
            yield f"| `{setting.name}` | {_code(setting.kind)} | {default} | {_cell(setting.text)} |"
        yield ""
    for home in dict.fromkeys(setting.home for setting in inherited):
        names = ", ".join(f"`{setting.name}`" for setting in inherited if setting.home is home)
        yield from (f"From {_link(home.__name__, on_page)}: {names}.", "")


def _link(name: str, on_page: list[str]) -> str:
    """Returns the class's name, linked to its settings if a page has them."""
    file = next((file for file, (_, _, names) in PAGES.items() if name in names), None)
    if file is None:
        return name
    return f"[{name}]({'' if name in on_page else f'{file}.md'}#{name.lower()})"


def _texts(home: type) -> dict[str, str]:
    """Returns setting → text from the class's `Args:` (a line may name several) or from a data class's comments."""
    described = docstring_parser.parse(inspect.getdoc(home) or "", docstring_parser.DocstringStyle.GOOGLE).params
    texts: dict[str, str] = {}
    if dataclasses.is_dataclass(home):
        source = inspect.getsource(home)
        texts = {name: text for text, name in _ABOVE.findall(source)} | dict(_FIELD.findall(source))
    for one in described:
        texts |= dict.fromkeys(map(str.strip, one.arg_name.split(",")), " ".join((one.description or "").split()))
    return texts


def _default(home: type, parameter: inspect.Parameter) -> Any:
    """Returns the default. Calls a data class's default factory, since `<factory>` would tell a reader nothing."""
    if dataclasses.is_dataclass(home):
        field = next((one for one in dataclasses.fields(home) if one.name == parameter.name), None)
        if field is not None and field.default_factory is not dataclasses.MISSING:
            return field.default_factory()
    return parameter.default


def _first_sentence(cls: type) -> str:
    text = " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split())
    return text if text.endswith((".", ":")) else f"{text}."


def _name(annotation: Any) -> str:
    return re.sub(r"\b(typing|collections\.abc)\.", "", inspect.formatannotation(annotation))


def _code(text: str) -> str:
    """Formats code in a table cell as HTML, since Markdown's code would show the backslash before a bar."""
    return f"<code>{html.escape(_cell(text)).replace(chr(92) + '|', '&#124;')}</code>"


def _cell(text: str) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", text).replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    print("\n".join(pages().values()))
