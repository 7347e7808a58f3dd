"""Counts over labelled rows in one pass, for the data set card and `parse-data inspect`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from data_tools.labels.rollout_counts import NO_ROLLOUTS, RolloutCounts
from data_tools.labels.rows import LabelledDraft

BINS = 10  # bins for the position of the first error


class DraftCounts(NamedTuple):
    """Counts of drafts at one temperature. The tokens that a perfect judge keeps are an upper bound for any judge."""

    drafts: int = 0
    right: int = 0
    """Drafts with a right answer."""
    whole: int = 0
    """Drafts without error, which a perfect judge accepts completely."""
    tokens: int = 0
    kept: int = 0
    """Tokens that a perfect judge keeps (`LabelledDraft.kept_by_oracle`)."""


@dataclass
class Summary:
    """Counts of a data set of labelled drafts."""

    rows: int = 0
    prefixes: int = 0
    valid: int = 0
    measured: int = 0
    """Prefixes with a measured value; the other labels were inferred."""
    undecided: int = 0
    """Prefixes without a label, which `prefixes` does not include."""
    confidence: float = 0.0
    """Sum of the confidences of all labels."""
    without_label: int = 0
    """Drafts without any label, which no other count includes, except `undecided`."""
    correct: int = 0
    unfinished: int = 0
    with_error: int = 0
    error_position: list[int] = field(default_factory=lambda: [0] * BINS)
    """Drafts with first invalid segment k of K, in bins of k / K."""
    error_segment: Counter[int] = field(default_factory=Counter)
    """Drafts by the index of the first invalid segment."""
    temperatures: dict[float, DraftCounts] = field(default_factory=dict)
    """Counts by temperature; 0 for greedy drafts, which inference uses."""
    target_values: dict[str, float | None] = field(default_factory=dict)
    """Target value by problem."""
    rollouts: RolloutCounts = NO_ROLLOUTS
    """Rollouts of the build, also those of problems without rows; zero for other data."""
    left_out: int = 0
    """Problems that the build left out as training problems of a model, or by the option exclude of the task."""

    def figures(self) -> dict[str, int]:
        """The main counts by name, for a tracker."""
        names = ("rows", "prefixes", "valid", "undecided", "without_label", "correct", "unfinished", "with_error")
        return {name: getattr(self, name) for name in (*names, "left_out")}

    def add(self, row: LabelledDraft) -> None:
        """Count one row."""
        self.undecided += row.undecided
        if row.undecided and not row.labels:
            self.without_label += 1
            return
        self.rows += 1
        self.prefixes += len(row.labels)
        self.valid += sum(row.labels)
        self.measured += sum(value is not None for value in row.values)
        self.confidence += sum(row.confidence)
        self.correct += bool(row.draft_correct)
        self.unfinished += row.finished is False
        error = row.first_error
        if error is not None:
            self.with_error += 1
            self.error_position[error * BINS // len(row.labels)] += 1
            self.error_segment[error] += 1
        if row.temperature is not None:
            before = self.temperatures.get(row.temperature, DraftCounts())
            own = (1, bool(row.draft_correct), error is None, len(row.draft_ids), row.kept_by_oracle)
            self.temperatures[row.temperature] = DraftCounts(*map(sum, zip(before, own, strict=True)))
        self.target_values[row.problem] = row.target_value

    @property
    def problems(self) -> int:
        return len(self.target_values)

    @property
    def target_value(self) -> float | None:
        """Mean over the problems with a known target value."""
        known = [value for value in self.target_values.values() if value is not None]
        return sum(known) / len(known) if known else None

    @property
    def unsolved(self) -> int:
        """Number of problems that the target never solved from the bare prompt."""
        return sum(value == 0 for value in self.target_values.values())

    @property
    def knows_errors(self) -> bool:
        """Whether drafts have labels inside; labels of whole drafts do not say where an error is."""
        return self.prefixes > self.rows

    def lines(self) -> list[tuple[str, str]]:
        """Return names and figures for a table."""
        table = [
            ("drafts", f"{self.rows:,}"),
            ("problems with drafts", f"{self.problems:,}"),
            ("prefixes", f"{self.prefixes:,}"),
            ("valid prefixes", _share(self.valid, self.prefixes)),
            ("prefixes with a value", _share(self.measured, self.prefixes)),
            ("undecided prefixes, left out", _share(self.undecided, self.prefixes + self.undecided)),
            ("mean confidence of a label", f"{self.confidence / self.prefixes:.3f}" if self.prefixes else "-"),
            ("drafts without error", _share(self.rows - self.with_error, self.rows)),
            ("drafts with a right answer", _share(self.correct, self.rows)),
            ("unfinished drafts", _share(self.unfinished, self.rows)),
        ]
        if self.rollouts.rollouts:
            table.append(("cut-off rollouts, left out", _share(self.rollouts.cut, self.rollouts.rollouts)))
        if self.rollouts.unanswered:
            table.append(("problems without a finished rollout", f"{self.rollouts.unanswered:,}"))
        if self.left_out:
            table.append(("excluded problems, left out", f"{self.left_out:,}"))
        if self.without_label:
            table.append(("drafts without any label, left out", f"{self.without_label:,}"))
        if self.target_value is not None:
            table.append(("mean target value", f"{self.target_value:.3f}"))
            table.append(("problems with target value 0", _share(self.unsolved, self.problems)))
        for temperature, counts in sorted(self.temperatures.items()):
            table.append((f"right at temperature {temperature:g}", _share(counts.right, counts.drafts)))
        for temperature, counts in sorted(self.temperatures.items()):
            if counts.tokens and self.knows_errors:
                kept = f"{_share(counts.kept, counts.tokens)}; whole drafts {_share(counts.whole, counts.drafts)}"
                table.append((f"tokens a perfect judge keeps at temperature {temperature:g}", kept))
        return table


def summarise_labels(rows: Iterable[LabelledDraft]) -> Summary:
    summary = Summary()
    for row in rows:
        summary.add(row)
    return summary


def _share(part: int, whole: int) -> str:
    return f"{part:,} ({part / whole:.1%})" if whole else f"{part:,}"
