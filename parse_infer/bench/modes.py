"""The modes of a benchmark: different ways to answer the same prompt with the same models, measured alike."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from parse_infer.bench.assisted import TransformersGeneration
from parse_infer.bench.sequential import sequential_engine, sequentially
from parse_infer.engine import ParseEngine
from parse_infer.generation import Generation, GenerationSettings, Resume
from parse_infer.guesses.registry import check_token_drafter, load_token_drafter, split_name
from parse_infer.models.loading import LanguageModel, same_tokenizer
from parse_infer.models.prompts import Prompt
from parse_infer.policy import check_threshold
from parse_infer.suggest import suggestion
from parse_infer.verify.zero_shot_judge import ZeroShotJudge

MODES = {
    "target": "the target alone",
    "draft": "the draft model alone",
    "parse": "PARSE with the trained adapter",
    "parse-zero-shot": "PARSE, the target itself asked whether each prefix is right",
    "sequential": "one segment at a time, each verified before the next (SpecReason), trained adapter",
    "assisted": "transformers' assisted generation with the same draft model",
    "transformers": "the target alone in transformers' own decode loop",
}
# Token drafters stand behind these, by name or folder: target+DRAFTER, parse+DRAFTER, parse+DRAFTER+DRAFTER; the last
# one speeds up the draft model.
GUIDED = {"target": 1, "parse": 2}
DEFAULT_MODES = tuple(name for name in MODES if name != "transformers")
SWEPT = ("parse", "parse-zero-shot")  # modes that a sweep runs at every threshold
NEEDS_ADAPTER = ("parse", "sequential")
DRAFTING = ("parse", "parse-zero-shot", "sequential", "assisted")  # modes that accept or reject a draft


class BenchProblem(Protocol):
    """What the benchmark needs of a problem."""

    @property
    def id(self) -> str: ...

    @property
    def prompt(self) -> Prompt: ...

    @property
    def reference(self) -> str: ...


@dataclass(frozen=True)
class Mode:
    """One way to answer.

    Attributes:
        name: a key of `MODES`, with "@threshold" behind it in a sweep or token drafters after "+".
        models: those with caches of their own, beside the engine's.
    """

    name: str
    generate: Callable[[Prompt], Generation]
    models: tuple[LanguageModel, ...] = ()

    @property
    def base(self) -> str:
        """The key of `MODES`."""
        return re.split("[@+]", self.name)[0]


def check_modes(names: Iterable[str]) -> tuple[str, ...]:
    """The names without repetitions; ValueError for one that is no mode, with the closest one, and for none at all."""
    chosen = tuple(dict.fromkeys(name.strip() for name in names if name.strip()))
    for name in chosen:
        base, *drafters = name.split("+")
        if 0 < len(drafters) <= GUIDED.get(base, 0) and all(drafters):
            continue
        if name not in MODES:
            raise ValueError(f"unknown mode {name!r}; {suggestion(name, MODES)}")
    if not chosen:
        raise ValueError(f"no mode to run; modes: {', '.join(MODES)}")
    return chosen


def describe(name: str) -> str:
    """What a mode is, in a few words."""
    base, *drafters = name.split("+")
    whose = ("the target's own", "the draft model's")
    return ", ".join([MODES[base], *(f"{w} tokens guessed by {d}" for w, d in zip(whose, drafters, strict=False))])


def needs(names: Sequence[str]) -> tuple[bool, bool]:
    """Whether these modes need a draft model, and whether they need an adapter."""
    parts = [name.split("+") for name in names]
    bases, guides = {p[0] for p in parts}, {split_name(drafter)[0] for p in parts for drafter in p[1:]}
    return bool(bases & {*DRAFTING, "draft"} or "draft" in guides), bool(bases & {*NEEDS_ADAPTER})


def check_guides(names: Sequence[str], target: str, draft: str | None) -> None:
    """Raises ValueError for a token drafter that these models (by name) cannot have; runs before they are loaded."""
    for name in names:
        for drafter, model in zip(name.split("+")[1:], (target, draft), strict=False):
            has_draft = draft is not None and model is target
            check_token_drafter(f"the token drafter of mode {name!r}", drafter, str(model), has_draft)


def make_modes(
    engine: ParseEngine,
    names: Sequence[str],
    *,
    max_new_tokens: int = 512,
    threshold: float | None = None,
    zero_shot_threshold: float | None = None,
    resume: Resume = "finish",
    thresholds: Sequence[float] = (),
) -> list[Mode]:
    """The named modes, then "parse@0.5" and so on for every threshold of a sweep; all greedy, with `engine`'s models.

    Args:
        threshold: for "parse" and "sequential"; None: the adapter's own.
        zero_shot_threshold: for "parse-zero-shot"; None: 0.5.
        resume: what follows a rejected draft, in the PARSE modes.
        thresholds: of the sweep; it covers those of `SWEPT` that are among the names.

    Raises:
        ValueError: an unknown mode, a threshold out of range, or a part that a mode needs and the engine lacks.
    """
    names = check_modes(names)
    for name in names:
        draft, adapter = needs([name])
        if draft and engine.draft is None:
            raise ValueError(f"mode {name!r} needs a draft model: give one, or leave the mode out")
        if adapter and engine.judge is None:
            raise ValueError(f"mode {name!r} needs an adapter: give one, or leave the mode out")
    check_guides(names, engine.target.name, engine.draft.name if engine.draft else None)
    for value in [*thresholds, *(t for t in (threshold, zero_shot_threshold) if t is not None)]:
        check_threshold(value)
    plain = GenerationSettings(max_new_tokens=max_new_tokens, resume=resume)
    judged = plain.override(threshold=threshold)
    zero_shot = _zero_shot(engine, zero_shot_threshold) if "parse-zero-shot" in names else None

    def make(name: str) -> Callable[[Prompt], Generation]:
        if name == "target":
            return lambda prompt: engine.generate_target(prompt, plain)  # type: ignore[return-value]
        if name == "draft":
            return _draft_alone(engine, plain)
        if name == "sequential":
            sequential, by_segment = sequential_engine(engine), sequentially(judged)
            return lambda prompt: sequential.generate(prompt, by_segment)  # type: ignore[return-value]
        if name in ("assisted", "transformers"):
            own_loop = TransformersGeneration(engine.target, engine.draft if name == "assisted" else None)
            return lambda prompt: own_loop.generate(prompt, plain)
        if name == "parse":
            return lambda prompt: engine.generate(prompt, judged)  # type: ignore[return-value]
        assert zero_shot is not None
        return lambda prompt: zero_shot.generate(prompt, plain)  # type: ignore[return-value]

    def guide(name: str) -> Mode:
        base, *drafters = name.split("+")
        guided = _guided(engine, *drafters)
        models = tuple(lm for lm in (guided.target, guided.draft) if lm is not None)
        if base == "target":
            return Mode(name, lambda prompt: guided.generate_target(prompt, plain, guided=True), models)  # type: ignore[arg-type,return-value]
        return Mode(name, lambda prompt: guided.generate(prompt, judged), models)  # type: ignore[arg-type,return-value]

    modes = [guide(name) if "+" in name else Mode(name, make(name)) for name in names]
    for name in (n for n in names if n in SWEPT):
        judge = engine if name == "parse" else zero_shot
        assert judge is not None
        modes += [Mode(f"{name}@{t}", _at(judge, plain.override(threshold=t))) for t in thresholds]
    return modes


def _at(engine: ParseEngine, settings: GenerationSettings) -> Callable[[Prompt], Generation]:
    return lambda prompt: engine.generate(prompt, settings)  # type: ignore[return-value]


def timed(engine: ParseEngine, mode: Mode, prompt: Prompt) -> tuple[Generation, float]:
    """An answer and the seconds it took, from empty caches: no mode profits from what another has read."""
    forget(engine, mode)
    _synchronise(engine)
    start = time.perf_counter()
    generation = mode.generate(prompt)
    _synchronise(engine)
    return generation, time.perf_counter() - start


def forget(engine: ParseEngine, mode: Mode | None = None) -> None:
    """Empty the caches of the engine's models, and of those that the mode has to itself."""
    for lm in (engine.target, engine.draft, *(mode.models if mode is not None else ())):
        if lm is not None:
            lm.decoder.seek([])


