"""Problems from one or several of reasoning-gym's generators (arithmetic, logic, text, calendars, …)."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from data_tools.tasks.answer_text import clean
from data_tools.tasks.final_answer import final_answer, first_clause
from data_tools.tasks.stated_numbers import stated_quantity
from data_tools.tasks.task import SPLITS, Problem, Split, check_split
from parse_infer.errors import ParseError
from parse_infer.optional_dependencies import missing_package
from parse_infer.suggest import suggestion

_EVALUATES = re.compile(r"\b(?:eval|exec|parse_expr|sympify)\(")  # sympy's parser calls eval, too

_FENCED = re.compile(r"^```[^\n`]*\n(.*?)\n```", re.DOTALL | re.MULTILINE)
_EMPHASISED = re.compile(r".*(?:\*\*|`)([^*`]+)(?:\*\*|`)")
_SAYS = re.compile(
    r".*\b(?:is|are|was|were|becomes|equals)\s+(?!not\b)(?:(?:a|an|the|his|her|its|their|[\w-]+'s)\s+)*(\S.*)"
)


@dataclass
class ReasoningGym:
    """Problems of reasoning-gym, without worked solutions, scored by its own checkers.

    Args:
        names: generators, with their default settings; the problems alternate between them. One whose checker
            evaluates answers as Python code is refused.
        instruction: text after each question.
    """

    names: list[str] = field(default_factory=lambda: ["chain_sum", "leg_counting", "family_relationships"])
    instruction: str = ""
    name: str = "reasoning_gym"

    _CHUNK = 256

    def problems(self, split: Split, seed: int = 0, limit: int | None = None) -> Iterator[Problem]:
        try:
            from reasoning_gym import create_dataset
            from reasoning_gym.factory import DATASETS
        except ModuleNotFoundError as error:
            raise ParseError(f"task reasoning_gym: {missing_package(error)}") from error
        check_split(split)
        if not 0 <= seed < 1 << 16:
            raise ParseError(f"seed is {seed}; for task reasoning_gym it must be in 0..{(1 << 16) - 1}")
        for name in self.names:
            if name not in DATASETS:
                raise ParseError(f"reasoning-gym has no generator {name!r}; {suggestion(name, DATASETS)}")
            if _EVALUATES.search(inspect.getsource(DATASETS[name][0].score_answer)):
                raise ParseError(
                    f"reasoning-gym's checker of {name} evaluates answers as Python code, outside the sandbox: leave "
                    f"{name} out of names"
                )
        if not self.names:
            raise ParseError("task reasoning_gym needs the option names: a list of reasoning-gym's generators")
        # Seed ranges of different splits and seeds never overlap, as in gsm_symbolic.
        base, count = (SPLITS.index(split) << 40) + (seed << 24), 0
        while True:
            start = base + count // len(self.names)
            sets = [create_dataset(name, seed=start, size=self._CHUNK) for name in self.names]
            for index in range(self._CHUNK):
                for name, entries in zip(self.names, sets, strict=True):
                    if limit is not None and count >= limit:
                        return
                    entry, count = entries[index], count + 1
                    metadata = {"generator": name, "entry": entry}
                    identity = f"{name}-{split}-{seed}-{count - 1}"
                    prompt = entry["question"] + self.instruction
                    yield Problem(identity, prompt, str(entry["answer"]), metadata=metadata)

    def check(self, problem: Problem, completion: str) -> bool:
        """Whether the generator's checker gives the full score to one of the candidates.

        Candidates: the completion, and what it may state as its answer (`_statements`)."""
        from reasoning_gym import get_score_answer_fn

        score = get_score_answer_fn(problem.metadata["generator"])

        def marks(text: str) -> float:
            try:
                return float(score(text, problem.metadata["entry"]))
            except Exception:  # some checkers raise various errors for text that does not have the form of an answer
                return 0.0

        return any(marks(text) >= 1 for text in _statements(completion))


def _statements(completion: str) -> set[str]:
    """Return the completion, its final answer, its number, and what its last line says after a verb or a colon.

    An answer of several lines ends with its paragraph or its fence."""
    answer, last = final_answer(completion), completion.rsplit("####", 1)[-1].strip()
    line = last.rsplit("\n", 1)[-1]
    texts = {completion, last, answer.text, line.split(":", 1)[-1], line.rsplit(":", 1)[-1]}
    if answer.mark == "none":
        texts |= {match[1] for match in (_EMPHASISED.search(line), _SAYS.search(line)) if match}
    else:
        texts.add(first_clause(answer.text))
    if answer.mark != "none":
        ends = {completion.find(answer.text), completion.rfind(answer.text)}
        texts |= {completion[at:].split("\n\n", 1)[0] for at in ends}
    paragraphs = completion.rsplit("\n\n", 2)[-2:]
    texts |= {*_FENCED.findall(completion)[-1:], *(one for one in paragraphs if "\n" in one)}
    number = stated_quantity(completion)
    if number is not None and number.value is not None:
        texts.add(number.text)
    bare = {text.strip(" \n*_`") for text in texts} | {text.strip().rstrip(".").strip("*_`") for text in texts}
    cleaned = {clean(text, sentence=True) for text in texts}
    bare |= {text.strip().removesuffix(".") for text in texts}
    return {text.strip() for text in texts} | bare | cleaned | {f"{text}." for text in cleaned}  # a sentence
