"""lm-eval's generative tasks as tasks of builds, trainings, calibrations and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace

from lm_eval.models.utils import postprocess_generated_text

from data_tools.tasks.lm_eval.tasks import load_tasks, read_data
from data_tools.tasks.task import SPLITS, Problem, Split, check_split, split_of
from parse_infer.errors import ParseError


@dataclass
class LmEval:
    """Problems of a generative task of lm-eval, with its prompts (without examples) and its checks.

    An answer is right if lm-eval's metric exact_match is 1 with any of the task's filters. As in lm-eval, a task
    without test problems is evaluated on its validation problems. Without a validation split 10 % of the training
    problems are validation problems. Splits are disjoint.

    Args:
        lm_eval_task: lm-eval's name of a single task.
        data: jsonl files by the task's own split names, instead of its data set on the Hugging Face Hub.
    """

    lm_eval_task: str = ""
    data: dict[str, str] = field(default_factory=dict)
    name: str = "lm_eval"

    def __post_init__(self) -> None:
        if not self.lm_eval_task:
            raise ParseError("task lm_eval needs the option lm_eval_task: a generative task of lm-eval, such as gsm8k")
        files = [f"{self.lm_eval_task}:{split}={path}" for split, path in self.data.items()]
        data = read_data(files, [self.lm_eval_task])
        self._loaded = load_tasks([self.lm_eval_task], data, num_fewshot=0, replaces_sampling=True)
        self._task, *others = self._loaded.tasks.values()
        if others:
            names = ", ".join(self._loaded.tasks)
            raise ParseError(f"lm_eval_task is {self.lm_eval_task!r}, which has several tasks: choose one of {names}")
        if "exact_match" not in self._task.aggregation():
            raise ParseError(
                f"lm_eval_task is {self.lm_eval_task!r}, which has the metrics {', '.join(self._task.aggregation())}: "
                "choose a task with exact_match"
            )

    def problems(self, split: Split, seed: int = 0, limit: int | None = None) -> Iterator[Problem]:
        check_split(split)
        task = self._task
        own = task.config.training_split, task.config.validation_split, task.config.test_split
        readers = dict(zip(own, (task.training_docs, task.validation_docs, task.test_docs), strict=True))
        names = dict(zip(SPLITS, own, strict=True))
        names["validation"] = names["validation"] or names["train"]
        names["test"] = names["test"] or names["validation"]
        if names[split] is None:
            has = ", ".join(name for name in SPLITS if names[name])
            raise ParseError(f"lm-eval's task {self.lm_eval_task!r} has no problems for the split {split}, only {has}")
        sharing = [ours for ours in SPLITS if names[ours] == names[split]]
        self._loaded.for_lm_eval()  # seeds: some tasks shuffle choices
        found = []
        for index, doc in enumerate(readers[names[split]]()):
            prompt = task.fewshot_context(doc, num_fewshot=0, gen_prefix=task.doc_to_prefix(doc))
            if split_of(prompt, sharing) == split:
                found.append((f"{task.task_name}-{names[split]}-{index}", prompt, doc))
        Random(seed).shuffle(found)
        for name, prompt, doc in found[:limit]:
            yield Problem(name, prompt, str(task.doc_to_target(doc)), metadata={"doc": doc})

    def check(self, problem: Problem, completion: str) -> bool:
        task, doc = self._task, problem.metadata["doc"]
        text = postprocess_generated_text(completion, (task.config.generation_kwargs or {}).get("until"), None)
        answer = SimpleNamespace(resps=[text], doc=doc, filtered_resps={})  # what filters read of an Instance
        for each in task._filters:
            each.apply([answer])
        return any(task.process_results(doc, [one])["exact_match"] >= 1 for one in answer.filtered_resps.values())
