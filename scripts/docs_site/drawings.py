"""Draws the documentation's SVG figures, in colors that follow the reader's light or dark scheme.

    python scripts/docs_site/drawings.py    # writes docs/drawings/*.svg

A drawing has boxes and arrows between their sides; a sequence diagram has lanes, and messages from top to bottom. To
add one, write a function, add it to `DRAWINGS`, and show the file in a page: `![what it shows](drawings/name.svg)`.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "docs" / "drawings"
LINE_HEIGHT = 18
# The site's pages inline the drawings, and their stylesheet sets these colors for the chosen scheme.
STYLE = """
.drawing{--ink:#1f2328;--line:#57606a;--edge:#8c959f;--box:#ffffff;--area:#f0f2f7;--accent:#3949ab}
.drawing{max-width:100%;height:auto}
@media (prefers-color-scheme:dark){
.drawing{--ink:#e6e8ee;--line:#a9b1c0;--edge:#6b7385;--box:#262a36;--area:#1b1e27;--accent:#9fa8da}
}
.drawing text{fill:var(--ink);font:14px system-ui,-apple-system,"Segoe UI",Roboto,Helvetica,Arial,sans-serif}
.drawing .title{font-weight:600}
.drawing .label{font-size:12.5px;fill:var(--line)}
.drawing .box{fill:var(--box);stroke:var(--edge);stroke-width:1.2}
.drawing .strong{fill:var(--box);stroke:var(--accent);stroke-width:2}
.drawing .area{fill:var(--area);stroke:var(--edge);stroke-dasharray:5 4}
.drawing .arrow{fill:none;stroke:var(--line);stroke-width:1.4}
.drawing .dashed{stroke-dasharray:5 4}
.drawing .head{fill:var(--line)}
""".strip()


class Drawing:
    """Boxes, frames around them, and arrows. Coordinates are pixels from the top left."""

    def __init__(self, name: str, width: int, height: int, title: str) -> None:
        self.name, self.width, self.height, self.title = name, width, height, title
        self._parts: list[str] = []
        self._boxes: dict[str, tuple[float, float, float, float]] = {}

    def area(self, x: float, y: float, w: float, h: float, text: str) -> None:
        """Adds a dashed frame behind boxes, with its name at the top."""
        self._parts.append(f'<rect class="area" x="{x}" y="{y}" width="{w}" height="{h}" rx="8"/>')
        self._text(x + 10, y + 20, [text], "title", anchor="start")

    def box(self, name: str, x: float, y: float, w: float, h: float, *lines: str, kind: str = "box") -> None:
        """Adds a box. The first line of its text is the title, in bold if more lines follow."""
        self._boxes[name] = (x, y, w, h)
        self._parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{w}" height="{h}" rx="6"/>')
        top = y + h / 2 - LINE_HEIGHT * (len(lines) - 1) / 2 + 5
        if len(lines) > 1:
            self._text(x + w / 2, top, lines[:1], "title")
            self._text(x + w / 2, top + LINE_HEIGHT, lines[1:], "label")
        else:
            self._text(x + w / 2, top, lines)

    def arrow(self, start: str, end: str, label: str = "", *, both: bool = False, dashed: bool = False) -> None:
        """Adds an arrow between two boxes' sides (right, left, top, bottom), such as from `a.r` to `b.l`.

        `a.r0.2` starts at a fifth of the side. Between sides that do not face each other, the arrow has a corner.
        """
        (x1, y1, side1), (x2, y2, side2) = self._point(start), self._point(end)
        horizontal1, horizontal2 = side1 in "lr", side2 in "lr"
        if abs(x1 - x2) < 1 or abs(y1 - y2) < 1:
            points = [(x1, y1), (x2, y2)]
        elif horizontal1 and horizontal2:
            middle = (x1 + x2) / 2
            points = [(x1, y1), (middle, y1), (middle, y2), (x2, y2)]
        elif not horizontal1 and not horizontal2:
            middle = (y1 + y2) / 2
            points = [(x1, y1), (x1, middle), (x2, middle), (x2, y2)]
        else:
            points = [(x1, y1), (x2, y1) if horizontal1 else (x1, y2), (x2, y2)]
        self._path(points, label, both=both, dashed=dashed)

    def message(self, x1: float, x2: float, y: float, label: str, *, dashed: bool = False) -> None:
        """Adds a horizontal arrow with its label above."""
        self._path([(x1, y), (x2, y)], label, dashed=dashed)

    def line(self, x: float, y1: float, y2: float) -> None:
        self._parts.append(f'<path class="arrow dashed" d="M{x} {y1}V{y2}"/>')

    def note(self, x: float, y: float, *lines: str, anchor: str = "middle") -> None:
        self._text(x, y, lines, "label", anchor=anchor)

    def svg(self) -> str:
        name = html.escape(self.title)
        return (
            f'<svg class="drawing" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img" aria-label="{name}">\n<title>{name}</title>\n'
            f"<style>{STYLE}</style>\n"
            f'<defs><marker id="head-{self.name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            f'orient="auto-start-reverse"><path class="head" d="M0 0L8 4L0 8z"/></marker></defs>\n'
            + "\n".join(self._parts)
            + "\n</svg>\n"
        )

    def _point(self, where: str) -> tuple[float, float, str]:
        name, _, place = where.partition(".")
        x, y, w, h = self._boxes[name]
        side, share = place[0], float(place[1:] or 0.5)
        if side in "lr":
            return (x if side == "l" else x + w), y + h * share, side
        return x + w * share, (y if side == "t" else y + h), side

    def _path(
        self, points: Sequence[tuple[float, float]], label: str, *, both: bool = False, dashed: bool = False
    ) -> None:
        start = f' marker-start="url(#head-{self.name})"' if both else ""
        kind = "arrow dashed" if dashed else "arrow"
        steps = "L".join(f"{x:g} {y:g}" for x, y in points)
        self._parts.append(f'<path class="{kind}" d="M{steps}"{start} marker-end="url(#head-{self.name})"/>')
        if label:
            middle = len(points) // 2
            (x1, y1), (x2, y2) = points[middle - 1], points[middle]
            if abs(y1 - y2) < 1:
                self._text((x1 + x2) / 2, min(y1, y2) - 6 - 15 * label.count("\n"), label.split("\n"), "label")
            else:
                self._text(x1 + 7, (y1 + y2) / 2 + 4, label.split("\n"), "label", anchor="start")

    def _text(self, x: float, y: float, lines: Sequence[str], kind: str = "", *, anchor: str = "middle") -> None:
        height = 15 if kind == "label" else LINE_HEIGHT
        for index, line in enumerate(lines):
            style = f' class="{kind}"' if kind else ""
            position = f'x="{x:g}" y="{y + index * height:g}" text-anchor="{anchor}"'
            self._parts.append(f"<text{style} {position}>{html.escape(line)}</text>")


def iteration() -> Drawing:
    drawing = Drawing("iteration", 720, 420, "One iteration: rollout, model calls, update, weight sync")
    drawing.box("prompts", 20, 20, 130, 44, "P prompts")
    drawing.area(190, 10, 510, 190, "rollout")
    drawing.box("workflow", 210, 50, 220, 60, "workflow", "G trajectories per prompt", kind="strong")
    drawing.box("engine", 540, 50, 140, 60, "engine", "generates tokens", kind="strong")
    drawing.box("reward", 210, 140, 220, 48, "reward", "a number per trajectory", kind="strong")
    drawing.box("experience", 210, 230, 220, 48, "experience", "trajectories as tensors [B, T]")
    drawing.box("calls", 210, 300, 220, 48, "model calls", "then advantages")
    drawing.box("update", 210, 370, 220, 44, "update", "a step per minibatch", kind="strong")
    drawing.arrow("prompts.r", "workflow.l0.1")
    drawing.arrow("workflow.r0.35", "engine.l0.35", "token ids")
    drawing.arrow("engine.l0.75", "workflow.r0.75")
    drawing.note(485, 128, "logprobs, versions")
    for upper, lower in (
        ("workflow", "reward"),
        ("reward", "experience"),
        ("experience", "calls"),
        ("calls", "update"),
    ):
        drawing.arrow(f"{upper}.b", f"{lower}.t")
    drawing.arrow("update.r", "engine.b", "weight sync: version + 1")
    return drawing


def processes() -> Drawing:
    drawing = Drawing("processes", 900, 520, "Processes and threads of a run: rank 0, its event loop, workers, servers")
    drawing.area(20, 10, 560, 300, "rank 0")
    loop = ("event loop thread", "schedules groups, runs", "workflows, sends requests;", "holds no model")
    drawing.box(
        "main", 40, 45, 210, 96, "main thread", "Lightning's fit loop:", "model calls, update, sync", kind="strong"
    )
    drawing.box("loop", 345, 45, 215, 96, *loop, kind="strong")
    drawing.box("hook", 345, 175, 150, 48, "reward thread", "a hook that uses self")
    drawing.box("local", 345, 245, 215, 48, "decode thread", "LocalEngine's copy of the policy")
    drawing.box("watch", 90, 175, 160, 48, "watch thread", "heartbeats of ranks")
    drawing.box("disk", 90, 245, 160, 48, "writer thread", "checkpoints")
    drawing.arrow("main.r0.3", "loop.l0.3", "prompts")
    drawing.arrow("loop.l0.7", "main.r0.7", "groups")
    drawing.arrow("loop.b0.3", "hook.t0.43")
    drawing.arrow("loop.b0.85", "local.t0.85")
    drawing.area(640, 10, 240, 116, "reward workers")
    drawing.box("reward", 660, 45, 200, 60, "reward functions", "killed at the deadline")
    drawing.area(640, 146, 240, 116, "workflow workers")
    drawing.box("workers", 660, 182, 200, 60, "workflows", "if workflow_workers > 0")
    drawing.arrow("loop.r0.3125", "reward.l0.5")
    drawing.arrow("loop.r0.55", "workers.l")
    drawing.area(20, 350, 380, 150, "ranks 1, 2, …")
    ranks = ("main thread", "the same fit loop on its shard;", "rollouts only through rank 0")
    drawing.box("ranks", 40, 386, 340, 90, *ranks, kind="strong")
    drawing.arrow("main.b0.1", "ranks.t0.062", both=True)
    drawing.note(70, 335, "collectives", anchor="start")
    drawing.area(460, 350, 420, 150, "on the server hosts")
    drawing.box("servers", 480, 386, 180, 90, "SGLang servers", "each with its GPUs", kind="strong")
    drawing.box("receiver", 710, 386, 150, 90, "weight receiver", "transport: delta")
    drawing.arrow("loop.r0.85", "servers.t0.62", both=True)
    drawing.note(600, 335, "HTTP", anchor="start")
    drawing.arrow("workers.b0.2", "servers.t0.9", both=True)
    drawing.arrow("receiver.l", "servers.r")
    drawing.arrow("ranks.r", "servers.l", "weights")
    return drawing


def few_gpus() -> Drawing:
    drawing = Drawing("few_gpus", 720, 230, "Two FSDP2 ranks and two SGLang servers on four GPUs")
    drawing.area(20, 10, 300, 205, "lightrl fit: FSDP2Strategy, devices: 2")
    drawing.box("rank0", 40, 50, 260, 60, "rank 0 on GPU 0", "rolls out, updates its shard", kind="strong")
    drawing.box("rank1", 40, 145, 260, 55, "rank 1 on GPU 1", "updates its shard")
    drawing.area(440, 10, 260, 205, "SGLangEngine: servers: 2")
    drawing.box("server0", 460, 50, 220, 60, "server on GPU 2")
    drawing.box("server1", 460, 145, 220, 55, "server on GPU 3")
    drawing.arrow("rank0.b", "rank1.t", "layers, gradients", both=True)
    drawing.arrow("rank0.r0.3", "server0.l0.3", "token ids", both=True)
    drawing.arrow("rank0.r0.75", "server1.l0.15", both=True)
    drawing.arrow("rank1.r0.75", "server1.l0.75", "weights")
    return drawing


def many_gpus() -> Drawing:
    drawing = Drawing(
        "many_gpus", 720, 330, "Policy in three directions, critic on separate ranks, servers on many hosts"
    )
    drawing.box("servers", 230, 10, 260, 48, "SGLang servers", "on many hosts, which join and leave")
    drawing.area(20, 100, 430, 110, "policy: pp=2, dp=2, tp=2 on ranks 0 to 7")
    drawing.box("first", 40, 138, 150, 56, "stage 0", "4 ranks, dp 2 × tp 2", kind="strong")
    drawing.box("second", 290, 138, 150, 56, "stage 1", "4 ranks, dp 2 × tp 2", kind="strong")
    drawing.area(500, 100, 200, 110, "critic: ranks 8 to 11")
    drawing.box("critic", 520, 138, 160, 56, "mesh", "its own axes", kind="strong")
    drawing.box("losses", 230, 265, 260, 44, "advantages, losses")
    drawing.arrow("first.r", "second.l", "hidden states")
    drawing.arrow("servers.l", "first.t", "trajectories")
    drawing.arrow("servers.r", "critic.t", "trajectories")
    drawing.arrow("second.b", "losses.t0.519", "logprobs")
    drawing.arrow("critic.b", "losses.r", "values")
    drawing.arrow("second.t0.3", "servers.b0.404", "weights", dashed=True)
    return drawing


def asynchronous() -> Drawing:
    drawing = Drawing("asynchronous", 720, 300, "Rollout and update overlap at max_staleness 1")
    engine, trainer = 170, 550
    drawing.box("engine", engine - 90, 10, 180, 36, "engine")
    drawing.box("trainer", trainer - 90, 10, 180, 36, "trainer")
    drawing.line(engine, 46, 290)
    drawing.line(trainer, 46, 290)
    drawing.message(engine, trainer, 85, "P groups, sampled under v")
    drawing.box("sample", engine - 140, 110, 280, 50, "samples the next P groups, under v")
    drawing.box("update", trainer - 90, 110, 180, 50, "update v → v + 1")
    drawing.message(trainer, engine, 195, "weight sync: v + 1")
    drawing.box("go", engine - 120, 208, 240, 36, "continues them under v + 1")
    drawing.message(engine, trainer, 275, "P groups, tokens of v and v + 1")
    return drawing


def sync() -> Drawing:
    drawing = Drawing("sync", 720, 330, "A weight sync: stage, pause, load, acknowledge, probe, resume")
    trainer, server = 170, 550
    drawing.box("trainer", trainer - 90, 10, 180, 36, "trainer")
    drawing.box("server", server - 90, 10, 180, 36, "each server")
    drawing.line(trainer, 46, 320)
    drawing.line(server, 46, 320)
    steps = [
        (True, "stage version v + 1: disk, broadcast, shared memory, delta"),
        (True, "pause: requests in flight stop at a token"),
        (True, "load version v + 1"),
        (False, "acknowledges v + 1, with the digest of each parameter"),
        (True, "probe: logprobs of a few sequences"),
        (False, "logprobs, compared with the trainer's"),
        (True, "resume"),
    ]
    for index, (to_server, label) in enumerate(steps):
        ends = (trainer, server) if to_server else (server, trainer)
        drawing.message(*ends, 85 + 36 * index, label, dashed=not to_server)
    return drawing


def failure() -> Drawing:
    drawing = Drawing("failure", 760, 230, "What happens when a server, a reward or a rank fails")
    rows = [
        (
            "a server dies or hangs",
            ("its requests continue on others,", "with the tokens they have"),
            ("it restarts, loads the weights,", "then gets requests"),
        ),
        (
            "a reward raises or hangs",
            ("its process is killed, the trajectory", "is dropped and counted"),
            ("the run stops above", "max_failed_fraction"),
        ),
        (
            "a rank fails or hangs",
            ("it is named, all ranks exit",),
            ("--ckpt_path last resumes;", "nothing is lost or trained twice"),
        ),
    ]
    for index, (fault, then, end) in enumerate(rows):
        y = 15 + 72 * index
        drawing.box(f"fault{index}", 10, y, 195, 50, fault, kind="strong")
        for name, x, lines in (("then", 230, then), ("end", 510, end)):
            drawing.box(f"{name}{index}", x, y, 240, 50, "")
            drawing.note(x + 120, y + (30 if len(lines) == 1 else 22), *lines)
        drawing.arrow(f"fault{index}.r", f"then{index}.l")
        drawing.arrow(f"then{index}.r", f"end{index}.l")
    return drawing


def window() -> Drawing:
    drawing = Drawing("window", 760, 240, "The window of groups at a staleness of 2")
    drawing.area(20, 10, 560, 110, "window of (η + 1)·P groups: only the trainer moves it")
    drawing.box("old", 40, 48, 160, 56, "P groups", "started at v − 2", kind="strong")
    drawing.box("middle", 220, 48, 160, 56, "P groups", "started at v − 1")
    drawing.box("new", 400, 48, 160, 56, "P groups", "start now, at v")
    drawing.box("stream", 630, 48, 115, 56, "prompt", "stream")
    drawing.box("update", 40, 170, 160, 56, "update", "v → v + 1", kind="strong")
    drawing.box("engine", 300, 170, 180, 56, "engine", "continues under v + 1", kind="strong")
    drawing.arrow("old.b", "update.t", "all P are finished")
    drawing.arrow("stream.l", "new.r")
    drawing.arrow("update.r", "engine.l", "sync: v + 1")
    drawing.arrow("engine.t0.25", "middle.b0.78", dashed=True)
    drawing.arrow("engine.r", "new.b0.8", dashed=True)
    return drawing


def memory() -> Drawing:
    drawing = Drawing("memory", 900, 330, "What a GPU holds in each phase: separate, colocated, and with offload")
    for index, phase in enumerate(("rollout", "score", "update", "sync")):
        drawing.note(290 + 170 * index, 24, phase)
    kept = ("weights, moments",) * 4
    work = ("", "+ activations of a forward", "+ gradients, activations", "+ a bucket of weights")
    served = (*("engine weights, KV cache",) * 3, "engine weights + bucket")
    colocated = ("engine weights, KV cache", *("weights, moments",) * 2, "engine weights + bucket")
    shared = ("+ weights", *work[1:3], "+ weights")
    offloaded = ("weights", "weights", "weights, moments", "weights")
    rows = (
        ("trainer, separate", kept, work), ("server, separate", served, ("",) * 4), ("colocated", colocated, shared),
        ("trainer, optimizer offloaded", offloaded, work),
    )  # fmt: skip
    for row, (name, first, second) in enumerate(rows):
        y = 40 + 72 * row
        drawing.note(10, y + 30, name, anchor="start")
        for index, lines in enumerate(zip(first, second, strict=True)):
            drawing.box(f"{row}{index}", 205 + 170 * index, y, 164, 56, "")
            drawing.note(287 + 170 * index, y + (24 if lines[1] else 32), *filter(None, lines))
    return drawing


def ppo() -> Drawing:
    drawing = Drawing(
        "ppo", 760, 250, "PPO's graph: what policy, reference and critic compute, and what the losses read"
    )
    drawing.box("rows", 20, 95, 130, 60, "experience", "tokens, rewards")
    for index, (name, text) in enumerate(
        (("policy", "proximal logprobs"), ("reference", "logprobs"), ("critic", "values"))
    ):
        drawing.box(name, 210, 15 + 80 * index, 170, 60, name, text, kind="strong")
        drawing.arrow("rows.r", f"{name}.l")
    drawing.box("advantages", 450, 95, 140, 60, "advantages", "GAE; returns")
    drawing.box("policy_loss", 630, 15, 120, 60, "policy loss")
    drawing.box("value_loss", 630, 175, 120, 60, "value loss")
    drawing.arrow("policy.r", "policy_loss.l")
    drawing.arrow("reference.r", "advantages.l")
    drawing.arrow("critic.r", "advantages.b")
    drawing.arrow("advantages.r", "policy_loss.b")
    drawing.arrow("advantages.r", "value_loss.t")
    return drawing


def microbatch() -> Drawing:
    drawing = Drawing("microbatch", 760, 260, "One microbatch under pp 2 and tp 2: the same rows on each stage's ranks")
    drawing.box("rows", 10, 105, 120, 60, "microbatch", "packed rows")
    for stage, x in ((0, 180), (1, 450)):
        drawing.area(x, 10, 180, 240, f"stage {stage}")
        for rank in (0, 1):
            name = f"rank {2 * stage + rank}"
            drawing.box(name, x + 15, 45 + 125 * rank, 150, 60, name, "half of each layer", kind="strong")
        drawing.arrow(f"rank {2 * stage}.b", f"rank {2 * stage + 1}.t", "all-reduce", both=True)
    drawing.arrow("rows.r", "rank 0.l")
    drawing.arrow("rows.r", "rank 1.l")
    for rank in (0, 1):
        drawing.arrow(f"rank {rank}.r", f"rank {rank + 2}.l", "", both=True)
    drawing.note(405, 60, "hidden states →", "← gradients")
    drawing.box("loss", 665, 105, 85, 60, "loss")
    drawing.arrow("rank 2.r", "loss.t")
    drawing.arrow("rank 3.r", "loss.b")
    return drawing


def packages() -> Drawing:
    drawing = Drawing("packages", 760, 572, "The packages: each imports only from the rows below it")
    rows = (
        ("commands",), ("plan",), ("trainer",), ("algorithms", "loops", "callbacks"), ("rollout", "module", "data"),
        ("testing", "workflows"), ("engines", "strategies"), ("models", "dataflow"), ("rewards", "weights"),
        ("experience",), ("functional",), ("trajectory",), ("checks", "columns", "concurrency", "trace"), ("errors",),
    )  # fmt: skip
    for row, names in enumerate(rows):
        width = 740 / len(names)
        for index, name in enumerate(names):
            drawing.box(name, 10 + width * index + 4, 8 + 40 * row, width - 8, 32, name)
    return drawing


DRAWINGS: tuple[Callable[[], Drawing], ...] = (
    iteration, processes, few_gpus, many_gpus, asynchronous, sync, failure, window,
    memory, ppo, microbatch, packages,
)  # fmt: skip


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for make in DRAWINGS:
        drawing = make()
        (FOLDER / f"{drawing.name}.svg").write_text(drawing.svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
