"""A workflow whose rollouts are trees of conversations: a question, a subagent, and an answer that knows of it."""

from lightrl import Prompt, Trajectory
from lightrl.columns import Columns, extended
from lightrl.engines import Completion
from lightrl.workflows import Workflow
from lightrl.workflows.workflow import Generate


class Tree(Workflow):
    """Every second prompt's subagent reads the beginning of the question too."""

    def __init__(self, tokenizer: object) -> None:
        pass

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        question = list(prompt.token_ids or [])
        shared = question[:2] if prompt.id[-1] in "024" else []
        first = await generate(question)
        beside = await generate([*shared, 3, 6])
        last = await generate([*question, *first.token_ids, 4])
        parts = [read(question), first, read([3, 6]), beside, read([4]), last]
        gaps = [[0] * len(part.token_ids) for part in parts]
        gaps[2][0] = len(question) + len(first.token_ids) - len(shared)
        gaps[4][0] = 2 + len(beside.token_ids)
        columns: Columns = {}
        for index, part in enumerate(parts):
            columns = extended(
                columns, sum(len(it.token_ids) for it in parts[:index]), part.columns, len(part.token_ids)
            )
        return Trajectory(
            prompt=prompt,
            group_id=-1,
            sample=-1,
            token_ids=[id_ for part in parts for id_ in part.token_ids],
            loss_mask=[version >= 0 for part in parts for version in part.weight_versions],
            behavior_logprobs=[logprob for part in parts for logprob in part.logprobs],
            weight_versions=[version for part in parts for version in part.weight_versions],
            completion_ids=last.token_ids,
            completion="",
            columns={**columns, "gaps": [gap for part in gaps for gap in part]},
        )


def read(token_ids: list[int]) -> Completion:
    """Tokens that the policy did not generate."""
    return Completion(token_ids, [0.0] * len(token_ids), [-1] * len(token_ids), "stop")
