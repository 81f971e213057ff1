"""Reads a task, asks the model at the address in its environment, and writes the answer to a file.

It is an ordinary program and knows nothing about training.
"""

import sys
from pathlib import Path

from openai import OpenAI

messages = [{"role": "user", "content": sys.stdin.read()}]
answer = OpenAI().chat.completions.create(model="policy", messages=messages)  # reads OPENAI_BASE_URL, OPENAI_API_KEY
Path("answer.txt").write_text(answer.choices[0].message.content or "")
