"""The README: its module trains, its commands exist, its files are there."""

import os
import re
import sys
from pathlib import Path

import forked

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_module_in_the_readme_has_at_most_30_lines_and_trains(tmp_path):
    (code,) = re.findall(r"<!-- test: grpo -->\n```python\n(.*?)```", README, re.DOTALL)
    module = code[code.index("class MyGRPO") : code.index('if __name__ == "__main__"')].strip()
    assert len(module.splitlines()) <= 30
    script = tmp_path / "my_module.py"
    script.write_text(code)
    settings = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(ROOT)}}
    run = forked.run([sys.executable, str(script)], capture_output=True, text=True, children_fork=True, **settings)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "`max_steps=2` reached" in run.stdout + run.stderr


def test_every_file_and_test_that_the_readme_and_the_guides_name_is_there():
    text = "".join(page.read_text() for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
    named = r"(?<![\w/.-])((?:examples|benchmarks|docs|tests|lightrl|scripts)/[\w/.-]+\.(?:md|py|yaml|sh))(?:::(\w+))?"
    names = set(re.findall(named, text))
    assert len(names) > 20
    assert not [name for name, _ in names if not (ROOT / name).exists()]
    assert not [test for name, test in names if test and f"def {test}(" not in (ROOT / name).read_text()]


def test_example_configs_are_at_most_40_lines():
    num_lines = {config: len(config.read_text().splitlines()) for config in (ROOT / "examples").rglob("*.yaml")}
    assert num_lines
    assert not [config for config, num in num_lines.items() if num > 40]
