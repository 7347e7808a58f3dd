"""`GenerationSettings`: the validated settings of one answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from parse_infer.errors import SettingsError, is_unicode
from parse_infer.settings.acceptance import Acceptance, check_share, check_threshold
from parse_infer.settings.fields import plain, setting, setting_fields
from parse_infer.settings.sampling import Sampling
from parse_infer.suggest import suggestion

SAMPLING = tuple(setting_fields(Sampling))
DRAFT_TEMPERATURE = "draft_temperature"
Mode = Literal["validity", "exact"]
BlockTokens = int | Literal["auto", "whole"]


@dataclass(frozen=True)
class GenerationSettings:
    """Settings of one answer. `ParseEngine.generate` accepts every field as a keyword argument.

    It also accepts `temperature`, `top_p`, `top_k` and `seed`, which set both models' sampling, and
    `draft_temperature`, which sets the draft model's alone (`override`).

    `parse-infer generate` (`parse_infer.cli.setting_options`), HTTP (`parse_infer.serve.protocol.fields`) and the
    benchmark (`parse_infer.evaluation.run`) offer the fields with these texts and bounds.
    """

    max_new_tokens: int = setting(512, "Maximum number of answer tokens, end token included.", ge=1)
    threshold: float | None = setting(
        None,
        "Accept a prefix whose validity is at least this; above 1 accepts nothing. Default: the judge's.",
        ge=0,
    )
    """None without a calibrated adapter: 0.5. Above 1, the draft model writes no draft if it proposes tokens for the
    target."""
    risk: float | None = setting(
        None, "Largest share of lost requests, by the calibration; replaces threshold.", gt=0, lt=1
    )
    """The calibration of this sampling (`parse_infer.calibration.promises`) sets the fields of `OperatingPoint`."""
    mode: Mode = setting(
        "validity",
        "validity: accept the prefix that the judge accepts. exact: accept only tokens that equal the target's greedy "
        "choice (in float32): lossless speculation, which needs no judge.",
    )
    acceptance: Acceptance = setting(
        "first_failure",
        "first_failure: accept up to the first cut below the threshold. longest: accept up to the last cut that "
        "reaches it.",
    )
    keep_greedy_match: bool = setting(
        True,
        "After the accepted cut, also keep draft tokens up to the first mismatch with the target's greedy choice; no "
        "effect with sampling.",
    )
    """`token_drafters.rejected_draft` proposes the tokens after the mismatch. No answer changes (in float32)."""
    block_tokens: BlockTokens = setting(
        "auto",
        "Draft tokens that the target reads at once. At the first rejected token of a block the target's own token "
        "takes its place, and the draft model continues. auto: each block ends where one more token is not faster. "
        "whole: the draft is a whole answer, and the target writes the rest after a rejection.",
        ge=1,
    )
    """Judges that score segments, not tokens, turn "auto" into "whole"; in blocks of a number the target then writes a
    segment. If a draft server returns no log-probabilities, "auto" drafts the rest of the answer; else see
    `parse_infer.decoding.block_length`. A given draft text is always read whole. None means "whole", the published
    method (PARSE, arXiv 2605.04263)."""
    strict_tokens: int | None = setting(
        None,
        "The target writes this many tokens of the answer itself, before the first draft; default: 2 over servers, 0 "
        "for local models.",
        ge=0,
    )
    """The model that writes the first tokens determines whether a request is refused (SecureSD, arXiv 2610.08678).
    The default is 0 where no judge decides, with a `risk` and with a given draft."""
    strict_answer: bool = setting(
        False,
        "For models that think first: a judge decides about the thinking only; of the answer after it, draft tokens "
        "are kept only if they equal the target's greedy choice.",
    )
    """The policy of TensorRT-LLM's relaxed acceptance. With sampling the target writes the answer itself."""
    draft_sampling: Sampling = setting(Sampling(), "Sampling of the draft model.")
    resume_sampling: Sampling = setting(Sampling(), "Sampling of the target.")
    stop: tuple[str, ...] = setting((), "Stop strings: the answer ends after the first one and includes it.")
    stop_token_ids: tuple[int, ...] = setting((), "Additional end tokens; they count as tokens and have no text.")
    ignore_eos: bool = setting(
        False, "Continue past the model's own end tokens, up to a stop string, a stop token or the budget."
    )
    min_tokens: int = setting(0, "Minimum length in tokens: before it, no end token and no stop string ends.", ge=0)
    """Before it the target samples no end token, and a draft is cut at its end token."""
    adaptive: bool | None = setting(
        None,
        "Let the target answer alone while that measures faster; default: on over servers, off for local models.",
    )
    """See `parse_infer.decoding.adaptive`. No effect on requests without a draft, such as lossless speculation. With
    False, as with `risk`, the target does not write alone between blocks of "auto" either: measured times decide about
    no text.
    """

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else () if self.stop is None else self.stop
        if not isinstance(stop, Iterable):
            raise SettingsError(f"stop is {stop!r}; it must be a text or a list of texts.")
        object.__setattr__(self, "stop", tuple(stop))
        if self.block_tokens is None:
            object.__setattr__(self, "block_tokens", "whole")
        for one in setting_fields(type(self)).values():
            value = plain(getattr(self, one.name))
            one.check(value)
            object.__setattr__(self, one.name, value)
        self._check_ends()
        for name in ("draft_sampling", "resume_sampling"):
            object.__setattr__(self, name, _sampling(name, getattr(self, name)))
        if self.threshold is not None:
            check_threshold(self.threshold)
        if self.risk is not None:
            check_share(self.risk, "risk")
        if self.mode == "exact" and not self.resume_sampling.greedy:
            raise SettingsError(
                f"temperature is {self.resume_sampling.temperature}, but mode 'exact' compares with the target's "
                "greedy choice: set temperature to 0 or use mode 'validity'."
            )

    def _check_ends(self) -> None:
        for string in self.stop:
            if not isinstance(string, str) or not string:
                raise SettingsError(f"stop contains {string!r}; a stop string is a text of at least 1 character.")
            if not is_unicode(string):
                raise SettingsError(
                    f"stop contains {string!r}, which has half of a surrogate pair; give Unicode text."
                )
        if isinstance(self.stop_token_ids, str) or not isinstance(self.stop_token_ids, Iterable):
            raise SettingsError(f"stop_token_ids is {self.stop_token_ids!r}; it must be a list of token ids.")
        object.__setattr__(self, "stop_token_ids", tuple(map(plain, self.stop_token_ids)))
        for token in self.stop_token_ids:
            if isinstance(token, bool) or not isinstance(token, int):
                raise SettingsError(f"stop_token_ids contains {token!r}; a token id is a whole number.")
        if self.min_tokens > self.max_new_tokens:
            raise SettingsError(f"min_tokens is {self.min_tokens}, but max_new_tokens is {self.max_new_tokens}.")

    @property
    def keeps_greedy_match(self) -> bool:
        """Whether draft tokens after the cut that equal the target's greedy choice are kept."""
        return self.mode == "exact" or (self.keep_greedy_match and self.resume_sampling.greedy)

    @classmethod
    def of(cls, settings: GenerationSettings | Mapping[str, Any] | None = None, **changes: Any) -> GenerationSettings:
        """Build settings from other settings, a mapping or the defaults, with `changes` as in `override`."""
        if settings is None or isinstance(settings, Mapping):
            settings = cls().override(**{str(name): value for name, value in (settings or {}).items()})
        if not isinstance(settings, GenerationSettings):
            raise SettingsError(
                f"settings is {settings!r}; it must be GenerationSettings(…) or a mapping of settings."
            )
        return settings.override(**changes) if changes else settings

    def override(self, **changes: Any) -> GenerationSettings:
        """Return a copy with some fields changed.

        `temperature`, `top_p`, `top_k` and `seed` change the sampling of both models; `draft_temperature` changes that
        of the draft model alone. Raise ValueError for an unknown name and suggest the closest.
        """
        known = [*setting_fields(type(self)), *SAMPLING, DRAFT_TEMPERATURE]
        for name in changes:
            if name not in known:
                raise SettingsError(f"{name!r} is not a generation setting; {suggestion(str(name), known)}")
        both = {name: changes.pop(name) for name in SAMPLING if name in changes}
        drafts = changes.pop(DRAFT_TEMPERATURE, None)
        alone = {} if drafts is None else {"temperature": drafts}
        for name, own in (("draft_sampling", both | alone), ("resume_sampling", both)):
            if own:
                changes[name] = replace(_sampling(name, changes.get(name, getattr(self, name))), **own)
        return replace(self, **changes)


def _sampling(name: str, value: object) -> Sampling:
    if isinstance(value, Mapping):
        for key in value:
            if key not in SAMPLING:
                raise SettingsError(f"{key!r} is no field of {name}; {suggestion(str(key), SAMPLING)}")
        value = Sampling(**value)
    if not isinstance(value, Sampling):
        raise SettingsError(f"{name} is {value!r}; it must be a Sampling(temperature=…, …).")
    return value
