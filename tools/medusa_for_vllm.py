"""Convert a Medusa head to the form that vLLM 0.32 runs. vLLM loads EAGLE-3 and parallel heads unchanged.

vLLM needs heads over the whole vocabulary. It reads any key with "num" and "layers" in its
name as the number of layers.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from parse_infer.files import replacing_folder, write_json
from parse_infer.token_drafters.head_files import CONFIG, WEIGHTS, read_config, read_weights


def convert(head: str | Path, folder: str | Path, vocab_size: int) -> Path:
    """Write `head` with a row for each token of the vocabulary; tokens outside its token map get the logit 0.

    Args:
        vocab_size: of the target.

    Raises:
        FileNotFoundError, ValueError: the head is incomplete.
    """
    config, weights = read_config(Path(head)), read_weights(Path(head))
    known = weights.pop("token_map", torch.arange(config["vocab_size"]))
    for name, rows in weights.items():
        if name.startswith("lm_heads."):
            weights[name] = torch.zeros(vocab_size, rows.shape[1], dtype=rows.dtype).index_copy(0, known, rows)
    config = {key: value for key, value in config.items() if key != "target_num_hidden_layers"}
    with replacing_folder(folder) as beside:
        write_json(beside / CONFIG, config | {"vocab_size": vocab_size, "truncated_vocab_size": vocab_size})
        save_file(weights, beside / WEIGHTS, metadata={"format": "pt"})
    return Path(folder)
