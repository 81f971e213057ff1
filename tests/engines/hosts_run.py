"""A trainer on one of several hosts: `python hosts_run.py TRANSPORT MODEL_FOLDER WEIGHT_FOLDER URL…`.

Loads version 0, then version 1, which the first server receives slowly; prints what happened as JSON lines, which
test_hosts.py reads. It says `amid` when that server has been asked for version 1.
"""

import asyncio
import json
import os
import sys
import threading
import time
import urllib.request
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lightrl.engines import Timeouts
from lightrl.engines.sglang.engine import SGLangEngine
from lightrl.errors import EngineError
from lightrl.trajectory import Sampling
from lightrl.weights import Bucket

UPDATE = {
    "disk": "/update_weights_from_disk",
    "delta": "/update_weights_from_disk",
    "distributed": "/update_weights_from_distributed",
}


def tell(**fields: Any) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def ask(url: str, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url + path, data=data), timeout=60) as answer:
        return json.loads(answer.read())


class Short(Timeouts):
    """Notices a lost server, and that none returns, within seconds; a server that starts has its 15 minutes."""

    hang_s = 2.0
    server_wait_s = 5.0
    probe_interval_s = 0.2


def main() -> None:
    transport, model_folder, weight_folder, *urls = sys.argv[1:]
    timeouts = Short(request_s=5, sync_s=8)
    os.environ["LIGHTRL_RECEIVER_ADDRS"] = ",".join(url.rpartition(":")[0] + ":31000" for url in urls)
    engine = SGLangEngine(
        urls=urls,
        transport=transport,  # type: ignore[arg-type]
        weight_folder=weight_folder or None,
        timeouts=timeouts,
    )
    config = AutoConfig.from_pretrained(model_folder)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config)
    buckets = [Bucket(dict(model.named_parameters()), is_last=True)]
    try:
        engine.start(config)
    except (ValueError, EngineError) as error:
        tell(refused=str(error))
        return
    engine.load_weights(buckets, weight_version=0)
    tell(versions=engine.last_sync.versions if engine.last_sync else None)
    if len(urls) == 1:
        (completion,) = asyncio.run(engine.generate([5, 6], Sampling(max_new_tokens=4, temperature=0), session="s"))
        greedy = model.generate(torch.tensor([[5, 6]]), max_new_tokens=4, do_sample=False)[0, 2:].tolist()
        tell(is_right=completion.token_ids == greedy)
        engine.close()
        return
    path = UPDATE[transport]
    num_before = ask(urls[0], "/fake/stats")["requests"][path]
    ask(urls[0], "/fake/faults", {"kind": "slow", "path": path, "seconds": 60.0})

    def watch() -> None:
        while ask(urls[0], "/fake/stats")["requests"][path] == num_before:
            time.sleep(0.01)
        tell(amid=True)

    threading.Thread(target=watch, daemon=True).start()
    since = time.monotonic()
    try:
        engine.load_weights(buckets, weight_version=1)
    except EngineError as error:
        tell(failed=str(error))
    tell(versions=engine.last_sync.versions, lost=engine.last_sync.lost, seconds=round(time.monotonic() - since, 1))
    engine.close()


if __name__ == "__main__":
    main()
