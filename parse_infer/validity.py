"""The validity adapter: a probe, a low-rank update for it, and a head that reads the validity off its last token.

On disk it is a folder of safetensors and JSON: `adapter_config.json` and `adapter_model.safetensors` (plain peft),
`validity_head.safetensors`, `validity_config.json` and `README.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu
from transformers import PreTrainedModel

from parse_infer.adapter_files import read_adapter, write_adapter
from parse_infer.fingerprint import describe_target, fingerprint, same_weights
from parse_infer.lora import ProbeLoRA

__all__ = ["Probe", "ValidityAdapter", "ValidityConfig", "ValidityHead", "describe_target", "fingerprint"]

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Probe:
    """The token suffix that asks about a prefix.

    Attributes:
        ids: P token ids; the last one carries the read-out.
        text: what it says.
        closes_turn: the probe itself ends the assistant's turn, so a draft's own end token is not shown before it.
    """

    ids: tuple[int, ...]
    text: str
    closes_turn: bool = False

    def __post_init__(self) -> None:
        if not self.ids:
            raise ValueError("a probe needs at least one token")


class TokenDoubt(nn.Module):
    """What each draft token says against the prefixes that hold it.

    The hidden state before a token says what the target expected there, the token's embedding what the draft wrote,
    and the target's own probabilities how surprising that is. A small network weighs the three, so that a wrong digit
    counts and another wording does not. The verification pass has the states already; only the output layer runs once
    more, on the draft. (Judge Decoding, arXiv 2501.19309, reads single tokens too; here they are pooled over a prefix
    and learnt from labels of prefixes alone.)
    """

    WIDTH = 64
    SURPRISE = 3  # log-probability, entropy, log-probability less the highest

    def __init__(self, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.expected = nn.Linear(hidden_size, rank, bias=False)
        self.written = nn.Linear(hidden_size, rank, bias=False)
        self.weigh = nn.Linear(3 * rank + self.SURPRISE, self.WIDTH)
        self.out = nn.Linear(self.WIDTH, 1)
        nn.init.zeros_(self.out.bias)

    def forward(self, expected: Tensor, written: Tensor, surprise: Tensor) -> Tensor:
        """Doubt [..., T] in float32, from the final-norm states before T tokens, the tokens' embeddings (both
        [..., T, H]) and their `surprise` [..., T, 3]."""
        a = self.expected(rms_norm(expected.float(), expected.shape[-1:]))
        b = self.written(rms_norm(written.float(), written.shape[-1:]))
        return self.out(silu(self.weigh(torch.cat([a, b, a * b, surprise / 3], dim=-1))))[..., 0]

    @staticmethod
    def of_prefixes(doubt: Tensor, ends: Tensor) -> Tensor:
        """Pool the doubt [..., T] of tokens over prefixes of `ends` [..., K] tokens: log of the sum of exp, [..., K];
        0 for an empty prefix."""
        return doubt.logcumsumexp(-1).gather(-1, (ends - 1).clamp_min(0)) * (ends > 0)


@torch.no_grad()
def surprise(hidden: Tensor, tokens: Tensor, logits: Callable[[Tensor], Tensor], rows: int = 128) -> Tensor:
    """How surprising each token is to the target: log-probability, entropy, log-probability less the highest.

    Args:
        hidden: [T, H], the final-norm states before the tokens.
        tokens: int64 [T].
        logits: the output layer, [n, H] -> [n, V]; it runs on `rows` tokens at a time, which bounds the memory.

    Returns:
        float32 [T, 3].
    """
    parts = []
    for states, ids in zip(hidden.split(rows), tokens.split(rows), strict=True):
        log_p = logits(states).float().log_softmax(-1)
        own = log_p.gather(-1, ids[:, None])[:, 0]
        parts.append(torch.stack([own, -(log_p.exp() * log_p).sum(-1), own - log_p.amax(-1)], dim=-1))
    return torch.cat(parts) if parts else hidden.new_zeros(0, TokenDoubt.SURPRISE, dtype=torch.float32)


class ValidityHead(nn.Module):
    """Validity logit w · h + b of a probe's final-norm hidden state h, less the doubt about the prefix; float32.

    Args:
        hidden_size: H.
        token_rank: inner size of `TokenDoubt`; 0: the probe alone decides.
    """

    def __init__(self, hidden_size: int, token_rank: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden_size))
        self.bias = nn.Parameter(torch.zeros(()))
        self.tokens = TokenDoubt(hidden_size, token_rank) if token_rank else None

    def forward(self, hidden: Tensor, doubt: Tensor | None = None) -> Tensor:
        """Hidden states [..., H] of probes, and the doubt [...] about their prefixes -> logits [...]"""
        logits = hidden.float() @ self.weight.float() + self.bias.float()
        return logits if doubt is None else logits - doubt

    @classmethod
    def from_verbalizer(cls, model: PreTrainedModel, yes_id: int, no_id: int, token_rank: int = 0) -> ValidityHead:
        """The head whose validity is the model's own choice between two tokens: w = lm_head[yes] - lm_head[no].

        A final soft-cap of the logits is left out (it bends both logits alike).

        Raises:
            ValueError: both tokens are the same.
        """
        if yes_id == no_id:
            raise ValueError(f"the two verbalizer tokens must differ, both are {yes_id}: choose other words")
        output, config = model.get_output_embeddings(), model.config.get_text_config(decoder=True)
        scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
        head = cls(output.weight.shape[1], token_rank).to(output.weight.device)
        with torch.no_grad():
            head.weight.copy_((output.weight[yes_id].float() - output.weight[no_id].float()) * scale)
            if getattr(output, "bias", None) is not None:
                head.bias.copy_((output.bias[yes_id].float() - output.bias[no_id].float()) * scale)
        return head


@dataclass
class ValidityConfig:
    """Content of validity_config.json.

    Attributes:
        probe_ids, probe_text: the probe.
        token_rank: of the head's `TokenDoubt`; 0: it has none.
        verbalizer: the words (valid, not valid) that the head was initialised from.
        cut_policy: `CutPolicy.to_dict()` of the cuts the adapter was trained on.
        target: `describe_target(model)`: name, model_type, hidden_size, num_hidden_layers, vocab_size, fingerprint.
        label: definition of the training label.
        threshold: calibrated threshold; None: not calibrated.
        risk: risk level of the threshold.
        metrics: held-out figures.
        provenance: data, code and settings that made the adapter.
    """

    probe_ids: tuple[int, ...]
    probe_text: str
    target: dict[str, Any]
    token_rank: int = 0
    verbalizer: tuple[str, str] | None = None
    cut_policy: dict[str, Any] = field(default_factory=dict)
    label: dict[str, Any] = field(default_factory=dict)
    threshold: float | None = None
    risk: dict[str, Any] | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        self.probe_ids = tuple(self.probe_ids)
        self.verbalizer = None if self.verbalizer is None else tuple(self.verbalizer)  # type: ignore[assignment]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ValidityConfig:
        """Raises ValueError for another schema version or a missing key; keys that are not known are left out."""
        version = values.get("schema_version")
        if version != SCHEMA_VERSION:
            raise ValueError(
                f"validity_config.json has schema version {version}, this parse-engine reads {SCHEMA_VERSION}: "
                "install the version that wrote it, or export the adapter again"
            )
        missing = [key for key in ("probe_ids", "probe_text", "target") if not values.get(key)]
        if missing:
            raise ValueError(f"validity_config.json has no {missing[0]}: the adapter was not exported completely")
        return cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})


@dataclass
class ValidityAdapter:
    """A trained judge for one target.

    Attributes:
        config: see `ValidityConfig`.
        head: the read-out, on the target's device.
        lora: the update bound to a loaded target; None while nothing is bound (an adapter about to be saved).
        peft_config: content of adapter_config.json.
        tensors: content of adapter_model.safetensors, by peft's names.
    """

    config: ValidityConfig
    head: ValidityHead
    lora: ProbeLoRA | None = None
    peft_config: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    @property
    def probe(self) -> Probe:
        return Probe(self.config.probe_ids, self.config.probe_text)

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write the five files, all or nothing: into a temporary folder beside `folder`, which is then renamed.

        Raises:
            ValueError: there is no low-rank update to save, or `folder` holds something else than an adapter.
        """
        if not self.peft_config or not self.tensors:
            raise ValueError("an adapter without its peft configuration and weights cannot be saved")
        peft_config = dict(self.peft_config)
        peft_config["base_model_name_or_path"] = self.config.target.get("name")
        peft_config["alora_invocation_tokens"] = list(self.config.probe_ids)
        head = {name: tensor.float() for name, tensor in self.head.state_dict().items()}
        return write_adapter(Path(folder), peft_config, self.tensors, head, self.config.to_dict())

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path, target: PreTrainedModel) -> ValidityAdapter:
        """Load an adapter (local folder or Hugging Face id) for `target`.

        Raises:
            FileNotFoundError: no such folder or id, or a file is missing.
            ValueError: a file is damaged, or the adapter belongs to another model.
        """
        files = read_adapter(name_or_path)
        config = ValidityConfig.from_dict(files.validity_config)
        check_target(str(name_or_path), config.target, target)
        _check_probe(config.probe_ids, target)
        head = ValidityHead(config.target["hidden_size"], config.token_rank)
        shapes = {key: tuple(tensor.shape) for key, tensor in files.head.items()}
        if shapes != {key: tuple(tensor.shape) for key, tensor in head.state_dict().items()}:
            raise ValueError(f"the validity head of {name_or_path} holds {shapes}: its files do not go together")
        head.load_state_dict(files.head)
        head.to(target.device).requires_grad_(False)
        lora = ProbeLoRA.from_peft(files.peft_config, files.tensors, target)
        return cls(config, head.eval(), lora, files.peft_config, files.tensors)


