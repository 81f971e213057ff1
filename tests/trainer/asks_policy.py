"""A program that evaluates a policy at an OpenAI URL, for tests of EvaluationCommand: asks_policy.py TOKEN_ID..."""

import json
import os
import sys
import urllib.request
from pathlib import Path


def post(path: str, **body: object) -> dict:
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    data = json.dumps({"model": os.environ["LIGHTRL_MODEL"], **body}).encode()
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/{path}", data, headers)
    with urllib.request.urlopen(request) as answer:
        return json.loads(answer.read())


if __name__ == "__main__":
    ids = list(map(int, sys.argv[1:]))
    answer = post("completions", prompt=[ids], max_tokens=1, temperature=0, logprobs=1, echo=True)
    versions = {answer["system_fingerprint"]}
    versions.add(post("chat/completions", messages=[{"role": "user", "content": "1 2"}])["system_fingerprint"])
    logprobs = answer["choices"][0]["logprobs"]["token_logprobs"]
    results = {"digits/logprob": sum(logprobs[1:-1]), "digits/version": int(versions.pop().rpartition("-")[2])}
    assert not versions, "all requests reach one weight version"
    Path(os.environ["LIGHTRL_RESULTS"], "results.json").write_text(json.dumps(results))
