"""Common fields of chat and plain completion requests: OpenAI's and PARSE's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ModelWrapValidatorHandler,
    PrivateAttr,
    StrictInt,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from parse_infer.serve.errors import value_errors_as_400
from parse_infer.settings.fields import setting_fields
from parse_infer.settings.generation import GenerationSettings
from parse_infer.settings.sampling import Sampling, seed_of

LONGEST_STOP = 1000  # characters
MOST_CHOICES = 16
MOST_UNKNOWN = 8  # largest number of unknown fields that a warning names

Item = TypeVar("Item")
# Without fail_fast, pydantic collects an error for each item of a list. It checks max_length first.
AtMost16 = Annotated[list[Item], Field(max_length=16, fail_fast=True)]
AtMost1024 = Annotated[list[Item], Field(max_length=1024, fail_fast=True)]
AtMost4096 = Annotated[list[Item], Field(max_length=4096, fail_fast=True)]
_MOST_TOKENS = 1 << 20  # the largest windows in use


def _few_enough(tokens: object) -> object:
    """Refuse a list before its items are checked, which would stop the event loop for a quarter of a second."""
    if isinstance(tokens, list) and len(tokens) > _MOST_TOKENS:
        raise PydanticCustomError("too_long", f"List should have at most {_MOST_TOKENS} items, not {len(tokens)}")
    return tokens


Tokens = Annotated[list[StrictInt], Field(max_length=_MOST_TOKENS, fail_fast=True), BeforeValidator(_few_enough)]


def _unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON allows lone surrogates such as "\\ud800"; tokenizers cannot encode them
        raise PydanticCustomError("string_unicode", "not Unicode") from None
    return text


Text = Annotated[str, AfterValidator(_unicode)]


def _at_most_16(stop: object) -> object:
    if isinstance(stop, list) and len(stop) > 16:
        raise PydanticCustomError("too_many", "give at most 16 texts, not {n}", {"n": len(stop)})
    return stop


Stop = Annotated[Text | list[Text], BeforeValidator(_at_most_16), Field(json_schema_extra={"maxItems": 16})]
DEEPEST = 32  # levels of a nested object, which templates and our own code walk recursively


def _shallow(value: dict[str, Any]) -> dict[str, Any]:
    level, depth = [value], 0
    while level:
        level = [
            child
            for each in level
            if isinstance(each, dict | list)
            for child in (each.values() if isinstance(each, dict) else each)
        ]
        depth += 1
        if depth > DEEPEST:
            raise PydanticCustomError("too_deep", "the object is nested deeper than {n} levels", {"n": DEEPEST})
    return value


Nested = Annotated[dict[str, Any], AfterValidator(_shallow)]


_ONLY = "Other values are passed to the target's own server, with the vllm backend."


def neutral(*values: JsonValue) -> object:
    """A field that is supported here only with neutral values: null or one of `values`."""
    return Field(default=None, description=_ONLY, json_schema_extra={"enum": [None, *values]})


def only(*values: JsonValue) -> FieldInfo:
    """A required field that is supported here only with these values."""
    return Field(description=_ONLY, json_schema_extra={"enum": list(values)})


def ignored() -> object:
    """An OpenAI field without influence on the answer; it is not passed through."""
    return Field(default=None, description="Accepted and ignored.", exclude=True)


class Body(BaseModel):
    """A JSON object with strict types. Other fields are ignored; `unknown` names them."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)
    _unknown: tuple[str, ...] = PrivateAttr(())

    @model_validator(mode="wrap")
    @classmethod
    def _note_unknown(cls, fields: object, read: ModelWrapValidatorHandler[Self]) -> Self:
        body = read(fields)
        if isinstance(fields, dict):
            unknown = (str(name) for name in fields if name not in cls.model_fields)
            body._unknown = tuple(islice(unknown, MOST_UNKNOWN))
        return body

    def unknown(self, at: str = "") -> Iterator[str]:
        """Unknown fields, also of nested objects, as paths such as `messages.0.mood`."""
        yield from (at + name for name in self._unknown)
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, Body):
                yield from value.unknown(f"{at}{name}.")
            elif isinstance(value, list) and value and isinstance(value[0], Body):
                for i, item in enumerate(value):
                    yield from item.unknown(f"{at}{name}.{i}.")

    @field_validator("*", mode="after")
    @classmethod
    def _support_only(cls, value: object, field: ValidationInfo) -> object:
        """Report each value that `neutral` and `only` leave out as `unsupported`, beside all other errors."""
        extra = cls.model_fields[field.field_name or ""].json_schema_extra
        if isinstance(extra, dict) and "enum" in extra and value not in extra["enum"]:  # type: ignore[operator]
            values = " or ".join(json.dumps(value) for value in extra["enum"])  # type: ignore[union-attr]
            raise PydanticCustomError(
                "unsupported",
                "the local backend takes only {values}; `parse-infer serve --backend vllm` passes other values to the "
                "target's own server",
                {"values": values},
            )
        return value


