"""How many rollouts of a build were cut off by their budget; these rollouts decide nothing."""

from __future__ import annotations

from dataclasses import dataclass

CUT_SHARE = 0.02  # share of cut rollouts above which a build warns


@dataclass(frozen=True)
class RolloutCounts:
    """Counts over problems, including those without rows.

    Attributes:
        rollouts: rollouts from bare prompts and prefixes.
        cut: those that had no end token within their budget.
        unanswered: problems whose rollouts from the bare prompt were all cut off.
    """

    rollouts: int = 0
    cut: int = 0
    unanswered: int = 0

    def __add__(self, other: RolloutCounts) -> RolloutCounts:
        return RolloutCounts(self.rollouts + other.rollouts, self.cut + other.cut, self.unanswered + other.unanswered)

    def warning(self, max_rollout_tokens: int) -> str | None:
        """Return a sentence for the user if more than 2 % of the rollouts were cut off; else None."""
        if self.cut <= CUT_SHARE * self.rollouts:
            return None
        return (
            f"warning: {self.cut:,} of {self.rollouts:,} rollouts ({self.cut / self.rollouts:.1%}) were cut off at "
            f"max_rollout_tokens, {max_rollout_tokens}, and decide nothing: raise max_rollout_tokens in another "
            "output_dir"
        )


NO_ROLLOUTS = RolloutCounts()
