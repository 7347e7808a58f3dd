"""The commands that `parse-infer advise` prints: measure or calibrate each step of `parse_infer.evaluation.ladder`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from parse_infer.cli.commands.demo import TASK_OPTIONS
from parse_infer.cli.model_options import PAIRS

if TYPE_CHECKING:
    from parse_infer.settings.sampling import Sampling

PROMPTS = "prompts.jsonl"
RULE = "relaxed_acceptance"  # the fastest in docs/results/rules.md under a promise of 5 %
Commands = tuple[str, list[list[str]]]
"""A heading, and the commands to run under it."""


@dataclass(frozen=True)
class Situation:
    """What the user has.

    Attributes:
        prompts: jsonl file; None: not yet, or the problems of an embedded target.
        references: whether the prompts have references.
        adapter: of the target; None: not yet.
        placement: options of device and number type.
        answers: options of chat template and length of answers.
    """

    target: str
    draft: str
    prompts: Path | None
    references: bool
    sampling: Sampling
    adapter: str | None = None
    placement: Sequence[str] = ()
    answers: Sequence[str] = ()

    @property
    def embedded(self) -> bool:
        """Whether the problems are those of an embedded target."""
        return self.prompts is None and self.target in PAIRS

    @property
    def bounded(self) -> bool:
        """Whether a calibration can compare answers: without references only greedy ones."""
        return self.references or self.sampling.greedy

    @property
    def has_judge(self) -> bool:
        """Whether there is an adapter to calibrate."""
        return self.adapter is not None and self.bounded

    def next_commands(self) -> list[Commands]:
        """Return the commands of the steps, or of the first and the adapter's."""
        common = ["--target", self.target, "--draft", self.draft, *self.placement, *self.answers]
        common += [*self._problems, *self._sampled]
        measure = [*("bench", *common, "--split", "validation", "--limit", "30")]
        measure += ["--modes", "target,target+draft", "--thresholds", "none", "--out", "runs/lossless"]
        python = f'ParseEngine.from_pretrained("{self.target}", "{self.draft}")'
        found: list[Commands] = [(f"Measure step 1 (in Python: {python}):", [measure])]
        if not self.bounded:
            return found
        loss = "accuracy" if not self.sampling.greedy else "lost" if self.references else "disagreement"
        calibrate = ["calibrate", *common, "--risk", "0.05,0.1", *(["--loss", loss] if loss != "lost" else [])]
        if self.adapter is not None:
            own = [*calibrate, "--adapter", self.adapter, "--out", "runs/judge"]
            return [*found, (f"Calibrate your adapter (step 3), {_then('judge')}:", [own])]
        rule = [*calibrate, "--judge", RULE, "--out", "runs/rule"]
        found.append((f"Calibrate a rule (step 2), {_then('rule')} --judge {RULE}:", [rule]))
        folder = "runs/transferred"
        transfer = ["transfer", "zoo:smollm2-adapter", "--target", self.target, "--out", folder]
        judge = [*calibrate, "--adapter", folder, "--out", "runs/judge"]
        return [*found, (f"Transfer a judge and calibrate it (step 3), {_then('judge')}:", [transfer, judge])]

    @property
    def _problems(self) -> list[str]:
        if self.embedded:
            return ["--task", "gsm_symbolic", *_task_options(TASK_OPTIONS.get(self.target, []))]
        own = [f"path={self.prompts or PROMPTS}", *([] if self.references else ["check_with=none"])]
        return ["--task", "jsonl", *_task_options(own)]

    @property
    def _sampled(self) -> list[str]:
        if self.sampling.greedy:
            return []
        values = {"temperature": self.sampling.temperature, "top-p": self.sampling.top_p, "top-k": self.sampling.top_k}
        return [part for name, value in values.items() for part in (f"--{name}", f"{value:g}")]


def _task_options(values: Sequence[str]) -> list[str]:
    return [part for value in values for part in ("--task-option", value)]


def _then(folder: str) -> str:
    return f"then answer with --risk 0.05 --calibration runs/{folder}/calibration.json"