class StreamOptions(Body):
    include_usage: bool | None = Field(None, description="End with a usage chunk.")
    continuous_usage_stats: bool | None = Field(
        None, description="With include_usage: each chunk has its choice's usage so far."
    )
    include_obfuscation: object = ignored()


# Settings that a request has as fields of OpenAI's or vLLM's API, not under "parse".
OUTSIDE_PARSE = {
    "max_new_tokens": ("max_tokens",),
    "draft_sampling": ("temperature", "top_p", "top_k", "seed"),  # and parse.draft_temperature
    "resume_sampling": ("temperature", "top_p", "top_k", "seed"),
    "stop": ("stop",),
    "stop_token_ids": ("stop_token_ids",),
    "ignore_eos": ("ignore_eos",),
    "min_tokens": ("min_tokens",),
}
SETTINGS = setting_fields(GenerationSettings)
ALONE = "target"  # a mode of requests only


def _parse_fields() -> dict[str, Any]:
    """The fields of `ParseOptions` that are generation settings, with their types, texts and bounds."""
    declared: dict[str, Any] = {}
    for name, one in SETTINGS.items():
        if name not in OUTSIDE_PARSE:
            hint, text, bounds = one.hint, one.help, {} if one.is_number_or_choice else one.bounds
            if name == "mode":
                hint, text = Literal[(*one.choices, ALONE)], f"{text} {ALONE}: no draft, the target answers alone."
            declared[name] = (hint | None, Field(None, description=text, **bounds))
    return declared


class ParseOptions(create_model("Settings", __base__=Body, **_parse_fields())):  # type: ignore[misc]
    """Generation settings of PARSE, with the engine's defaults. Unknown fields are errors."""

    draft_temperature: float | None = Field(None, ge=0, le=2, description="Default: temperature.")
    draft_text: Text | None = Field(None, min_length=1, description="Verify this draft instead of the draft model's.")
    events: bool = Field(False, description="Streams also report drafted, verified and rejected text.")

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, fields: object) -> object:
        for name in fields if isinstance(fields, dict) else ():
            if name not in cls.model_fields:
                known = {"name": ascii(str(name)[:60])[1:-1], "known": [*cls.model_fields]}
                raise PydanticCustomError("unknown", "unknown field", known)
        return fields


