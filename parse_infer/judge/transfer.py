"""A trained judge for another target: heads on log-probabilities know no model, vocabulary or server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from parse_infer.errors import ModelError
from parse_infer.judge.adapter import ValidityAdapter, ValidityConfig, read_head
from parse_infer.judge.adapter_files import read_adapter
from parse_infer.models.fingerprint import describe_config
from parse_infer.models.loading import load_config, load_served_model
from parse_infer.models.names import resolve

_TEXT = "There are 12 eggs in a box. How many eggs are in 7 boxes?"  # which a server must be able to read


def transfer_adapter(adapter: str | Path, target: str | Path, folder: str | Path) -> Path:
    """Write the head of `adapter` as an adapter for `target`, of which only configuration and tokenizer are loaded.

    Its threshold accepts nothing until it is calibrated: how strict it must be depends on the pair. Neither the range
    of usual drafts nor the known text of the old target carries over, so any draft is judged, and a server is
    recognised by its model's shape alone.

    Raises:
        FileNotFoundError: the adapter or the target does not exist.
        ValueError: the adapter reads hidden states, which belong to one target; or `folder` is no adapter folder.
    """
    files = read_adapter(resolve(adapter))
    config = ValidityConfig.from_dict(files.validity_config)
    if config.logprobs is None:
        raise ModelError(
            f"the adapter {str(adapter)!r} reads the hidden states of its target {config.target['name']!r}, which no "
            "other model has: transfer one on log-probabilities, such as zoo:smollm2-adapter"
        )
    known = {"ids": load_served_model(target).render(_TEXT), "logprobs": []}
    config = replace(
        config,
        target=describe_config(load_config(target), "") | {"name": str(target)},
        logprobs={"head": config.logprobs["head"], "reads": config.logprobs["reads"], "reference": known},
        threshold=2.0,
        risk=None,
        metrics={},
        provenance={"transferred_from": str(adapter), "trained_for": config.target["name"]},
    )
    head = read_head(str(adapter), config, files.head)
    return ValidityAdapter(config, head, train_problems=files.train_problems).save_pretrained(folder)
