"""Configuration of a build: the keys of `recipes/data.yaml`."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from data_tools.labels.sequential_test import (
    GreedyRule,
    LabelRule,
    SequentialTest,
    Tally,
    WithoutRollouts,
    fewest_rollouts,
)
from data_tools.tasks.task import SPLITS
from parse_infer.errors import ParseError
from parse_infer.files import read_json
from parse_infer.settings.sampling import Sampling
from parse_infer.text.cuts import CutPolicy
from parse_infer.tracking import TRACKERS

# Keys that may change between two runs into the same folder, because they do not affect finished rows.
FREE_KEYS = (
    "output_dir",
    "limit",
    "logprobs",
    "device",
    "target_url",
    "draft_url",
    "served_target",
    "served_draft",
    "concurrency",
    "request_timeout",
    "retries",
    "max_outage",
    "report_to",
    "project",
)
_AT_LEAST_ONE = (
    "drafts_per_temperature",
    "max_draft_tokens",
    "rollouts",
    "max_rollout_tokens",
    "problems_per_group",
    "batch_size",
    "concurrency",
)


@dataclass
class BuildConfig:
    """Configuration of a build. Every field is a key of the recipe and an option `--key` of `parse-data build`.

    Raises:
        ValueError: a value out of range, or two incompatible values.
    """

    output_dir: str = field(default="", metadata={"help": "Folder of the data set (required)."})
    target: str = field(
        default="", metadata={"help": "Target model: Hugging Face id, folder, GGUF file or zoo:target (required)."}
    )
    draft: str = field(default="", metadata={"help": "Draft model, named the same way (required)."})
    dtype: str = field(
        default="auto",
        metadata={
            "help": "Dtype of both models; auto: as saved, or float32 on a CPU that is slow in 16 bits.",
            "choices": ["auto", "float32", "bfloat16", "float16"],
        },
    )
    draft_dtype: str | None = field(
        default=None,
        metadata={
            "help": "Dtype of the draft model, as dtype, or int8 on a CPU; default: dtype.",
            "choices": ["auto", "float32", "bfloat16", "float16", "int8"],
        },
    )
    device: str | None = field(default=None, metadata={"help": "Device of both models; default: the GPU, if any."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run model code shipped with the weights."})
    template_options: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "Options of the chat template, for example enable_thinking: false."}
    )

    backend: str = field(
        default="local",
        metadata={
            "help": "Where the models generate: in this process (local) or on OpenAI-compatible servers (openai).",
            "choices": ["local", "openai"],
        },
    )
    target_url: list[str] = field(
        default_factory=list, metadata={"help": "Address of the target's server (openai), or of several replicas."}
    )
    draft_url: list[str] = field(
        default_factory=list,
        metadata={"help": "Address of the draft model's server or replicas; default: target_url."},
    )
    served_target: str | None = field(
        default=None, metadata={"help": "Name of the target on its server; default: target."}
    )
    served_draft: str | None = field(
        default=None, metadata={"help": "Name of the draft model on its server; default: draft."}
    )
    wire: str = field(
        default="ids",
        metadata={
            "help": "Format of prompts and answers: token ids (vLLM, SGLang), or text, which is less exact.",
            "choices": ["ids", "text"],
        },
    )
    concurrency: int = field(default=64, metadata={"help": "Requests in flight per server and model."})
    request_timeout: float = field(default=600.0, metadata={"help": "Timeout of one request in seconds."})
    retries: int = field(default=5, metadata={"help": "Retries of a failed request; status 429 is a failure."})
    max_outage: float = field(default=900.0, metadata={"help": "Seconds to wait while no server is available."})

    task: str = field(default="", metadata={"help": "Source of problems, such as gsm8k, dataset or jsonl (required)."})
    task_options: dict[str, Any] = field(default_factory=dict, metadata={"help": "Options of the task."})
    report_to: str = field(
        default="none", metadata={"help": "Tracker of the build's counts: none or wandb.", "choices": TRACKERS}
    )
    project: str = field(default="parse", metadata={"help": "Project in the tracker."})
    split: str = field(default="train", metadata={"help": "Split of the problems.", "choices": list(SPLITS)})
    check_with: str = field(
        default="task",
        metadata={
            "help": "Which answers are right. task: those that the task's checker accepts. own_answer, without "
            "references: those with the target's own final answer from the bare prompt (of sampled rollouts the most "
            "frequent one).",
            "choices": ["task", "own_answer"],
        },
    )
    limit: int | None = field(
        default=None, metadata={"help": "Number of problems; default: all. A larger limit extends a finished build."}
    )
    seed: int = field(default=0, metadata={"help": "Seed of problems, drafts and rollouts."})

    temperatures: list[float] = field(
        default_factory=lambda: [0.0, 0.7, 1.0], metadata={"help": "Temperatures of the drafts; 0 is greedy."}
    )
    drafts_per_temperature: int = field(
        default=1, metadata={"help": "Drafts at each temperature above 0; duplicates of a problem are dropped."}
    )
    draft_top_p: float = field(default=1.0, metadata={"help": "Top-p (nucleus sampling) of the drafts."})
    max_draft_tokens: int = field(default=256, metadata={"help": "Length at which a draft is cut off, unfinished."})
    cut_policy: dict[str, Any] = field(
        default_factory=dict,
        metadata={"help": "Where drafts are cut: kind (step, sentence, tokens), every, max_cuts."},
    )

    rollouts: int = field(default=1, metadata={"help": "Target rollouts from a prefix per round."})
    max_rollouts: int = field(
        default=0,
        metadata={
            "help": "Maximum number of rollouts from a prefix, and the number from the bare prompt; 0: 8 times "
            "rollouts, or 1 if greedy."
        },
    )
    rollout_temperature: float = field(default=0.0, metadata={"help": "Temperature of rollouts; 0 is greedy."})
    rollout_top_p: float = field(default=1.0, metadata={"help": "Top-p (nucleus sampling) of rollouts."})
    max_rollout_tokens: int = field(
        default=256, metadata={"help": "Maximum length of a rollout; a longer rollout decides nothing."}
    )
    margin: float = field(
        default=0.0,
        metadata={
            "help": "For sampled rollouts: a prefix is valid if it keeps at least the share 1 - margin of the "
            "target's chance, and invalid if it keeps at most the share margin."
        },
    )
    max_label_error: float = field(
        default=0.05,
        metadata={
            "help": "Maximum probability of a wrong label, whatever the true chance; less certain prefixes get no "
            "label."
        },
    )
    prefix_labels: bool = field(
        default=True,
        metadata={
            "help": "Label the prefixes of a draft with rollouts. False: label whole drafts only, by their answers, "
            "which is all that a judge on log-probabilities needs. Without drop_unsolved, target_chance and "
            "own_answer the target then writes nothing."
        },
    )
    exhaustive: bool = field(
        default=False, metadata={"help": "Roll out from every prefix instead of searching for the first error."}
    )
    drop_unsolved: bool = field(
        default=False, metadata={"help": "Skip problems that the target never solves from the bare prompt."}
    )

    target_chance: bool = field(
        default=False,
        metadata={
            "help": "Measure the target's chance of a right answer to each problem, from max_rollouts answers, also "
            "where labels need no rollouts: a wrong draft weighs by it in training."
        },
    )

    logprobs: int = field(
        default=0,
        metadata={
            "help": "Read every draft once more, for a judge on log-probabilities: number of the target's first "
            "choices to store per token (5); 0: none. Extends a finished build too."
        },
    )

    batch_size: int = field(default=64, metadata={"help": "Rows decoded at a time."})
    problems_per_group: int = field(
        default=32, metadata={"help": "Problems per group and file; bounds memory and the work that a kill loses."}
    )

    def __post_init__(self) -> None:
        for key in ("output_dir", "target", "draft", "task"):
            if not getattr(self, key):
                raise ParseError(f"the recipe needs the key {key}")
        for key in _AT_LEAST_ONE:
            self._check(key, getattr(self, key) >= 1, "at least 1")
        if self.logprobs and self.wire != "ids":
            raise ParseError(f"logprobs is {self.logprobs}, but wire {self.wire} sends texts: set wire to ids")
        self._check("check_with", self.check_with in ("task", "own_answer"), "task or own_answer")
        if self.exhaustive and not self.prefix_labels:
            raise ParseError("exhaustive is true, but prefix_labels is false: leave exhaustive out")
        self._check("logprobs", 0 <= self.logprobs <= 20, "between 0 and 20, the most that servers return")
        self._check("limit", self.limit is None or self.limit >= 1, "at least 1")
        self._check("margin", 0 <= self.margin < 0.5, "at least 0 and below 0.5")
        self._check("max_label_error", 0 < self.max_label_error < 0.5, "above 0 and below 0.5")
        self._check("temperatures", len(self.temperatures) > 0, "a list of at least one")
        for key in ("target_url", "draft_url"):
            setattr(self, key, [_url(key, part) for text in getattr(self, key) for part in text.split(",") if part])
        if self.backend == "openai" and not self.target_url:
            raise ParseError("backend openai needs target_url, for example --target-url http://localhost:8000")
        if self.backend != "openai" and (self.target_url or self.draft_url):
            raise ParseError(
                f"target_url requires backend openai, but backend is {self.backend}: add --backend openai"
            )
        self._check("retries", self.retries >= 0, "at least 0")
        self._check("request_timeout", 0 < self.request_timeout < math.inf, "a number of seconds above 0")
        self._check("max_outage", 0 <= self.max_outage < math.inf, "a number of seconds of at least 0")
        if self.split not in SPLITS:
            raise ParseError(f"split is {self.split!r}; choose one of {', '.join(SPLITS)}")
        self.temperatures = [float(temperature) for temperature in self.temperatures]
        for kind in ("draft_sampling", "rollout_sampling"):
            try:
                getattr(self, kind)
            except ValueError as error:
                raise ParseError(f"{kind.replace('_', ' ')}: {error}") from error
        CutPolicy.from_dict(self.cut_policy)  # raises ValueError for a wrong key or value
        self._resolve_max_rollouts()

    def _resolve_max_rollouts(self) -> None:
        """Set the default of `max_rollouts`; raise ValueError where rollouts cannot decide any label."""
        greedy = self.rollout_sampling.greedy
        if self.max_rollouts == 0:
            self.max_rollouts = self.rollouts if greedy else 8 * self.rollouts
        self._check("max_rollouts", self.max_rollouts >= self.rollouts, f"at least rollouts, {self.rollouts}")
        if greedy:
            if self.max_rollouts > 1:
                raise ParseError(
                    f"{self.max_rollouts} rollouts at temperature 0 would all be the same: set rollouts to 1, or "
                    "rollout_temperature above 0"
                )
            return
        if not self.prefix_labels:
            return
        if self.margin == 0:
            raise ParseError(
                "margin is 0, but no number of sampled rollouts can prove that a prefix loses nothing: set margin, "
                "for example to 0.4"
            )
        if self.max_rollouts < (fewest := fewest_rollouts(self.margin, self.max_label_error)):
            raise ParseError(
                f"max_rollouts is {self.max_rollouts}, but margin {self.margin:g} and max_label_error "
                f"{self.max_label_error:g} need at least {fewest} rollouts for a label"
            )

    def label_rule(self, prompt: Tally) -> LabelRule:
        """Return the label rule of a problem, given the rollouts from its bare prompt."""
        if not self.prefix_labels:
            return WithoutRollouts()
        if self.rollout_sampling.greedy:
            return GreedyRule(prompt)
        return SequentialTest(prompt, self.margin, self.max_label_error, self.rollouts, self.max_rollouts)

    def _check(self, key: str, fine: bool, requirement: str) -> None:
        if not fine:
            raise ParseError(f"{key} is {getattr(self, key)}; it must be {requirement}")

    @property
    def draft_sampling(self) -> list[Sampling]:
        """Sampling settings of the drafts of each problem: one entry per draft, one draft at temperature 0."""
        return [
            Sampling(temperature, self.draft_top_p)
            for temperature in self.temperatures
            for _ in range(self.drafts_per_temperature if temperature else 1)
        ]

    @property
    def asks_target(self) -> bool:
        """Whether the target answers the problems; labels of whole drafts by references do without."""
        return self.prefix_labels or self.drop_unsolved or self.target_chance or self.check_with == "own_answer"

    @property
    def rollout_sampling(self) -> Sampling:
        return Sampling(self.rollout_temperature, self.rollout_top_p)

    @property
    def policy(self) -> CutPolicy:
        return CutPolicy.from_dict(self.cut_policy)

    @classmethod
    def of_folder(cls, folder: Path) -> BuildConfig:
        """Read the configuration that a finished build was begun with, with backend local.

        Raises:
            FileNotFoundError, ValueError: no build, or one of another version.
        """
        path = folder / "build.json"
        if not path.is_file():
            raise FileNotFoundError(f"{folder} has no build.json: name the output_dir of a `parse-data build`")
        given = read_json(path, "build again").get("config")
        known = {each.name for each in fields(cls)}
        if not isinstance(given, dict) or (unknown := given.keys() - known):
            what = "no config" if not isinstance(given, dict) else f"the unknown key {min(unknown)}"
            raise ParseError(f"{path} has {what}: another version of parse-engine wrote it; build again")
        return cls(output_dir=str(folder), **given | {"backend": "local"})

    def identity(self) -> dict[str, Any]:
        """Return the settings that affect the rows. A folder begun with a different identity cannot be resumed."""
        values = {key: value for key, value in asdict(self).items() if key not in FREE_KEYS}
        # Folders of earlier versions do not have these keys.
        defaults = {"check_with": "task", "prefix_labels": True, "draft_dtype": None, "target_chance": False}
        for key, default in defaults.items():
            if values[key] == default:
                del values[key]
        return values | {"cut_policy": self.policy.to_dict()}


def _url(key: str, text: str) -> str:
    """Return the address without spaces; raise ValueError if it is none."""
    text = text.strip()
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ParseError(f"{key} is {text!r}; it must be an address such as http://localhost:8000/v1")
    return text
