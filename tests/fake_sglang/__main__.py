"""Starts the fake SGLang server with `tests/` and lightrl on the import path, in place of this folder.

After `--` come SGLang's arguments, of which host, port and the file with the token count; with `--with-model` the model
counts too.
"""

import itertools
import json
import os
import sys
from pathlib import Path

sys.path[:1] = [str(folder) for folder in Path(__file__).resolve().parents[1:3]]

os.environ["OMP_NUM_THREADS"] = "1"

from fake_sglang.server import main  # noqa: E402

words = sys.argv[1:]
if "--" in words:
    words, arguments = words[: words.index("--")], words[words.index("--") + 1 :]
    values = dict(itertools.pairwise(arguments))
    secrets = json.loads(Path(values["--config"]).read_text()) if "--config" in values else {}  # vLLM's is a variable
    os.environ["LIGHTRL_SERVER_TOKEN"] = secrets.get("api-key") or os.environ["VLLM_API_KEY"]
    names = ["--host", "--port", *(["--model-path"] if "--with-model" in words else [])]
    words += [word for name in names for word in (name, values[name])]
main(words)