class AnswerBody(Body):
    """The common fields of both kinds of completion."""

    model: Text | None = Field(None, description="Default: the served model.")
    max_tokens: int | None = Field(None, ge=1, le=1 << 31)
    temperature: float | None = Field(
        None, ge=0, le=2, description="Default: from the model's generation config, else 0 (greedy)."
    )
    top_p: float | None = Field(None, ge=0.001, le=1)
    top_k: int | None = Field(None, ge=-1, le=1 << 31, description="0 and -1 keep all tokens.")
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    stop: Stop | None = Field(None, description="The answer ends before the first of these texts.")
    stop_token_ids: AtMost1024[StrictInt] | None = Field(None, description=SETTINGS["stop_token_ids"].help)
    ignore_eos: bool | None = Field(None, description=SETTINGS["ignore_eos"].help)
    min_tokens: int | None = Field(None, ge=0, le=1 << 31, description=SETTINGS["min_tokens"].help)
    seed: int | None = Field(None, ge=-(1 << 63), le=(1 << 63) - 1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    parse: ParseOptions | None = None

    frequency_penalty: object = neutral(0)
    presence_penalty: object = neutral(0)
    repetition_penalty: object = neutral(1)
    min_p: object = neutral(0)
    logit_bias: object = neutral({})
    bad_words: object = neutral([])
    allowed_token_ids: object = neutral()
    structured_outputs: object = neutral()
    include_stop_str_in_output: object = neutral(False)
    skip_special_tokens: object = neutral(True)
    use_beam_search: object = neutral(False)
    prompt_logprobs: object = neutral()

    user: object = ignored()
    metadata: object = ignored()
    store: object = ignored()
    service_tier: object = ignored()
    safety_identifier: object = ignored()
    prompt_cache_key: object = ignored()
    prompt_cache_retention: object = ignored()

    @model_validator(mode="after")
    def _check(self) -> AnswerBody:
        strings = self.stop_strings
        if any(not 0 < len(string) <= LONGEST_STOP for string in strings):
            sentence = "stop: give texts of 1 to {limit} characters"
            raise PydanticCustomError("sentence", sentence, {"limit": LONGEST_STOP})
        if self.temperature is not None and 0 < self.temperature < 0.01:
            raise PydanticCustomError("sentence", "temperature: give 0 (the most likely token) or at least 0.01")
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("sentence", "stream_options: only with stream: true")
        if self.parse is not None and self.parse.events and not self.stream:
            raise PydanticCustomError("sentence", "parse.events: only with stream: true")
        if self.parse is not None and self.parse.mode == ALONE:
            if self.parse.draft_text is not None:
                raise PydanticCustomError("sentence", "parse.draft_text: mode target uses no draft")
            if self.parse.risk is not None:
                raise PydanticCustomError("sentence", "parse.risk: mode target has no promise, as it loses nothing")
        return self

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def alone(self) -> bool:
        """Whether the target answers without a draft."""
        return self.parse is not None and self.parse.mode == ALONE

    @property
    def wants_greedy(self) -> bool:
        """Whether the request needs greedy decoding."""
        return self.parse is not None and self.parse.mode == "exact"

    def says(self, name: str) -> bool:
        """Whether the request sets this field of `parse`."""
        return self.parse is not None and getattr(self.parse, name) is not None

    def sampling(self, defaults: Sampling) -> Sampling:
        """Sampling of the request, completed by the defaults."""
        if self.wants_greedy:
            defaults = Sampling()
        return Sampling(
            defaults.temperature if self.temperature is None else self.temperature,
            defaults.top_p if self.top_p is None else self.top_p,
            defaults.top_k if self.top_k is None else max(0, self.top_k),
            None if self.seed == -1 else self.seed,  # vLLM's sign for a random one
        )

    def settings(self, max_new_tokens: int, choice: int, defaults: Sampling) -> GenerationSettings:
        """Settings of one of the `n` answers; the first one uses the given seed. Raises ApiError.

        Args:
            defaults: defaults of missing sampling fields; their seed is not used.
        """
        options = self.parse or ParseOptions.model_validate({})
        sampling = self.sampling(defaults)
        if sampling.seed is not None and choice:
            sampling = replace(sampling, seed=seed_of(sampling.seed, choice))
        drafts = sampling.temperature if options.draft_temperature is None else options.draft_temperature
        offered = (name for name in SETTINGS if name not in OUTSIDE_PARSE)
        given = {name: value for name in offered if (value := getattr(options, name)) not in (None, ALONE)}
        with value_errors_as_400():
            return GenerationSettings(
                max_new_tokens=max_new_tokens,
                stop=self.stop_strings,
                stop_token_ids=tuple(self.stop_token_ids or ()),
                ignore_eos=bool(self.ignore_eos),
                min_tokens=self.min_tokens or 0,
                draft_sampling=replace(sampling, temperature=drafts),
                resume_sampling=sampling,
                **given,
            )
