"""scripts/agents: what counts as installed, and what a record of requests leaves out."""

import os
import select
from pathlib import Path

import pytest
from installed_agents import install, record


def test_a_folder_that_is_half_installed_has_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTRL_AGENTS_CACHE", str(tmp_path))
    folder = install.FOLDER.path()
    program = folder / "node_modules" / "@anthropic-ai" / "claude-code-linux-x64" / "claude"
    program.parent.mkdir(parents=True)
    program.touch()
    assert install.program("claude") is None
    with pytest.raises(FileNotFoundError, match=r"is not installed. Run: python .*install\.py"):
        install.start_command("claude", "http://127.0.0.1:1", "key", tmp_path / "home", "task")
    (folder / install.FOLDER.ready).touch()
    assert install.program("claude") == program
    assert install.program("codex") is None


def test_an_installation_that_hangs_ends_with_a_message(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    os.close(os.open(pipe, os.O_WRONLY))  # from now on it can be read when no writer is left

    def hangs() -> Path:
        install.run(["sh", "-c", f"exec 3> {pipe}; sleep 600 & wait"], timeout_s=0.2)
        return tmp_path

    assert install.FOLDER.main(hangs, only_find=False) == 1
    assert "agents: could not be built: sh -c" in (said := capfd.readouterr().err)
    assert "did not end within 0.2 s. Check the network" in said
    assert select.select([reader], [], [], 60.0)[0] == [reader]  # the child of the command has ended too
    os.close(reader)


def test_each_program_gets_the_endpoint_and_the_key_and_nothing_else_of_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "of this process")
    monkeypatch.setattr(install, "program", lambda name: tmp_path / name)
    for name in ("claude", "codex"):
        arguments, environment = install.start_command(name, "http://127.0.0.1:1", "key", tmp_path / "home", "task")
        assert arguments[0] == str(tmp_path / name)
        assert "task" in arguments
        assert "key" in environment.values()
        assert "SECRET" not in environment
    assert environment["LIGHTRL_API_KEY"] == "key"
    assert 'base_url = "http://127.0.0.1:1/v1"' in (tmp_path / "home" / "config.toml").read_text()


def test_a_record_has_no_folder_id_time_or_system_of_its_machine() -> None:
    body = {
        "id": "msg_18262d83-4188-50b4-a3e0-2d2fd57b6f89",
        "device": "ed" * 32,
        "texts": ["cwd /home/me/work", " - OS Version: Linux 6.1", "started 1795727388854, 2026-11-26", "x" * 500],
        "number": 3,
    }
    assert record.without_names(body, "/home/me") == {
        "id": "msg_00000000-0000-0000-0000-000000000000",
        "device": "0" * 64,
        "texts": ["cwd /sandbox/work", " - OS Version: ", "started 0, 0", "x" * record.MAX_CHARS + "…"],
        "number": 3,
    }
