import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.gsm8k.make_model import main


def make_folder(tmp_path: Path) -> Path:
    rows = [
        {"question": f"Ann has {n} figs. How many?", "answer": f"Ann has <<{n}={n}>>{n}.\n#### {n}"} for n in range(30)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = tmp_path / "base"
    sizes = ["--vocab-size", "320", "--hidden-size", "32", "--num-layers", "1"]
    main(["--questions", str(tmp_path / "train.jsonl"), "--to", str(folder), *sizes])
    return folder


def test_the_folder_is_an_ordinary_hugging_face_model(tmp_path: Path):
    folder = make_folder(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert tokenizer.eos_token == "<|im_end|>"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert len(tokenizer) == model.config.vocab_size
    logits = model(input_ids=torch.tensor([tokenizer("Ann has 12 figs.").input_ids])).logits
    assert logits.isfinite().all()


def test_the_tokenizer_writes_chats_and_keeps_digits_apart(tmp_path: Path):
    tokenizer = AutoTokenizer.from_pretrained(make_folder(tmp_path))
    text = "Ann has 12 figs.\n#### 12 é"
    token_ids = tokenizer(text).input_ids
    assert tokenizer.decode(token_ids) == text
    assert tokenizer.convert_ids_to_tokens(token_ids).count("1") == 2
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
