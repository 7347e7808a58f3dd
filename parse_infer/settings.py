"""How an answer is produced: `GenerationSettings`, with its own validation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

from parse_infer.acceptance import Acceptance, check_share, check_threshold
from parse_infer.models.sampling import Sampling
from parse_infer.suggest import suggestion

Mode = Literal["validity", "exact"]
Resume = Literal["finish", "hand_back"]


@dataclass(frozen=True)
class GenerationSettings:
    """How one answer is produced. Every field can be overridden by keyword in `ParseEngine.generate`."""

    max_new_tokens: int = 512
    """Upper bound on the answer, in target tokens, the end token included."""
    threshold: float | None = None
    """A prefix holds if its validity is at least this. None: the adapter's own (0.5 if it has none). More than 1
    accepts nothing for its validity, so the (greedy) answer is the target's own; where the draft model guesses tokens
    for the target, it then does nothing else (lossless speculation)."""
    risk: float | None = None
    """Instead of a threshold: keep a promise of the engine's calibration (`parse_infer.calibration.schema`). The
    calibration then sets threshold, resume, acceptance and max_rounds."""
    mode: Mode = "validity"
    """"validity": keep what the judge finds right. "exact": keep only what the target would have written itself."""
    acceptance: Acceptance = "first_failure"
    """Up to the first prefix below the threshold, or the longest prefix that reaches it."""
    exact_tail: bool = True
    """Behind the accepted cut, use the draft tokens that equal the target's greedy choice: those right behind it are
    kept (they are free), those after the first other token are guesses for what the target writes (several tokens in
    one forward; see `parse_infer.speculation.rejected_draft`). With resume "finish" no answer changes (in
    float32). With "hand_back" what the target writes is its own greedy text either way, but the draft model takes over
    later: behind the segment in which the target first chooses another token. Applies only while `resume_sampling` is
    greedy."""
    resume: Resume = "finish"
    """"finish": the target writes the rest. "hand_back": it writes one segment, to the end of a character, and
    then the draft model goes on."""
    draft_sampling: Sampling = field(default_factory=Sampling)
    resume_sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    """The answer ends right after the first of these strings (the string itself is kept)."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the answer like the model's own end tokens: they count, and have no text."""
    ignore_eos: bool = False
    """The model's own end tokens end nothing; the answer goes on to a stop or to the budget."""
    min_tokens: int = 0
    """The answer does not end within its first tokens, this many: the target writes no end token there (in their
    place the next likely one), a draft is cut before its own, and stop strings within them do not count."""
    max_rounds: int = 32
    """With "hand_back": after this many drafts the target writes the rest."""
    adaptive: bool | None = None
    """Let the target answer alone while that has lately been faster (`parse_infer.adaptive`). None: a `Coordinator`
    does, whose requests share servers, and a `ParseEngine` does not. Lossless speculation (a threshold above 1 where
    the draft model guesses tokens) has no draft to do without, so nothing is chosen there."""

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else () if self.stop is None else self.stop
        if not isinstance(stop, Iterable):
            raise ValueError(f"stop is {stop!r}; it must be a text or a list of texts.")
        object.__setattr__(self, "stop", tuple(stop))
        for name in ("max_new_tokens", "max_rounds"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a whole number of at least 1.")
        self._check_ends()
        for name, choice in (("mode", Mode), ("acceptance", Acceptance), ("resume", Resume)):
            value, allowed = getattr(self, name), get_args(choice)
            if value not in allowed:
                raise ValueError(f"{name} is {value!r}; it must be one of: {', '.join(allowed)}.")
        for name in ("draft_sampling", "resume_sampling"):
            if not isinstance(getattr(self, name), Sampling):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be a Sampling(temperature=…, …).")
        for string in self.stop:
            if not isinstance(string, str) or not string:
                raise ValueError(f"stop contains {string!r}; a stop string is a text of at least 1 character.")
        if self.threshold is not None:
            check_threshold(self.threshold)
        if self.risk is not None:
            check_share(self.risk, "risk")
        if self.mode == "exact" and not self.resume_sampling.greedy:
            raise ValueError(
                f"mode 'exact' compares with the target's greedy choice, but resume_sampling.temperature is "
                f"{self.resume_sampling.temperature}; set it to 0 or use mode 'validity'."
            )

    def _check_ends(self) -> None:
        if isinstance(self.stop_token_ids, str) or not isinstance(self.stop_token_ids, Iterable):
            raise ValueError(f"stop_token_ids is {self.stop_token_ids!r}; it must be a list of token ids.")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for token in self.stop_token_ids:
            if isinstance(token, bool) or not isinstance(token, int):
                raise ValueError(f"stop_token_ids contains {token!r}; a token id is a whole number.")
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos is {self.ignore_eos!r}; it must be True or False.")
        if isinstance(self.min_tokens, bool) or not isinstance(self.min_tokens, int) or self.min_tokens < 0:
            raise ValueError(f"min_tokens is {self.min_tokens!r}; it must be a whole number of at least 0.")
        if self.min_tokens > self.max_new_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}, but max_new_tokens is {self.max_new_tokens}.")

    def override(self, **changes: Any) -> GenerationSettings:
        """A copy with some fields changed; ValueError for a name that is no field, with the closest one."""
        known = [f.name for f in fields(self)]
        for name in changes:
            if name not in known:
                raise ValueError(f"{name!r} is not a generation setting; {suggestion(name, known)}")
        return replace(self, **changes)
