"""What heads of every kind share: their files, whether they fit the model, and how their logits become a guess."""

from __future__ import annotations

import heapq
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from parse_infer.loading import LanguageModel
from parse_infer.sampling import Sampling, distribution, draw
from parse_infer.speculation import ROOT, Guess

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def save_head(folder: str | Path, head: nn.Module, config: Mapping[str, Any]) -> Path:
    """Write config.json and model.safetensors; each file is complete or not there."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
    save_file(state, folder / ".model.partial", metadata={"format": "pt"})
    (folder / ".model.partial").rename(folder / WEIGHTS)
    (folder / ".config.partial").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / ".config.partial").rename(folder / CONFIG)
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a head.

    Raises:
        FileNotFoundError: a file of the head is missing.
        ValueError: config.json is damaged.
    """
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} is no complete head: {name} is missing")
    try:
        return json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{folder / CONFIG} is damaged ({error}): export or download the head again") from error


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Raises ValueError for a damaged file."""
    try:
        return load_file(folder / WEIGHTS)
    except SafetensorError as error:
        raise ValueError(f"{folder / WEIGHTS} is damaged ({error}): export or download the head again") from error


def check_shape(name: str, config: Any, model: LanguageModel) -> None:
    """Raises ValueError for a head of another model.

    Args:
        config: has hidden_size, vocab_size and target_num_hidden_layers; the last is None in heads trained elsewhere.
    """
    own = model.model.config.get_text_config(decoder=True)
    keys = {"hidden_size": "hidden_size", "vocab_size": "vocab_size", "target_num_hidden_layers": "num_hidden_layers"}
    for key, own_key in keys.items():
        if getattr(config, key) not in (None, getattr(own, own_key)):
            raise ValueError(
                f"the head {name} was trained for a model with {own_key} {getattr(config, key)}; "
                f"{model.name!r} has {getattr(own, own_key)}: use a head trained for it"
            )


def load_state(head: Any, state: Mapping[str, Tensor], name: str, model: LanguageModel) -> None:
    """Put the weights in, and the head beside the model. Raises ValueError where they do not fit config.json."""
    try:
        head.load_state_dict(dict(state))
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise ValueError(f"the weights of the head {name} do not fit its config.json: {reason}") from error
    least, most = head.token_ids.aminmax()
    if least < 0 or most >= head.config.vocab_size:
        raise ValueError(
            f"the head {name} maps to token {int(least if least < 0 else most)}, but there are "
            f"{head.config.vocab_size}: its token map is damaged"
        )
    weight: Any = model.model.get_input_embeddings().weight
    head.to(weight.device, weight.dtype).eval().requires_grad_(False)


def check_sizes(model: LanguageModel, tokens: int, top_k: int, tree_tokens: int) -> None:
    """Raises ValueError for a size below 1 and for a guess that the context window cannot hold."""
    for key, value in (("tokens", tokens), ("top_k", top_k), ("tree_tokens", tree_tokens)):
        if value < 1:
            raise ValueError(f"{key} of a token drafter must be at least 1, not {value}")
    size = max(tokens, tree_tokens if top_k > 1 else 0)
    if size >= model.window:
        raise ValueError(
            f"guesses of {size} tokens do not fit the context window of {model.name!r} ({model.window}): "
            "choose fewer tokens or tree_tokens"
        )


def chain(
    logits: Tensor, token_ids: Tensor, vocab_size: int, sampling: Sampling, generator: torch.Generator | None
) -> Guess:
    """One token per row of logits [n, V'], each the most likely or drawn as the model draws.

    Args:
        token_ids: int64 [V'], the model's token for each of the head's.
        vocab_size: V of the model.
    """
    if sampling.greedy:
        return Guess.chain(token_ids[logits.argmax(-1)].tolist())
    q = distribution(logits, sampling)
    tokens = token_ids[draw(q, generator)]
    return Guess.chain(tokens.tolist(), q.new_zeros(len(q), vocab_size).index_copy_(1, token_ids, q))


def likeliest_tree(logits: Tensor, token_ids: Tensor, top_k: int, tree_tokens: int) -> Guess:
    """The most likely `tree_tokens` paths from the root where row d of logits [n, V'] speaks for depth d alone.

    Best first: a node is taken before its children and before its less likely siblings. Nodes are chosen without
    chance, so the walk stays exact for sampling too.
    """
    likely = logits.float().log_softmax(-1).topk(min(top_k, logits.shape[-1]), dim=-1)
    costs, ids = (-likely.values).tolist(), token_ids[likely.indices].tolist()
    tokens: list[int] = []
    parents: list[int] = []
    waiting = [(costs[0][0], 0, 0, ROOT, 0.0)]  # cost of the path, depth, rank among siblings, parent, cost above
    while waiting and len(tokens) < tree_tokens:
        cost, depth, rank, parent, above = heapq.heappop(waiting)
        node = len(tokens)
        tokens.append(ids[depth][rank])
        parents.append(parent)
        if depth + 1 < len(costs):
            heapq.heappush(waiting, (cost + costs[depth + 1][0], depth + 1, 0, node, cost))
        if rank + 1 < len(costs[depth]):
            heapq.heappush(waiting, (above + costs[depth][rank + 1], depth, rank + 1, parent, above))
    return Guess(tokens, parents)


def embed(model: LanguageModel, ids: Sequence[int]) -> Tensor:
    """[n, H], the model's input embeddings of the tokens."""
    weight: Any = model.model.get_input_embeddings().weight
    return weight[torch.tensor(list(ids), device=weight.device)]
