"""Workflows that test_workflow_workers.py runs in workers, in a module that they can import."""

import gc
import os
import time
from pathlib import Path

from lightrl.concurrency.streams import Channel
from lightrl.errors import RolloutError
from lightrl.trajectory import Prompt, Trajectory
from lightrl.workflows.workflow import Generate, SingleTurn


class Words:
    """As much of a tokenizer as SingleTurn uses."""

    eos_token_id = pad_token_id = None

    def decode(self, token_ids: list[int], clean_up_tokenization_spaces: bool) -> str:
        return " ".join(map(str, token_ids))


class Two(SingleTurn):
    """Two turns, the second one after the first."""

    def __init__(self) -> None:
        super().__init__(Words())  # type: ignore[arg-type]
        self.continues = True

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        first = await generate(prompt.token_ids or [])
        longer = Prompt(prompt.id, token_ids=[*(prompt.token_ids or []), *first.token_ids])
        trajectory = await super().run(longer, generate)
        trajectory.metrics["process"] = os.getpid()
        return trajectory


class Dropping(SingleTurn):
    """Prompt 1 is dropped."""

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        if prompt.id == "p1":
            raise RolloutError("prompt 1 is not for us")
        return await super().run(prompt, generate)


class Dying(SingleTurn):
    """The process of prompt 1 ends at once."""

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        if prompt.id == "p1":
            os._exit(7)
        return await super().run(prompt, generate)


class BlockingOnce(SingleTurn):
    """The first process that runs prompt 1 blocks its event loop."""

    def __init__(self, mark: Path) -> None:
        super().__init__(Words())  # type: ignore[arg-type]
        self.mark = mark

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        if prompt.id == "p1" and not self.mark.exists():
            self.mark.touch()
            self.do_harm()
        return await super().run(prompt, generate)

    def do_harm(self) -> None:
        time.sleep(1000)


class ForgingOnce(BlockingOnce):
    """The first process that runs prompt 1 sends messages that are not its own."""

    def __init__(self, mark: Path, *messages: object) -> None:
        super().__init__(mark)
        self.messages = messages

    def do_harm(self) -> None:
        gc.unfreeze()
        (channel,) = (each for each in gc.get_objects() if type(each) is Channel)
        for message in self.messages:
            channel._writer.write(message) if isinstance(message, bytes) else channel.send(*message)


class Unreadable(SingleTurn):
    """Cannot be read in a worker."""

    def __setstate__(self, state: object) -> None:
        raise RuntimeError("no copy of me works")


class SlowToRead(SingleTurn):
    """A worker that reads it is not ready for a minute."""

    def __setstate__(self, state: object) -> None:
        time.sleep(60)
