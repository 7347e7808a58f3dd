"""Figures of judges on the same held-out drafts, with paired differences: the arithmetic of `tools.judge_ladder`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from sklearn.metrics import average_precision_score, roc_auc_score

from data_tools.labels.rows import LabelledDraft
from parse_train.judge.metrics import Floats, ScoredDrafts, first_error

SHARES = (0.01, 0.02, 0.05)
"""Shares of the errors that a judge misses, or of the requests that it loses."""
RANKING = ("auroc", "ap_error", "auroc_draft", "ap_error_draft")
DECISIONS = tuple(f"{name}_{share:g}" for name in ("behind_at", "corrections_at", "kept_at_lost") for share in SHARES)
FIGURES = (*RANKING, *DECISIONS)
ENOUGH = 500  # wrong drafts; 1 % of fewer is less than five errors
_LEAST = float(np.nextafter(0, 1))  # tokens without doubt, such as the target's first choices, are never rejected
_EDGES = 0.1  # the lowest share of the errors' doubts: thresholds of every resample at the largest of `SHARES`


@dataclass(frozen=True)
class HeldOut:
    """N labelled drafts of at most K cuts.

    Attributes:
        drafts: labels and cuts [N, K]; its scores are not used.
        owner: int [N], the number of each draft's problem.
        chance: float64 [N], the target's chance of a right answer, which a wrong draft loses; 1 where it is unknown.
    """

    drafts: ScoredDrafts
    owner: NDArray[np.int64]
    chance: Floats

    @classmethod
    def of(cls, rows: Sequence[LabelledDraft]) -> HeldOut:
        drafts = ScoredDrafts.from_rows(
            [[0.0] * len(row.cuts) for row in rows], [row.labels for row in rows], [row.cuts for row in rows]
        )
        owner = np.unique([row.problem for row in rows], return_inverse=True)[1]
        return cls(drafts, owner, np.array([1.0 if row.target_value is None else row.target_value for row in rows]))

    def part(self, rows: NDArray[np.int64]) -> HeldOut:
        drafts = ScoredDrafts(self.drafts.scores[rows], self.drafts.labels[rows], self.drafts.cuts[rows])
        return HeldOut(drafts, self.owner[rows], self.chance[rows])

    @cached_property
    def error(self) -> NDArray[np.int64]:
        """int [N], the index of the first wrong cut; -1 for a right draft."""
        return first_error(self.drafts.labels == 1, self.drafts.real)

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """int [N, K], the tokens of each segment, 0 in padding."""
        before = np.concatenate([np.zeros_like(self.drafts.cuts[:, :1]), self.drafts.cuts[:, :-1]], axis=1)
        return np.where(self.drafts.real, self.drafts.cuts - before, 0)

    @cached_property
    def right(self) -> NDArray[np.int64]:
        """int [N, K], the tokens of each segment before the first wrong one; else 0."""
        last = np.where(self.error < 0, self.sizes.shape[1], self.error)
        return np.where(np.arange(self.sizes.shape[1]) < last[:, None], self.sizes, 0)

    @property
    def length_auroc(self) -> float:
        """The AUROC of the draft's length alone, short drafts taken as right."""
        return round(float(roc_auc_score(self.error < 0, -self.drafts.cuts.max(axis=1))), 4)


@dataclass(frozen=True)
class Judged:
    """One judge's doubt about the drafts of a `HeldOut`.

    Attributes:
        doubt: float64 [N, K], the doubt about each prefix, at least 0; 0 in padding.
        edges: float64 [G], ascending doubts from which on a prefix is rejected.
        stops: int [N, G], how often an answer stops in the draft's right tokens.
    """

    doubt: Floats
    edges: Floats
    stops: NDArray[np.int64]

    @classmethod
    def of(cls, added: Sequence[Floats], held: HeldOut, adds_up: bool) -> Judged:
        """Judge the drafts by their tokens.

        Args:
            added: for each draft the doubt that each of its tokens adds, at least 0.
            adds_up: whether the doubt about a prefix is the sum of these, as in a head, or the highest, as in a rule.
        """
        each = np.zeros((len(added), max(map(len, added))))
        for row, values in zip(each, added, strict=True):
            row[: len(values)] = values
        total = each.cumsum(axis=1) if adds_up else np.maximum.accumulate(each, axis=1)
        doubt = np.take_along_axis(total, (held.drafts.cuts - 1).clip(0), axis=1)
        doubt = np.where(held.drafts.real, doubt, 0.0)
        at_error = np.sort(doubt[np.flatnonzero(held.error >= 0), held.error[held.error >= 0]])
        edges = np.unique(np.append(at_error[: int(_EDGES * len(at_error)) + 1], 0).clip(_LEAST))
        right = np.arange(each.shape[1]) < held.right.sum(axis=1)[:, None]
        return cls(doubt, edges, count_stops(each, right, edges, adds_up))


