"""The check at loading that an architecture runs the packed pass exactly."""

from __future__ import annotations

from weakref import WeakSet

import torch
from torch import Tensor
from transformers import PreTrainedModel

from parse_infer.errors import ModelError
from parse_infer.judge.packing import probes, readout_index
from parse_infer.models.architecture import text_config
from parse_infer.models.decoder import Decoder

_checked: WeakSet[PreTrainedModel] = WeakSet()


def check_packed_pass(model: PreTrainedModel) -> None:
    """Compare two packed probes with two separate passes; raise ValueError if the results differ.

    Some architectures derive positions from the order of tokens (ALiBi, learnt offsets) and would be silently wrong.
    """
    if model in _checked:
        return
    size = text_config(model).vocab_size
    tokens = [i % size for i in (1, 2, 3, 5, 7, 11, 13, 17)]
    context, draft, probe = tokens[:3], tokens[3:6], tokens[6:]
    packed = Decoder(model, ())
    packed.seek(context)
    output = packed.forward(draft, probes(probe, [4, 6], 6, model.device))
    with torch.inference_mode():
        pairs = [(packed.logits(output.hidden[-1]), _last_logits(model, context + draft))]
        states = output.trailing[readout_index(2, len(probe))]
        for row, visible in enumerate((4, 6)):
            pairs.append((packed.logits(states[row]), _last_logits(model, (context + draft)[:visible] + probe)))
    limit = 1e-3 if model.dtype == torch.float32 else 0.1
    for ours, own in pairs:
        difference = (ours.float() - own.float()).norm() / own.float().norm().clamp_min(1e-6)
        if not difference <= limit:
            raise ModelError(
                f"{type(model).__name__} gives other results for packed probes than for separate ones (relative "
                f"difference {difference:.1e}): its positions do not follow position_ids; choose another target"
            )
    _checked.add(model)


def _last_logits(model: PreTrainedModel, ids: list[int]) -> Tensor:
    return model(input_ids=torch.tensor([ids], device=model.device), use_cache=False).logits[0, -1]
