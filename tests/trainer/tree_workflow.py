"""A workflow whose rollouts are trees of conversations: a question, subagents, and an answer that knows of it."""

from lightrl import Prompt, Trajectory
from lightrl.columns import Columns, extended
from lightrl.engines import Completion
from lightrl.workflows import Workflow
from lightrl.workflows.workflow import Generate


class Tree(Workflow):
    """Every second prompt's subagents read the beginning of the question too.

    Args:
        num_subagents: of these prompts, and of the others.
    """

    def __init__(self, tokenizer: object, num_subagents: tuple[int, int] = (1, 1)) -> None:
        self.num_subagents = num_subagents

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        question = list(prompt.token_ids or [])
        is_shared = prompt.id[-1] in "024"
        shared = question[:2] if is_shared else []
        first = await generate(question)
        parts, gaps = [read(question), first], [0, 0]
        for _ in range(self.num_subagents[not is_shared]):
            gaps += [sum(len(part.token_ids) for part in parts) - len(shared), 0]
            parts += [read([3, 6]), await generate([*shared, 3, 6])]
        gaps += [sum(len(part.token_ids) for part in parts[2:]), 0]
        parts += [read([4]), await generate([*question, *first.token_ids, 4])]
        columns: Columns = {}
        for index, part in enumerate(parts):
            columns = extended(
                columns, sum(len(it.token_ids) for it in parts[:index]), part.columns, len(part.token_ids)
            )
        starts = [[gap] + [0] * (len(part.token_ids) - 1) for gap, part in zip(gaps, parts, strict=True)]
        return Trajectory(
            prompt=prompt, group_id=-1, sample=-1, token_ids=[id_ for part in parts for id_ in part.token_ids],
            loss_mask=[version >= 0 for part in parts for version in part.weight_versions],
            behavior_logprobs=[logprob for part in parts for logprob in part.logprobs],
            weight_versions=[version for part in parts for version in part.weight_versions],
            completion_ids=parts[-1].token_ids, completion="",
            columns={**columns, "gaps": [gap for start in starts for gap in start]},
        )  # fmt: skip


def read(token_ids: list[int]) -> Completion:
    """Tokens that the policy did not generate."""
    return Completion(token_ids, [0.0] * len(token_ids), [-1] * len(token_ids), "stop")