def count_stops(each: Floats, right: NDArray[np.bool_], edges: Floats, adds_up: bool) -> NDArray[np.int64]:
    """Count the right tokens at which an answer stops, if the target corrects each of them, int [N, G].

    The answer is the draft, token by token. Where the doubt reaches an edge, that token counts, and the answer goes on
    without the token's own doubt, as in blocks, where the target writes this token itself.

    Args:
        each: float64 [N, T], the doubt that each token adds.
        right: bool [N, T], the tokens that count.
        edges: float64 [G].
    """
    doubt, stops = np.zeros((len(each), len(edges))), np.zeros((len(each), len(edges)), np.int64)
    for own, counts in zip(each.T[:, :, None], right.T[:, :, None], strict=True):
        beyond = doubt + own if adds_up else np.maximum(doubt, own)
        stop = beyond >= edges
        stops += stop & counts
        doubt = np.where(stop, doubt, beyond)
    return stops


def compare_rungs(
    judges: Mapping[str, Sequence[Judged]], held: HeldOut, resamples: int, seed: int = 0
) -> dict[str, dict[str, Any]]:
    """Return, for each rung, its `FIGURES`, and `to_first`: their differences to the first rung with an interval."""
    rows_of = [np.flatnonzero(held.owner == problem) for problem in range(held.owner.max() + 1)]
    generator, names = np.random.default_rng(seed), list(judges)

    def means(rows: NDArray[np.int64]) -> Floats:
        part = held.part(rows)
        return np.array([np.mean([figures(each, part, rows) for each in judges[name]], axis=0) for name in names])

    whole = means(np.arange(len(held.owner)))
    drawn = np.array(
        [
            means(np.concatenate([rows_of[i] for i in generator.integers(len(rows_of), size=len(rows_of))]))
            for _ in track(range(resamples), "bootstrap", console=Console(stderr=True))
        ]
    )
    apart = np.quantile(drawn - drawn[:, :1], [0.025, 0.975], axis=0)
    result: dict[str, dict[str, Any]] = {}
    for i, name in enumerate(names):
        result[name] = {"seeds": len(judges[name]), **dict(zip(FIGURES, whole[i].round(5).tolist(), strict=True))}
        result[name]["to_first"] = {
            figure: [round(float(x), 5) for x in (whole[i, j] - whole[0, j], apart[0, i, j], apart[1, i, j])]
            for j, figure in enumerate(FIGURES)
        }
    return result


def figures(judged: Judged, held: HeldOut, rows: NDArray[np.int64]) -> list[float]:
    """Return `FIGURES` of the drafts `rows`, whose facts are `held`.

    A draft's score is that of its last prefix. The judge misses an error if it accepts the first wrong prefix. At the
    threshold where it misses the share X of them:

    - `behind_at_X` is the share of the right tokens from the first rejected segment on;
    - `corrections_at_X` is the number of right tokens, of a hundred, at which an answer stops (`count_stops`).

    `kept_at_lost_X` is the share of the draft tokens that are kept where the share X of the drafts loses its request.
    PARSE's rule decides: a draft is kept up to its first rejected prefix, and loses a request with the target's chance
    of a right answer if it is kept beyond its first error.
    """
    doubt, drafts, wrong = judged.doubt[rows], held.drafts, held.error >= 0
    real, whole = drafts.real, doubt.max(axis=1)
    labels = drafts.labels[real]
    ranking = [
        roc_auc_score(labels, -doubt[real]),
        average_precision_score(1 - labels, doubt[real]),
        roc_auc_score(~wrong, -whole),
        average_precision_score(wrong, whole),
    ]
    at_error, chance = doubt[np.flatnonzero(wrong), held.error[wrong]], held.chance[wrong]
    order = np.argsort(at_error, kind="stable")
    at_error, lost = np.append(at_error[order], np.inf), chance[order].cumsum()
    n_right = max(1, held.right.sum())
    behind, corrections, kept = [], [], []
    for share in SHARES:
        edge = max(_LEAST, at_error[int(share * len(lost))])
        behind.append(held.right[doubt >= edge].sum() / n_right)
        place = max(0, np.searchsorted(judged.edges, edge, side="right") - 1)
        corrections.append(100 * judged.stops[rows, place].sum() / n_right)
        edge = max(_LEAST, at_error[np.searchsorted(lost, share * len(rows) + 1e-9, side="right")])
        kept.append(held.sizes[doubt < edge].sum() / held.sizes.sum())
    return [float(value) for value in (*ranking, *behind, *corrections, *kept)]


def few_errors(wrong_drafts: int) -> str | None:
    """Return a warning if the drafts have too few errors for strict thresholds."""
    return f"{wrong_drafts:,} wrong drafts, fewer than {ENOUGH}" if wrong_drafts < ENOUGH else None