@torch.inference_mode()
def read_draft(engine: ParseEngine, prompt: Prompt, draft: Sequence[int]) -> tuple[float, int]:
    """What the target needs to read prompt and draft once, and how much of the draft it would have written itself.

    Returns:
        Seconds of one target forward over both, from an empty cache; the number of leading draft tokens (target
        tokens) that equal the target's greedy choice, which is what token-exact verification would keep.
    """
    forget(engine)
    decoder = engine.target.decoder
    prompt_ids = engine.target.render(prompt)
    draft = list(draft[: engine.target.window - len(prompt_ids)])
    _synchronise(engine)
    start = time.perf_counter()
    decoder.seek(prompt_ids)
    output = decoder.forward(draft)
    _synchronise(engine)
    seconds = time.perf_counter() - start
    own = decoder.logits(output.hidden[:-1]).argmax(-1).tolist()
    return seconds, next((i for i, (a, b) in enumerate(zip(own, draft, strict=True)) if a != b), len(draft))


def _zero_shot(engine: ParseEngine, threshold: float | None) -> ParseEngine:
    """The same loaded models with the untrained judge, and the same cuts."""
    judge = ZeroShotJudge(engine.target.model, engine.target.tokenizer, engine.segmenter.policy)
    return ParseEngine(engine.target, engine.draft, judge, threshold=threshold)


def _guided(engine: ParseEngine, target_drafter: str, draft_drafter: str | None = None) -> ParseEngine:
    """The same weights with decoders of their own (heads have them keep features), and token drafters."""
    target, draft = replace(engine.target), replace(engine.draft) if engine.draft is not None else None
    return ParseEngine(
        target,
        draft,
        engine.judge,
        target_drafter=load_token_drafter(target_drafter, target, draft),
        draft_drafter=load_token_drafter(draft_drafter, draft) if draft_drafter and draft is not None else None,
        threshold=engine.threshold,
        cut_policy=engine.segmenter.policy,
    )


def _draft_alone(engine: ParseEngine, settings: GenerationSettings) -> Callable[[Prompt], Generation]:
    """The draft model alone, its tokens counted as target tokens, as all others are."""
    assert engine.draft is not None
    target = engine.target
    if same_tokenizer(engine.draft.tokenizer, target.tokenizer):
        return lambda prompt: engine.generate_draft(prompt, settings)  # type: ignore[return-value]

    def generate(prompt: Prompt) -> Generation:
        own: Generation = engine.generate_draft(prompt, settings)  # type: ignore[assignment]
        ids = target.tokenizer.encode(own.text, add_special_tokens=False)
        if own.finish_reason == "eos" and target.end_token is not None:
            ids = [*ids, target.end_token]
        return replace(own, token_ids=ids)

    return generate


def _synchronise(engine: ParseEngine) -> None:
    if engine.target.model.device.type == "cuda":
        torch.cuda.synchronize()
