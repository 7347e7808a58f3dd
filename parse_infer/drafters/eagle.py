"""EAGLE-3 (arXiv 2503.01840) and its parallel form P-EAGLE (arXiv 2602.01469): one layer on the model's features.

The head reads what stands behind a low, a middle and a high layer of the model, fused to one vector per token, beside
the embedding of the next token. EAGLE-3 drafts token by token, its own output taking the place of the features it has
not seen; as a chain, or as a tree of the most likely continuations. The parallel form drafts a whole block in one
forward: a learnt stand-in for the missing features and a mask token fill the places ahead.

A head is a folder with `config.json` and `model.safetensors` under the names that vLLM and SGLang load.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from parse_infer.loading import LanguageModel
from parse_infer.sampling import Sampling, distribution, draw
from parse_infer.speculation import ROOT, Guess

ARCHITECTURE = "LlamaForCausalLMEagle3"


@dataclass
class EagleConfig:
    """Content of config.json; field names are those of EAGLE-3 checkpoints.

    Attributes:
        hidden_size, vocab_size: of the guided model.
        draft_vocab_size: tokens the head can guess; `d2t` maps them to the model's.
        eagle_aux_hidden_state_layer_ids: where the features are taken: the states that enter these layers.
        parallel_drafting, ptd_token_id: P-EAGLE, and the token whose embedding fills the places ahead.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    eagle_aux_hidden_state_layer_ids: tuple[int, ...]
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    max_position_embeddings: int = 4096
    parallel_drafting: bool = False
    ptd_token_id: int | None = None

    def __post_init__(self) -> None:
        self.eagle_aux_hidden_state_layer_ids = tuple(self.eagle_aux_hidden_state_layer_ids)
        if self.parallel_drafting and self.ptd_token_id is None:
            raise ValueError("a parallel EAGLE head needs ptd_token_id, the token that fills the places ahead")

    def to_dict(self) -> dict[str, Any]:
        shared = {"architectures": [ARCHITECTURE], "model_type": "llama", "num_hidden_layers": 1, "hidden_act": "silu"}
        return shared | {"tie_word_embeddings": False, "target_hidden_size": self.hidden_size} | asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> EagleConfig:
        """Raises ValueError for another architecture or a missing key; keys that are not known are left out."""
        if values.get("architectures") not in ([ARCHITECTURE], ["Eagle3LlamaForCausalLM"]):
            raise ValueError(f"this is no EAGLE-3 head: its architecture is {values.get('architectures')}")
        values = {"rope_theta": (values.get("rope_parameters") or {}).get("rope_theta", 10000.0), **values}
        known = {f.name: values[f.name] for f in fields(cls) if f.name in values}
        if "head_dim" not in known and {"hidden_size", "num_attention_heads"} <= known.keys():
            known["head_dim"] = known["hidden_size"] // known["num_attention_heads"]
        try:
            return cls(**known)
        except TypeError as error:
            raise ValueError(f"config.json of an EAGLE-3 head is incomplete: {error}") from error


