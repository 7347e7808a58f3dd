"""A trained judge for another target: heads on log-probabilities know no model, vocabulary or server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from parse_infer.errors import ModelError
from parse_infer.judge.adapter import ValidityAdapter, ValidityConfig, read_head
from parse_infer.judge.adapter_files import CONFIG, read_adapter
from parse_infer.judge.logprob_head import KNOWN_TEXT
from parse_infer.models.fingerprint import describe_config
from parse_infer.models.loading import load_config, load_served_model
from parse_infer.models.names import resolve


def transfer_adapter(adapter: str | Path, target: str | Path, folder: str | Path) -> Path:
    """Write the head of `adapter` as an adapter for `target`, of which only configuration and tokenizer are loaded.

    Its threshold accepts nothing until a calibration, because the right one depends on the pair. The range of usual
    drafts and the known text of the old target do not carry over: any draft is judged, and of the first server only
    the tokens are checked, so another model with the same tokenizer is not noticed.

    Raises:
        FileNotFoundError: the adapter or the target does not exist.
        ValueError: the adapter reads hidden states, which belong to one target; or `folder` holds an adapter.
    """
    if (Path(folder).expanduser() / CONFIG).exists():
        raise ModelError(f"{folder} holds an adapter already: choose another folder, or delete it")
    files = read_adapter(resolve(adapter))
    config = ValidityConfig.from_dict(files.validity_config)
    if config.stream is not None:
        raise ModelError(
            f"the adapter {str(adapter)!r} reads hidden states of its target {config.target['name']!r}: "
            f"transfer the one it was trained from, {config.stream['start_from']!r}"
        )
    trained_for = config.provenance.get("trained_for", config.target["name"])
    name = Path(target).name if Path(target).expanduser().exists() else str(target)
    assert config.logprobs is not None
    known = {"ids": load_served_model(target).render(KNOWN_TEXT), "logprobs": []}
    config = replace(
        config,
        target=describe_config(load_config(target), "") | {"name": name},
        logprobs={key: config.logprobs[key] for key in ("head", "reads") if key in config.logprobs}
        | {"reference": known},
        threshold=2.0,
        risk=None,
        metrics={},
        provenance={"transferred_from": str(adapter), "trained_for": trained_for},
    )
    head = read_head(str(adapter), config, files.head)
    return ValidityAdapter(config, head, train_problems=files.train_problems).save_pretrained(folder)