def check_target(adapter: str, expected: dict[str, Any], target: PreTrainedModel) -> None:
    """Raise ValueError, naming both, unless `target` is the model that an adapter's `target` entry describes."""
    found = describe_target(target)
    shape = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
    wrong = [key for key in shape if expected.get(key) != found[key]]
    if wrong:
        differs = ", ".join(f"{key} {expected.get(key)} and not {found[key]}" for key in wrong)
        raise ValueError(
            f"the adapter {adapter} was trained for the target {expected.get('name')!r} and does not fit "
            f"{found['name']!r}: it expects {differs}"
        )
    if not same_weights(str(expected.get("fingerprint")), found["fingerprint"]):
        raise ValueError(
            f"the adapter {adapter} was trained for the target {expected.get('name')!r}; {found['name']!r} has the "
            "same shape but other weights: load the target it was trained on, or train an adapter for this one"
        )


def verbalizer_ids(tokenizer: Any, probe_text: str, words: Sequence[str]) -> tuple[int, ...]:
    """First token of each word as it follows `probe_text`.

    Raises:
        ValueError: two words begin with the same token.
    """
    probe = tokenizer.encode(probe_text, add_special_tokens=False)
    ids = []
    for word in words:
        joined = tokenizer.encode(probe_text + word, add_special_tokens=False)
        continues = joined[: len(probe)] == probe and len(joined) > len(probe)
        ids.append(joined[len(probe)] if continues else tokenizer.encode(word, add_special_tokens=False)[0])
    if len(set(ids)) < len(ids):
        raise ValueError(f"the verbalizer words {' and '.join(words)} begin with the same token: choose other words")
    return tuple(ids)


def _check_probe(probe_ids: Sequence[int], target: PreTrainedModel) -> None:
    size = target.config.get_text_config(decoder=True).vocab_size
    if not all(isinstance(i, int) and 0 <= i < size for i in probe_ids):
        raise ValueError(f"the adapter's probe {list(probe_ids)} has tokens outside the target's vocabulary of {size}")
