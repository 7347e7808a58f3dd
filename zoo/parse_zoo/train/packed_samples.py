"""Sequence packing: an endless stream of rows that concatenate worked solutions, answers and drills."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

import torch
from torch.utils.data import IterableDataset
from transformers import PreTrainedTokenizerBase

from data_tools.tasks.registry import load_task
from data_tools.tasks.task import Problem, Task
from parse_infer.errors import ParseError
from parse_train.training_config import IGNORED
from parse_zoo.tasks.drills import drill
from parse_zoo.train.language_model_config import LanguageModelConfig

_MISSES = 1000


class PackedSamples(IterableDataset):
    """Endless stream of concatenated rows: `input_ids`, `labels`, `position_ids`, `document`.

    Each is a LongTensor [row_length]. `document` is the index of the sample in its row, -1 for padding.
    """

    def __init__(
        self,
        config: LanguageModelConfig,
        tokenizer: PreTrainedTokenizerBase,
        answers: Sequence[tuple[Problem, str]] = (),
    ) -> None:
        self.config, self.tokenizer, self.answers = config, tokenizer, answers
        self.total_rows = config.max_steps * config.per_device_train_batch_size * config.gradient_accumulation_steps

    def _samples(self, rng: Random, progress: list[float]) -> Iterator[tuple[list[int], list[int]]]:
        c, tokenizer = self.config, self.tokenizer
        task = load_task(c.task, **c.task_options)
        own = self._worked_answers(task)
        theirs = _endlessly(self.answers, rng)
        while True:
            while rng.random() < c.drill_share * max(0.0, 1 - progress[0] / c.drill_until):
                text = drill(rng, c.drill_max_number, in_parts=c.drill_in_parts)
                ids = [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
                yield ids, list(ids)
            problem, solution = next(theirs if self.answers and rng.random() < c.answer_share else own)
            messages = (
                problem.prompt if isinstance(problem.prompt, list) else [{"role": "user", "content": problem.prompt}]
            )
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            ids = tokenizer(solution, add_special_tokens=False).input_ids
            answer = ids + [tokenizer.eos_token_id]  # noqa: RUF005  (typed as a text or a list)
            yield prompt + answer, [IGNORED] * len(prompt) + answer

    def _worked_answers(self, task: Task) -> Iterator[tuple[Problem, str]]:
        """Yield the task's problems with their solutions; a finite task starts again."""
        problem = None
        while True:
            for problem in task.problems("train", seed=self.config.seed):
                if problem.solution is None:
                    raise ParseError(
                        f"task {task.name} has no solution for problem {problem.id}; a language model needs solutions"
                    )
                yield problem, problem.solution
            if problem is None:
                raise ParseError(f"task {task.name} has no training problems")

    def _fitting(self, samples: Iterator[tuple[list[int], list[int]]]) -> Iterator[tuple[list[int], list[int]]]:
        """Yield the samples that fit in a row; raise ValueError after `_MISSES` longer samples in succession."""
        missed = 0
        for sample in samples:
            missed = 0 if len(sample[0]) <= self.config.row_length else missed + 1
            if missed == _MISSES:
                raise ParseError(
                    f"row_length is {self.config.row_length}, but {missed} successive samples were longer: raise "
                    "row_length"
                )
            if not missed:
                yield sample

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        length, progress, rows = self.config.row_length, [0.0], 0
        samples = self._fitting(self._samples(Random(self.config.seed), progress))
        pool: list[tuple[list[int], list[int]]] = []
        while True:
            while len(pool) < 64:
                pool.append(next(samples))
            row: dict[str, list[int]] = {"input_ids": [], "labels": [], "position_ids": [], "document": []}
            document = 0
            while True:  # first fit: the oldest waiting sample that fits
                remaining = length - len(row["input_ids"])
                fit = next((i for i, sample in enumerate(pool) if len(sample[0]) <= remaining), None)
                if fit is None:
                    break
                ids, labels = pool.pop(fit)
                row["input_ids"] += ids
                # No loss on the first token of a sample, because the previous sample does not predict this token.
                row["labels"] += [IGNORED, *labels[1:]]
                row["position_ids"] += range(len(ids))
                row["document"] += [document] * len(ids)
                document += 1
            pad = length - len(row["input_ids"])
            fill = {
                "input_ids": 0,
                "labels": IGNORED,
                "position_ids": 0,
                "document": -1,
            }
            yield {key: torch.tensor(values + [fill[key]] * pad) for key, values in row.items()}
            rows += 1
            progress[0] = rows / self.total_rows


def _endlessly(answers: Sequence[tuple[Problem, str]], rng: Random) -> Iterator[tuple[Problem, str]]:
    while answers:
        yield from rng.sample(answers, len(answers))


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Stack rows; the attention mask [B, 1, T, T] is causal within each document."""
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    document = batch.pop("document")
    length = document.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    batch["attention_mask"] = ((document[:, :, None] == document[:, None, :]) & causal)[:, None]
    return batch