class _Attention(nn.Module):
    def __init__(self, c: EagleConfig) -> None:
        super().__init__()
        self.config = c
        self.q_proj = nn.Linear(2 * c.hidden_size, c.num_attention_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)

    def forward(
        self, x: Tensor, positions: Tensor, mask: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """x [B, T, 2H], positions [B, T], mask bool [B, 1, T, past + T] -> ([B, T, H], keys and values so far)."""
        d = self.config.head_dim
        q, k, v = (p(x).unflatten(-1, (-1, d)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (_rotate(t, positions, self.config.rope_theta) for t in (q, k))
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2)), (k, v)


def _rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary positions (the halves layout of Llama) for [B, heads, T, D]."""
    half = x.shape[-1] // 2
    rates = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = positions[:, None, :, None].float() * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class _MLP(nn.Module):
    def __init__(self, c: EagleConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self, c: EagleConfig) -> None:
        super().__init__()
        self.self_attn, self.mlp = _Attention(c), _MLP(c)
        self.hidden_norm, self.input_layernorm, self.post_attention_layernorm = (
            nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps) for _ in range(3)
        )


class EagleHead(nn.Module):
    """The head. `forward` runs its layer; `logits` reads guesses off the result.

    Raises:
        ValueError: features of another number than the configuration lists.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        n_features = len(config.eagle_aux_hidden_state_layer_ids)
        self.fc = nn.Linear(n_features * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = _Layer(config)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        if config.parallel_drafting:
            self.mask_hidden = nn.Parameter(torch.zeros(1, n_features * config.hidden_size))
        # Checkpoints hold offsets: the model's token is the head's token plus d2t of it.
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)

    def set_vocabulary(self, tokens: Sequence[int]) -> None:
        """Let the head guess these tokens of the model's vocabulary (draft_vocab_size of them, ascending)."""
        if len(tokens) != self.config.draft_vocab_size or list(tokens) != sorted(set(tokens)):
            raise ValueError(f"the head's vocabulary must be {self.config.draft_vocab_size} ascending tokens")
        ids = torch.tensor(list(tokens), device=self.d2t.device)
        self.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
        self.t2d.zero_()[ids] = True

    def forward(
        self,
        hidden: Tensor,
        embeddings: Tensor,
        positions: Tensor,
        mask: Tensor,
        past: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """One pass of the layer.

        Args:
            hidden: [B, T, H], fused features (`fc` of the tapped states) or the head's own output for them.
            embeddings: [B, T, H], of the token after each.
            positions: [B, T]; mask: bool [B, 1, T, past + T]; past: keys and values of earlier tokens.

        Returns:
            The output [B, T, H] before the final norm, and keys and values of all tokens.
        """
        layer = self.midlayer
        x = torch.cat([layer.input_layernorm(embeddings), layer.hidden_norm(hidden)], dim=-1)
        attended, cache = layer.self_attn(x, positions, mask, past)
        hidden = hidden + attended
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden)), cache

    def logits(self, output: Tensor) -> Tensor:
        """[..., H] -> [..., draft_vocab_size]"""
        return self.lm_head(self.norm(output))

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write config.json and model.safetensors; each file is complete or not there."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        save_file(state, folder / ".model.partial", metadata={"format": "pt"})
        (folder / ".model.partial").rename(folder / "model.safetensors")
        (folder / ".config.partial").write_text(json.dumps(self.config.to_dict(), indent=2) + "\n", encoding="utf-8")
        (folder / ".config.partial").rename(folder / "config.json")
        return folder

    @classmethod
    def from_pretrained(cls, folder: str | Path, model: LanguageModel) -> EagleHead:
        """Load a head for `model`.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: a file is damaged, or the head belongs to another model.
        """
        folder = Path(folder)
        for name in ("config.json", "model.safetensors"):
            if not (folder / name).is_file():
                raise FileNotFoundError(f"{folder} is no complete EAGLE-3 head: {name} is missing")
        try:
            config = EagleConfig.from_dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))
            state = load_file(folder / "model.safetensors")
        except (SafetensorError, json.JSONDecodeError) as error:
            raise ValueError(f"the EAGLE-3 head {folder} is damaged ({error}): export or download it again") from error
        _check_model(str(folder), config, model)
        state.pop("embed_tokens.weight", None)  # the model's own embedding serves
        if config.draft_vocab_size < config.vocab_size and "d2t" not in state:
            raise ValueError(
                f"the EAGLE-3 head {folder} guesses {config.draft_vocab_size} of {config.vocab_size} tokens, but has "
                "no d2t map that says which: export it again with the map"
            )
        head = cls(config)
        state = {"d2t": head.d2t, "t2d": head.t2d} | state
        try:
            head.load_state_dict(state)
        except RuntimeError as error:
            reason = str(error).splitlines()[-1].strip()
            raise ValueError(
                f"the weights of the EAGLE-3 head {folder} do not fit its config.json: {reason}"
            ) from error
        weight: Any = model.model.get_input_embeddings().weight
        return head.to(weight.device, weight.dtype).eval().requires_grad_(False)


