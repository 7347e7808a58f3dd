"""The validity adapter: a head on log-probabilities, alone or corrected by hidden states of the target.

An exported adapter is a folder: `validity_head.safetensors`, `validity_config.json` and `README.md`. A second stream
adds its LoRA, `adapter_config.json` and `adapter_model.safetensors` (plain peft). A head alone (`LogprobHead`) fits
every copy of the target, quantised or served.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from parse_infer.errors import ModelError
from parse_infer.judge.adapter_files import adapts, judge_fingerprint, read_adapter, write_adapter
from parse_infer.judge.judge import Scorer
from parse_infer.judge.logprob_head import LogprobHead, LogprobHeadConfig, LogprobScorer
from parse_infer.judge.stream.head import StreamHead, StreamHeadConfig
from parse_infer.judge.stream.lora import StreamLoRA
from parse_infer.judge.stream.scorer import StreamScorer
from parse_infer.judge.token_logprobs import TokenTexts
from parse_infer.judge.usual_drafts import UsualDrafts
from parse_infer.models.fingerprint import describe_target, same_weights

SCHEMA_VERSION = 1


@dataclass
class ValidityConfig:
    """Content of validity_config.json.

    Attributes:
        target: `describe_target(model)`: name, model_type, hidden_size, num_hidden_layers, vocab_size, fingerprint.
        logprobs: sizes of a `LogprobHead`, how its training data was read, a known text, and ranges of the drafts that
            it can judge (`UsualDrafts`); None: a judge without a trained head.
        stream: sizes of the `StreamHead` around it, and the adapter whose head it was; None: no hidden
            states.
        cut_policy: `CutPolicy.to_dict()` of the training data.
        label: definition of the training label.
        probability: scale and shift of the logit, fitted so that validities are probabilities; None: not fitted.
        threshold: calibrated threshold; None: not calibrated.
        risk: risk level of the threshold.
        metrics: metrics on held-out data.
        provenance: data, code and settings of the training run.
    """

    target: dict[str, Any]
    logprobs: dict[str, Any] | None = None
    stream: dict[str, Any] | None = None
    cut_policy: dict[str, Any] = field(default_factory=dict)
    label: dict[str, Any] = field(default_factory=dict)
    probability: dict[str, float] | None = None
    threshold: float | None = None
    risk: dict[str, Any] | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    def validity(self, logits: Tensor) -> Tensor:
        """Convert logits to probabilities."""
        fitted = self.probability
        return (logits if fitted is None else logits * fitted["scale"] + fitted["shift"]).sigmoid()

    @property
    def adapts(self) -> bool:
        """Whether the adapter has a LoRA."""
        return adapts(asdict(self))

    @property
    def usual_drafts(self) -> UsualDrafts | None:
        """The drafts that a `LogprobHead` can judge; None: all."""
        usual = (self.logprobs or {}).get("usual")
        return UsualDrafts.from_dict(usual) if usual else None

    def to_dict(self) -> dict[str, Any]:
        """Return the content of validity_config.json; without `logprobs` and `stream` if None."""
        return {k: v for k, v in asdict(self).items() if v is not None or k not in ("logprobs", "stream")}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ValidityConfig:
        """Build a config and ignore unknown keys. Raise ValueError for another schema version or a missing key."""
        version = values.get("schema_version")
        if version != SCHEMA_VERSION:
            raise ModelError(
                f"validity_config.json has schema version {version}, this parse-engine reads {SCHEMA_VERSION}: "
                "install the version that wrote it, or export the adapter again"
            )
        if not values.get("target"):
            raise ModelError("validity_config.json has no target: the export of the adapter is incomplete")
        read = values.get("logprobs")
        if read is None:
            raise ModelError(
                "validity_config.json has no logprobs: the adapter is of an earlier version and reads hidden states; "
                "train it again with recipes/train.yaml"
            )
        for name in ("target", "logprobs", "stream", "probability", "cut_policy"):
            if not isinstance(values.get(name, {}), dict) and (values[name] is not None or name == "cut_policy"):
                raise ModelError(f"validity_config.json has a damaged {name}: export the adapter again")
        if not values["target"].get("name"):
            raise ModelError("validity_config.json has no name of its target: export the adapter again")
        known = read.get("reference") or {}
        sizes = {f.name for f in fields(LogprobHeadConfig)}
        if not (
            isinstance(known, dict)
            and sizes - {"sharpness"} <= set(read.get("head") or ()) <= sizes  # the first adapters have no sharpness
            and len(known.get("ids", ())) > len(known.get("logprobs", ()))
        ):
            raise ModelError("validity_config.json has incomplete logprobs: export the adapter again")
        try:
            UsualDrafts.from_dict(read.get("usual") or {})
            LogprobHeadConfig(**read["head"])
        except (TypeError, ValueError, AttributeError) as error:
            raise ModelError(
                f"validity_config.json has damaged logprobs ({error}): export the adapter again"
            ) from error
        if (stream := values.get("stream")) is not None:
            sizes = {f.name for f in fields(StreamHeadConfig)}
            found = set(stream.get("head") or ())
            if not sizes - {"layers", "second"} <= found <= sizes:  # which the first ones had not
                raise ModelError("validity_config.json has an incomplete stream: export the adapter again")
        scaled = values.get("probability")
        numbers = scaled is None or all(isinstance(value, int | float) for value in scaled.values())
        if scaled is not None and not (numbers and set(scaled) == {"scale", "shift"} and scaled["scale"] > 0):
            raise ModelError(f"validity_config.json has probability {scaled}: it needs a scale above 0 and a shift")
        return cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})


@dataclass
class ValidityAdapter:
    """A trained judge for one target.

    Attributes:
        config: see `ValidityConfig`.
        head: the read-out, on the target's device.
        lora: the LoRA bound to a loaded target; None without a second stream, and before binding (an adapter to be
            saved).
        peft_config: content of adapter_config.json; empty without a second stream.
        tensors: content of adapter_model.safetensors, by peft's names; empty without a second stream.
        train_problems: hashes of the training prompts; empty if unknown.
    """

    config: ValidityConfig
    head: LogprobHead | StreamHead
    lora: StreamLoRA | None = None
    peft_config: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    train_problems: frozenset[str] = frozenset()

    tokens_per_cut = 0

    @property
    def fingerprint(self) -> str:
        return judge_fingerprint((self.peft_config, self.config.to_dict()), (self.tensors, self.head.state_dict()))

    def scorer(
        self, tokenizer: PreTrainedTokenizerBase, end_ids: Collection[int], model: PreTrainedModel | None = None
    ) -> Scorer:
        texts = TokenTexts(tokenizer, end_ids, self.head.config.buckets)
        facts = texts, self.config.usual_drafts, self.config.validity
        if isinstance(self.head, LogprobHead):
            return LogprobScorer(self.head, *facts)
        assert model is not None and (self.lora is not None) == self.head.stream.second
        # More tokens in a forward cost a GPU little, and a CPU as much as in another one.
        return StreamScorer(self.head, self.lora, *facts, one_pass=model.device.type != "cpu")

    def save_pretrained(self, folder: str | Path, figures: Mapping[str, bytes] | None = None) -> Path:
        """Write the adapter folder atomically.

        Args:
            figures: PNG files by name, for the model card.

        Raises:
            ValueError: the adapter lacks its LoRA weights, or `folder` exists and is no adapter folder.
        """
        if self.config.adapts and not (self.peft_config and self.tensors):
            raise ModelError("an adapter without its peft configuration and weights cannot be saved")
        peft_config = dict(self.peft_config)
        if peft_config:
            peft_config["base_model_name_or_path"] = self.config.target.get("name")
        head = {
            name: tensor.float() if tensor.is_floating_point() else tensor
            for name, tensor in self.head.state_dict().items()
        }
        return write_adapter(
            Path(folder), peft_config, self.tensors, head, self.config.to_dict(), figures or {}, self.train_problems
        )

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path, target: PreTrainedModel) -> ValidityAdapter:
        """Load an adapter (local folder or Hugging Face id) for `target`.

        Raises:
            FileNotFoundError: the folder or id does not exist, or a file is missing.
            ValueError: a file is damaged, or the adapter was trained for another model.
        """
        files = read_adapter(name_or_path)
        config = ValidityConfig.from_dict(files.validity_config)
        if config.stream and not config.target.get("fingerprint"):
            raise ModelError("validity_config.json has no fingerprint of the target: export the adapter again")
        check_target(str(name_or_path), config.target, describe_target(target))
        head = read_head(str(name_or_path), config, files.head).to(target.device)
        lora = StreamLoRA.from_peft(files.peft_config, files.tensors, target) if config.adapts else None
        return cls(config, head, lora, files.peft_config, files.tensors, files.train_problems)


def read_head(adapter: str, config: ValidityConfig, tensors: Mapping[str, Tensor]) -> LogprobHead | StreamHead:
    """Build the head from an adapter's files, in float32 and without gradient.

    Raises:
        ValueError: the files do not match each other.
    """
    assert config.logprobs is not None
    trunk = LogprobHead(LogprobHeadConfig(**config.logprobs["head"]))
    stream = config.stream
    head = (trunk if stream is None else StreamHead(trunk, StreamHeadConfig(**stream["head"]))).float()
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    if shapes != {key: tuple(tensor.shape) for key, tensor in head.state_dict().items()}:
        raise ModelError(f"the validity head of {adapter} holds {shapes}, which does not match validity_config.json")
    head.load_state_dict(tensors)
    return head.requires_grad_(False).eval()


def check_target(adapter: str, expected: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Raise ValueError, naming both models, unless `found` is the model that the adapter was trained for.

    Args:
        expected, found: results of `describe_target`, or of `describe_config`, which has no weights to compare.
    """
    shape = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
    wrong = [key for key in shape if expected.get(key) != found[key]]
    if wrong:
        differs = ", ".join(f"{key} {expected.get(key)}, not {found[key]}" for key in wrong)
        raise ModelError(
            f"the adapter {adapter} was trained for the target {expected.get('name')!r} and does not fit "
            f"{found['name']!r}: it expects {differs}"
        )
    weights = [facts.get("fingerprint") for facts in (expected, found)]
    if None not in weights and not same_weights(*map(str, weights)):
        raise ModelError(
            f"the adapter {adapter} was trained for the target {expected.get('name')!r}; {found['name']!r} has the "
            "same shape but other weights: load the target it was trained on, or train an adapter for this one"
        )
