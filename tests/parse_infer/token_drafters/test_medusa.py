"""Medusa heads: the guesses of a plain forward, the likeliest tree, lossless whatever they guess, a known layout."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from parse_infer.models.attention import enable_split_attention
from parse_infer.settings.sampling import Sampling
from parse_infer.token_drafters.decode import speculative_decode
from parse_infer.token_drafters.eagle import EagleDrafter
from parse_infer.token_drafters.medusa import MedusaConfig, MedusaDrafter, MedusaHead
from parse_infer.token_drafters.proposer import ROOT
from parse_infer.token_drafters.registry import load_token_drafter
from parse_infer.token_drafters.tree import likeliest_tree
from tests.parse_infer.language_models import language_model
from tests.parse_infer.token_drafters.test_eagle import make_head as make_eagle_head


@pytest.fixture(params=["llama_gqa", "qwen3"])
def lm(request, make_model, tokenizer):
    model = make_model(request.param)
    enable_split_attention(model)
    return language_model(model, tokenizer, "target")


def make_heads(lm, vocabulary: int = 200, heads: int = 4) -> MedusaHead:
    own = lm.model.config
    torch.manual_seed(0)
    head = MedusaHead(MedusaConfig(own.hidden_size, own.vocab_size, heads, 2, vocabulary))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(std=0.3)
    head.token_map.copy_(torch.randperm(own.vocab_size)[:vocabulary].sort().values)
    return head.eval()


def at_the_end_of(lm, ids: list[int]) -> None:
    """All but the last token of the context has been read, as between two blocks."""
    lm.decoder.seek(ids[:-1])
    lm.decoder.forward()
    lm.decoder.seek(ids)


def test_heads_read_the_last_state(lm, random_ids):
    head, ids = make_heads(lm), random_ids(15)
    drafter = MedusaDrafter(head, lm, top_k=1)
    for length in (9, 15, 11):  # grows, and is cut back
        lm.decoder.seek(ids[:length])
        at_the_end_of(lm, ids[:length])
        guess = drafter.propose(lm.decoder.ids, 9, Sampling(), None)
        with torch.no_grad():
            state = lm.model.model(torch.tensor([ids[: length - 1]]), use_cache=False).last_hidden_state[0, -1]
            assert list(guess.tokens) == [int(head.token_map[row.argmax()]) for row in head(state)]
        assert list(guess.parents) == [ROOT, 0, 1, 2]


def test_the_tree_holds_the_likeliest_combinations():
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    p = logits.log_softmax(-1)
    paths = {  # by brute force
        path: sum(float(p[d, token]) for d, token in enumerate(path))
        for depth in (1, 2, 3)
        for path in itertools.product(range(7), repeat=depth)
    }
    wanted = sorted(paths, key=lambda path: -paths[path])[:12]
    guess = likeliest_tree(logits, torch.arange(7) + 100, 7, 12)
    found = []
    for node in range(12):
        path = []
        while node != ROOT:
            path.insert(0, guess.tokens[node] - 100)
            assert guess.parents[node] < node
            node = guess.parents[node]
        found.append(tuple(path))
    assert found == wanted


@pytest.mark.parametrize("top_k", [1, 3])
def test_greedy_decoding_is_the_models_own(lm, random_ids, top_k):
    drafter = MedusaDrafter(make_heads(lm), lm, top_k=top_k, tree_tokens=9)
    for seed in range(4):
        prompt = random_ids(11, seed)
        lm.decoder.seek(prompt)
        expected = list(lm.decoder.decode(24))
        lm.decoder.seek([])
        lm.decoder.seek(prompt)
        assert list(speculative_decode(lm.decoder, drafter, 24)) == expected
    assert drafter.forwards > 0


def test_heads_that_know_the_answer_save_forwards(lm, random_ids, monkeypatch):
    """Guards against guesses that never reach the model."""
    drafter = MedusaDrafter(make_heads(lm, vocabulary=260), lm, top_k=1)
    prompt = random_ids(11)
    lm.decoder.seek(prompt)
    truth = prompt + list(lm.decoder.decode(24))

    def rigged(state: torch.Tensor) -> torch.Tensor:
        at = len(lm.decoder.ids)
        wanted = torch.tensor([truth[min(at + k, len(truth) - 1)] for k in range(4)])
        return torch.nn.functional.one_hot(torch.searchsorted(drafter.head.token_ids, wanted), 260).float()

    monkeypatch.setattr(drafter.head, "forward", rigged)
    lm.decoder.seek([])
    lm.decoder.seek(prompt)
    before = lm.decoder.forwards
    assert list(speculative_decode(lm.decoder, drafter, 24)) == truth[11:]
    assert lm.decoder.forwards - before <= 1 + 24 // 5 + 1


def test_a_parallel_head_makes_trees_too(lm, random_ids):
    drafter = EagleDrafter(make_eagle_head(lm, parallel=True), lm, tokens=3, top_k=3, tree_tokens=8)
    at_the_end_of(lm, random_ids(12))
    guess = drafter.propose(lm.decoder.ids, 3, Sampling(), None)
    assert len(guess.tokens) == 8 and len(set(guess.parents)) < 8 and drafter.forwards == 1


def test_the_checkpoint_has_the_layout_that_vllm_loads(lm, tmp_path: Path):
    head = make_heads(lm)
    head.save_pretrained(tmp_path)
    h = lm.model.config.hidden_size
    expected: dict[str, tuple[int, ...]] = {"token_map": (200,)}
    for i in range(4):
        expected |= {f"blocks.{i}.layers.{j}.weight": (h, h) for j in range(2)} | {f"lm_heads.{i}.weight": (200, h)}
    assert {k: tuple(v.shape) for k, v in load_file(tmp_path / "model.safetensors").items()} == expected
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["MedusaModel"] and config["model_type"] == "medusa"
    assert (config["num_heads"], config["num_hidden_layers"], config["truncated_vocab_size"]) == (4, 2, 200)
    loaded = load_token_drafter(str(tmp_path), lm)
    assert isinstance(loaded, MedusaDrafter)
    for name, tensor in head.state_dict().items():
        assert torch.equal(loaded.head.state_dict()[name], tensor), name
    make_heads(lm, vocabulary=260).save_pretrained(tmp_path)  # nothing to map, so no map
    assert "token_map" not in load_file(tmp_path / "model.safetensors")
    assert load_token_drafter(str(tmp_path), lm).head.token_ids.tolist() == list(range(260))


@pytest.mark.parametrize(
    ("change", "sizes", "message"),
    [
        ({"hidden_size": 64}, "", "trained for a model with hidden_size 64; 'target' has 32"),
        ({"num_heads": 5}, "", "do not fit its config.json"),
        ({"architectures": ["LlamaForCausalLM"]}, "", "its architecture is LlamaForCausalLM, not one of"),
        ({}, ":tokens=5", "4 Medusa heads propose at most 4 tokens, not 5"),
        ({}, ":top_k=2:tree_tokens=99999", "99999 proposed tokens do not fit the context window of 'target'"),
        ({}, ":top_k=0", "top_k of a token drafter must be at least 1, not 0"),
        ({}, ":depth=3", "'depth' is no size of the token drafter"),
    ],
)
def test_what_does_not_fit_is_refused(lm, tmp_path: Path, change, sizes, message):
    make_heads(lm).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=re.escape(message)):
        load_token_drafter(f"{tmp_path}{sizes}", lm)


def test_every_configuration_is_supported_or_rejected(lm, tmp_path: Path):
    make_heads(lm).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"topk": 10, "medusa_fc_bias": False}))
    MedusaHead.from_pretrained(tmp_path, lm)
    (tmp_path / "config.json").write_text(json.dumps(config | {"medusa_fc_bias": True}))
    with pytest.raises(ValueError, match="sets medusa_fc_bias to True, which is not supported"):
        MedusaHead.from_pretrained(tmp_path, lm)