def _check_model(name: str, config: EagleConfig, model: LanguageModel) -> None:
    own = model.model.config.get_text_config(decoder=True)
    for key in ("hidden_size", "vocab_size"):
        if getattr(config, key) != getattr(own, key):
            raise ValueError(
                f"the EAGLE-3 head {name} was trained for a model with {key} {getattr(config, key)}; "
                f"{model.name!r} has {getattr(own, key)}: use a head trained for it"
            )
    deepest = max(config.eagle_aux_hidden_state_layer_ids)
    if deepest > own.num_hidden_layers:
        raise ValueError(
            f"the EAGLE-3 head {name} reads layer {deepest}, but {model.name!r} has {own.num_hidden_layers} layers: "
            "use a head trained for it"
        )


class EagleDrafter:
    """Guesses with an EAGLE head: a chain or a tree, or with a parallel head a block in one forward.

    Args:
        head: trained for `model`.
        model: the guided model; its decoder keeps the features from now on.
        tokens: length of a chain or block, depth of a tree.
        top_k: children of a node, and nodes that are expanded on each level; 1: a chain.
        tree_tokens: of a tree, the most likely nodes that are kept.

    Raises:
        ValueError: a size below 1, or a tree from a parallel head.
    """

    def __init__(
        self, head: EagleHead, model: LanguageModel, tokens: int = 5, top_k: int = 1, tree_tokens: int = 16
    ) -> None:
        if min(tokens, top_k, tree_tokens) < 1:
            raise ValueError(f"tokens, top_k and tree_tokens must be at least 1, not {tokens}, {top_k}, {tree_tokens}")
        if top_k > 1 and head.config.parallel_drafting:
            raise ValueError("a parallel head drafts a block, not a tree: leave top_k at 1")
        self.head, self.model = head, model
        self.tokens, self.top_k, self.tree_tokens = tokens, top_k, tree_tokens
        self.forwards = 0
        self._embeddings: Tensor = model.model.get_input_embeddings().weight  # type: ignore[assignment]
        self._past: tuple[Tensor, Tensor] | None = None
        model.decoder.tap(head.config.eagle_aux_hidden_state_layer_ids)

    @torch.inference_mode()
    def guess(self, ids: Sequence[int], limit: int, sampling: Sampling, generator: torch.Generator | None) -> Guess:
        size = min(self.tokens, limit)
        if self.model.decoder.cached != len(ids) - 1:
            return Guess.chain(())  # the model has still to read its context, which costs a forward in any case
        start, features = self.model.decoder.drain()
        self._crop(start)
        if features is None:
            return Guess.chain(())
        following = self._embed(ids[start + 1 :])
        if self.head.config.parallel_drafting:
            return self._block(features, following, size, sampling, generator)
        output = self._run(self.head.fc(features), following, causal=True)
        if size < 1:
            return Guess.chain(())
        guess = self._chain if self.top_k == 1 else self._tree
        try:
            return guess(output[-1:], size, sampling, generator)  # type: ignore[operator]
        finally:
            self._crop(len(ids) - 1)

    def _block(
        self, features: Tensor, following: Tensor, size: int, sampling: Sampling, generator: torch.Generator | None
    ) -> Guess:
        ahead = max(0, size - 1)
        mask_token = self._embed([self.head.config.ptd_token_id or 0]).expand(ahead, -1)
        hidden = self.head.fc(torch.cat([features, self.head.mask_hidden.expand(ahead, -1)]))
        output = self._run(hidden, torch.cat([following, mask_token]), causal=True)
        self._crop(self._past_length - ahead)
        if size < 1:
            return Guess.chain(())
        return self._draw(self.head.logits(output[-size:]), sampling, generator)

    def _chain(self, last: Tensor, size: int, sampling: Sampling, generator: torch.Generator | None) -> Guess:
        tokens: list[int] = []
        drawn: list[Tensor] = []
        while True:
            one = self._draw(self.head.logits(last), sampling, generator)
            tokens += one.tokens
            drawn += [] if one.drawn_from is None else [one.drawn_from]
            if len(tokens) == size or tokens[-1] in self.model.eos_ids:
                return Guess.chain(tokens, torch.cat(drawn) if drawn else None)
            last = self._run(last, self._embed(tokens[-1:]), causal=True)

    def _tree(self, last: Tensor, size: int, sampling: Sampling, generator: torch.Generator | None) -> Guess:
        """The most likely continuations (EAGLE-2's dynamic tree): expand the best, keep the best of all.

        Nodes are chosen without chance, so the walk is exact for sampling too.
        """
        tokens: list[int] = []
        parents: list[int] = []
        scores: list[float] = []
        frontier, outputs, seen = [ROOT], last, None
        level_scores = [0.0]
        for depth in range(size):
            likely = self.head.logits(outputs).float().log_softmax(-1).topk(self.top_k, dim=-1)
            ids = (likely.indices + self.head.d2t[likely.indices]).tolist()
            first = len(tokens)
            for node, above, row, gains in zip(frontier, level_scores, ids, likely.values.tolist(), strict=True):
                tokens += row
                parents += [node] * len(row)
                scores += [above + gain for gain in gains]
            if depth == size - 1:
                break
            best = sorted(range(first, len(tokens)), key=lambda i: -scores[i])[: self.top_k]
            rows = torch.tensor([frontier.index(parents[i]) for i in best], device=outputs.device)
            # A node sees the context, its ancestors among the nodes that were expanded, and itself.
            own = torch.eye(len(best), dtype=torch.bool, device=outputs.device)
            above_seen = seen[rows] if seen is not None else own.new_zeros(len(best), 0)
            seen = torch.cat([above_seen, own], dim=1)
            outputs = self._run(outputs[rows], self._embed([tokens[i] for i in best]), seen=seen)
            frontier, level_scores = best, [scores[i] for i in best]
        kept = sorted(sorted(range(len(tokens)), key=lambda i: -scores[i])[: self.tree_tokens])
        # A parent is at least as likely as its children and stands before them, so it is kept with them.
        place = {ROOT: ROOT} | {node: i for i, node in enumerate(kept)}
        return Guess([tokens[i] for i in kept], [place[parents[i]] for i in kept])

    def _draw(self, logits: Tensor, sampling: Sampling, generator: torch.Generator | None) -> Guess:
        if sampling.greedy:
            ids = logits.argmax(-1)
            return Guess.chain((ids + self.head.d2t[ids]).tolist())
        q = distribution(logits, sampling)
        ids = draw(q, generator)
        columns = torch.arange(q.shape[-1], device=q.device) + self.head.d2t
        full = q.new_zeros(len(q), self.head.config.vocab_size).index_copy_(1, columns, q)
        return Guess.chain((ids + self.head.d2t[ids]).tolist(), full)

    def _run(self, hidden: Tensor, following: Tensor, *, causal: bool = False, seen: Tensor | None = None) -> Tensor:
        """The layer over n tokens behind what it has read, [n, H] -> [n, H]: causally, or on one level of a tree where
        `seen` [n, m] says which of the last m tokens (these n included) each may see."""
        n, past = len(hidden), self._past_length
        if causal:
            positions = torch.arange(past, past + n, device=hidden.device)
            mask = torch.arange(past + n, device=hidden.device) <= positions[:, None]
        else:
            assert seen is not None
            before = past + n - seen.shape[1]
            depth = seen.sum(-1) - 1
            positions = before + depth
            mask = torch.cat([seen.new_ones(n, before), seen], dim=1)
        output, self._past = self.head(hidden[None], following[None], positions[None], mask[None, None], self._past)
        self.forwards += 1
        return output[0]

    @property
    def _past_length(self) -> int:
        """Tokens the head has read."""
        return 0 if self._past is None else self._past[0].shape[2]

    def _crop(self, length: int) -> None:
        if self._past is not None and length < self._past_length:
            keys, values = self._past
            self._past = (keys[:, :, :length], values[:, :, :length])

    def _embed(self, ids: Sequence[int]) -> Tensor:
        return self._embeddings[torch.tensor(list(ids), device=self._embeddings.device)]
