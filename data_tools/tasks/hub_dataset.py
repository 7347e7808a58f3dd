"""Problems from any data set of the Hugging Face Hub, a local folder, or parquet, csv and json files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from string import Formatter
from typing import TYPE_CHECKING, Any

from data_tools.tasks.row_files import rows_of_files
from data_tools.tasks.row_task import RowTask, as_text, check_prompt
from data_tools.tasks.task import SPLITS, Problem, Split, check_split, prompt_id, split_of
from parse_infer.errors import ParseError

if TYPE_CHECKING:
    from datasets import DatasetBuilder

_BUFFER = 10_000  # rows


@dataclass
class HubDataset(RowTask):
    """Problems from a data set that `datasets.load_dataset` streams, without remote code.

    The seed shuffles the files, and the rows within a buffer of 10,000. Repeated prompts are left out. Our splits of
    one source split are disjoint: by the hash of the prompt, validation and test get 10 % each.

    Args:
        path: Hub id, local folder, or `parquet`, `csv` or `json` with `data_files`.
        subset: configuration of the data set.
        data_files: path, or mapping from split names to paths.
        split_names: the data set's name of train, validation or test, where it differs. A data set without validation
            or test has these problems in train.
        prompt: column (text or messages), or a template such as `{question}\\nA) {choices[0]}`.
        reference: column or template.
        choices: column of a list of options, which are written below the prompt as A), B), …
        instruction: text after the prompt.
        check_with: as in task jsonl. For `choice` the index of an option, from 0, becomes its letter.
        id: column; default: the hash of the prompt.
    """

    subset: str | None = None
    data_files: str | dict[str, Any] | None = None
    split_names: dict[str, str] = field(default_factory=dict)
    prompt: str = "prompt"
    reference: str = "reference"
    choices: str | None = None
    instruction: str = ""
    id: str | None = None
    name: str = "dataset"

    _PATH = "a Hugging Face id, a folder, or parquet, csv or json with data_files"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.path in ("parquet", "csv", "json") and not self.data_files:  # else datasets takes the working folder's
            raise ParseError(f"path {self.path} of task {self.name} needs the option data_files: the files")
        for split in self.split_names:
            check_split(split)

    def problems(self, split: Split, seed: int = 0, limit: int | None = None) -> Iterator[Problem]:
        check_split(split)
        rows, sharing = self._source(split)
        seen: set[str] = set()
        for row in self._read_rows(rows.shuffle(seed=seed, buffer_size=_BUFFER)):
            if len(seen) == limit:
                return
            problem = self._problem(row, split, sharing)
            if problem is not None and (key := prompt_id(problem.prompt)) not in seen:
                seen.add(key)
                yield problem

    def _source(self, split: Split) -> tuple[Any, list[Split]]:
        """Return the rows of the source split, and our splits that share it."""
        from datasets import load_dataset_builder

        try:
            sources = _streams(load_dataset_builder(self.path, self.subset, data_files=self.data_files), self._columns)
        except Exception as error:  # from the Hub, the file system or a file's format
            reason = " ".join(str(error).partition("\nExample")[0].split())
            raise ParseError(f"the data set {self.path!r} cannot be loaded: {reason}") from error
        names = {ours: self.split_names.get(ours, ours) for ours in SPLITS}
        for ours in SPLITS:
            if ours not in {*sources, *self.split_names}:
                names[ours] = names["train"]
        if names[split] not in sources:
            raise ParseError(
                f"the data set {self.path!r} has no split {names[split]!r}, only {', '.join(sources)}: choose another "
                f"split, or name one under {split} in split_names"
            )
        return sources[names[split]], [ours for ours in SPLITS if names[ours] == names[split]]

    def _read_rows(self, rows: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        try:
            yield from rows
        except ParseError:
            raise
        except Exception as error:  # from the network or a file's format
            reason = " ".join(str(error).split())[:200]
            raise ParseError(f"the data set {self.path!r} cannot be read: {reason}") from error

    @property
    def _columns(self) -> set[str]:
        """The columns that the options name."""
        patterns = [one for one in (self.prompt, self.reference, self.choices, self.id) if one is not None]
        return {column for pattern in patterns for column in _columns_of(pattern)}

    def _problem(self, row: Mapping[str, Any], split: Split, sharing: list[Split]) -> Problem | None:
        """Return a row's problem, or None if the row belongs to another one of the splits that share the source."""
        prompt = self._read(row, "prompt", self.prompt)
        where = f"{self.path}, the row with prompt {str(prompt)[:40]!r}"
        check_prompt(where, prompt)
        if split_of(prompt, sharing) != split:
            return None
        options, labels = self._options(row)
        missing = self.reference == "reference" and "reference" not in row and not self.needs_reference
        reference = "" if missing or self.check_with == "none" else self._reference(row, where, labels, len(options))
        below = "".join(f"\n{chr(ord('A') + i)}) {option}" for i, option in enumerate(options)) + self.instruction
        if isinstance(prompt, str):
            prompt += below
        elif below:
            last = prompt[-1]["content"]
            said = [*last, {"type": "text", "text": below}] if isinstance(last, list) else f"{last or ''}{below}"
            prompt = [*prompt[:-1], {**prompt[-1], "content": said}]
        name = None if self.id is None else self._read(row, "id", self.id)
        return Problem(prompt_id(prompt) if name in (None, "") else str(name), prompt, reference)

    def _options(self, row: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
        """Return the options of a multiple-choice question, and the data set's labels of them if it has any."""
        if self.choices is None:
            return [], []
        options = self._read(row, "choices", self.choices)
        labels = []
        if isinstance(options, dict):  # as in ARC
            labels = options.get("label", [])
            options = options.get("text")
        if not isinstance(options, list):
            raise ParseError(f"{self.path}, column {self.choices}: not a list of options but {str(options)[:40]!r}")
        return options, labels

    def _reference(self, row: Mapping[str, Any], where: str, labels: list[Any], n_options: int) -> str:
        reference = self._read(row, "reference", self.reference)
        if self.check_with == "choice":
            index = labels.index(reference) if reference in labels else reference
            if str(index).isdecimal():
                if n_options and int(index) >= n_options:
                    raise ParseError(
                        f"{where}: the reference is {reference!r} of {n_options} options, which count from 0: choose "
                        "another column with the option reference"
                    )
                reference = chr(ord("A") + int(index))
        self.check_reference(where, reference)
        return as_text(reference)

    def _read(self, row: Mapping[str, Any], option: str, pattern: str) -> Any:
        """Return the value of a column, or a filled template."""
        try:
            filled = {column: "" if value is None else value for column, value in row.items()}
            return pattern.format_map(filled) if "{" in pattern else row[pattern]
        except (LookupError, ValueError, TypeError, AttributeError) as error:
            raise ParseError(
                f"option {option} of task {self.name} is {pattern!r}, which does not fit the columns of "
                f"{self.path!r}: {', '.join(row)}"
            ) from error


def _streams(builder: DatasetBuilder, columns: set[str]) -> dict[str, Any]:
    """Return the rows by split. Columns that nobody needs are not read, because their types may differ by file."""
    from datasets import IterableDataset
    from datasets.packaged_modules.csv.csv import Csv
    from datasets.packaged_modules.json.json import Json
    from datasets.packaged_modules.parquet.parquet import Parquet

    if isinstance(builder, (Json, Csv)):
        delimiter = builder.config.sep if isinstance(builder, Csv) else None
        return {
            str(split): IterableDataset.from_generator(
                rows_of_files, gen_kwargs={"files": list(files), "delimiter": delimiter}
            )
            for split, files in builder.config.data_files.items()
        }
    if isinstance(builder, Parquet):
        import fsspec
        from pyarrow.parquet import read_schema

        with fsspec.open(next(iter(builder.config.data_files.values()))[0]) as file:
            builder.config.columns = [name for name in read_schema(file).names if name in columns]
    return dict(builder.as_streaming_dataset())


def _columns_of(pattern: str) -> set[str]:
    """Return the columns of a template, or the pattern itself, which is a column."""
    if "{" not in pattern:
        return {pattern}
    try:
        fields = [field for _, field, _, _ in Formatter().parse(pattern) if field is not None]
    except ValueError:  # a template that fits no row
        return set()
    return {re.split(r"[.[]", field)[0] for field in fields}
