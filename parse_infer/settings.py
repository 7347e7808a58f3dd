"""`GenerationSettings`: the validated settings of one answer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

from parse_infer.acceptance import Acceptance, check_share, check_threshold
from parse_infer.errors import SettingsError
from parse_infer.models.sampling import Sampling
from parse_infer.suggest import suggestion

Mode = Literal["validity", "exact"]
Resume = Literal["finish", "hand_back"]


@dataclass(frozen=True)
class GenerationSettings:
    """Settings of one answer. `ParseEngine.generate` accepts every field as a keyword argument."""

    max_new_tokens: int = 512
    """Maximum length of the answer in target tokens, end token included."""
    threshold: float | None = None
    """Minimum validity of an accepted prefix. None: the adapter's calibrated threshold, else 0.5. A threshold above 1
    accepts no prefix, so a greedy answer equals the target's own. The draft model then writes no draft if it proposes
    tokens for the target: lossless speculation."""
    risk: float | None = None
    """Risk level to keep, instead of a threshold (`parse_infer.calibration.schema`). The engine's calibration then
    sets threshold, resume, acceptance and max_rounds."""
    mode: Mode = "validity"
    """"validity": accept the prefix that the judge accepts. "exact": accept only tokens that equal the target's greedy
    choice."""
    acceptance: Acceptance = "first_failure"
    """"first_failure": accept up to the first prefix below the threshold. "longest": accept the longest prefix that
    reaches the threshold."""
    keep_greedy_match: bool = True
    """Use the draft tokens after the accepted cut. The engine accepts tokens up to the first mismatch with the
    target's greedy choice. After it, `parse_infer.speculation.rejected_draft` proposes the remaining tokens. With
    resume "finish" no answer changes (in float32). With "hand_back" the target still writes its own greedy text, but
    its segment starts at the mismatch, so the draft model takes over later. No effect with sampled tokens."""
    resume: Resume = "finish"
    """"finish": the target writes the rest. "hand_back": the target writes one segment, up to a complete character,
    then the draft model continues."""
    draft_sampling: Sampling = field(default_factory=Sampling)
    resume_sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    """Stop strings. The answer ends after the first one and includes it."""
    stop_token_ids: tuple[int, ...] = ()
    """Additional end tokens. They count as tokens and have no text."""
    ignore_eos: bool = False
    """Continue past the model's own end tokens, up to a stop string, a stop token or the budget."""
    min_tokens: int = 0
    """Minimum length in tokens. Before it the target samples no end token, a draft is cut at its end token, and stop
    strings are ignored."""
    max_rounds: int = 32
    """With "hand_back": maximum number of drafts, after which the target writes the rest."""
    adaptive: bool | None = None
    """Answer with the target alone while that has recently been faster (`parse_infer.adaptive`). None: on for servers,
    off for local models. No effect on requests without a draft, such as lossless speculation (see `threshold`)."""

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else () if self.stop is None else self.stop
        if not isinstance(stop, Iterable):
            raise SettingsError(f"stop is {stop!r}; it must be a text or a list of texts.")
        object.__setattr__(self, "stop", tuple(stop))
        for name in ("max_new_tokens", "max_rounds"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SettingsError(f"{name} is {value!r}; it must be a whole number of at least 1.")
        self._check_ends()
        for name, choice in (("mode", Mode), ("acceptance", Acceptance), ("resume", Resume)):
            value, allowed = getattr(self, name), get_args(choice)
            if value not in allowed:
                raise SettingsError(f"{name} is {value!r}; it must be one of: {', '.join(allowed)}.")
        for name in ("draft_sampling", "resume_sampling"):
            if not isinstance(getattr(self, name), Sampling):
                raise SettingsError(f"{name} is {getattr(self, name)!r}; it must be a Sampling(temperature=…, …).")
        for string in self.stop:
            if not isinstance(string, str) or not string:
                raise SettingsError(f"stop contains {string!r}; a stop string is a text of at least 1 character.")
        if self.threshold is not None:
            check_threshold(self.threshold)
        if self.risk is not None:
            check_share(self.risk, "risk")
        if self.mode == "exact" and not self.resume_sampling.greedy:
            raise SettingsError(
                f"mode 'exact' compares with the target's greedy choice, but resume_sampling.temperature is "
                f"{self.resume_sampling.temperature}; set it to 0 or use mode 'validity'."
            )

    def _check_ends(self) -> None:
        if isinstance(self.stop_token_ids, str) or not isinstance(self.stop_token_ids, Iterable):
            raise SettingsError(f"stop_token_ids is {self.stop_token_ids!r}; it must be a list of token ids.")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for token in self.stop_token_ids:
            if isinstance(token, bool) or not isinstance(token, int):
                raise SettingsError(f"stop_token_ids contains {token!r}; a token id is a whole number.")
        if not isinstance(self.ignore_eos, bool):
            raise SettingsError(f"ignore_eos is {self.ignore_eos!r}; it must be True or False.")
        if isinstance(self.min_tokens, bool) or not isinstance(self.min_tokens, int) or self.min_tokens < 0:
            raise SettingsError(f"min_tokens is {self.min_tokens!r}; it must be a whole number of at least 0.")
        if self.min_tokens > self.max_new_tokens:
            raise SettingsError(f"min_tokens is {self.min_tokens}, but max_new_tokens is {self.max_new_tokens}.")

    def override(self, **changes: Any) -> GenerationSettings:
        """Return a copy with some fields changed. Raise ValueError for an unknown field and suggest the closest."""
        known = [f.name for f in fields(self)]
        for name in changes:
            if name not in known:
                raise SettingsError(f"{name!r} is not a generation setting; {suggestion(name, known)}")
        return replace(self, **changes)
