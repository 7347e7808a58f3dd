"""EAGLE heads: right features, the guesses of a plain forward, lossless whatever they guess, and a known layout."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from parse_infer.engine import ParseEngine
from parse_infer.models.attention import CHUNK_ROWS, enable_split_attention
from parse_infer.request.events import Resumed
from parse_infer.settings.sampling import Sampling
from parse_infer.token_drafters.decode import speculative_decode
from parse_infer.token_drafters.eagle import EagleDrafter
from parse_infer.token_drafters.eagle_head import EagleConfig, EagleHead
from parse_infer.token_drafters.registry import load_token_drafter
from parse_infer.token_drafters.tree import branches
from tests.parse_infer.language_models import language_model, printable, resembling

LAYERS = (0, 1, 2)


@pytest.fixture
def lm(make_model, tokenizer):
    model = make_model("llama_gqa")
    enable_split_attention(model)
    return language_model(model, tokenizer, "target")


def make_head(lm, parallel: bool = False, vocabulary: int = 200, layers: tuple[int, ...] = LAYERS) -> EagleHead:
    own = lm.model.config
    torch.manual_seed(0)
    head = EagleHead(
        EagleConfig(
            hidden_size=own.hidden_size,
            intermediate_size=48,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            vocab_size=own.vocab_size,
            draft_vocab_size=vocabulary,
            eagle_aux_hidden_state_layer_ids=layers,
            parallel_drafting=parallel,
            ptd_token_id=7 if parallel else None,
        )
    )
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
    head.set_vocabulary(sorted(torch.randperm(own.vocab_size)[:vocabulary].tolist()))
    return head.eval()


def whole(lm, head: EagleHead, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Features [T, 3H] of `ids`, and the head's outputs [T - 1, H], by plain forwards without any cache."""
    with torch.no_grad():
        states = lm.model(torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states
        features = torch.cat([states[layer][0] for layer in LAYERS], dim=-1)
        n = len(ids) - 1
        embeddings = lm.model.get_input_embeddings()(torch.tensor(ids[1:]))
        mask = torch.ones(n, n, dtype=torch.bool).tril()[None, None]
        output, _ = head(head.fc(features[:-1])[None], embeddings[None], torch.arange(n)[None], mask)
    return features, output[0]


def test_captured_features_follow_the_context_through_seeks_and_trees(lm, random_ids):
    head, ids = make_head(lm), random_ids(20)
    decoder = lm.decoder
    capture = decoder.capture_hidden(LAYERS)
    features, _ = whole(lm, head, ids)
    decoder.seek(ids[:12])
    decoder.forward()
    start, found = capture.pop_hidden()
    assert start == 0
    torch.testing.assert_close(found, features[:12], atol=1e-4, rtol=0)
    assert capture.pop_hidden() == (12, None)
    decoder.forward(ids[12:18])
    decoder.seek(ids[:15])
    start, found = capture.pop_hidden()
    assert start == 11  # a pass reads the last context token again if it has no other
    torch.testing.assert_close(found, features[11:15], atol=1e-4, rtol=0)
    # A tree whose kept path is 15, 16, 17 among wrong branches.
    decoder.look_ahead(branches([3, ids[15], ids[16], 9, ids[17]], [-1, -1, 1, 1, 2], 15, decoder.device))
    decoder.keep([1, 2, 4])
    start, found = capture.pop_hidden()
    assert (start, decoder.ids) == (14, ids[:18])
    torch.testing.assert_close(found, features[14:18], atol=1e-4, rtol=0)
    decoder.seek(ids[:5])
    assert capture.pop_hidden() == (5, None)


def test_chain_tree_and_block_propose_what_the_head_computes_without_a_cache(lm, random_ids):
    """First guess: read off the plain forward. Deeper ones: the head's own output stands for the features."""
    ids = random_ids(15)
    for parallel in (False, True):
        head = make_head(lm, parallel)
        drafter = EagleDrafter(head, lm, tokens=3, top_k=1)
        for length in (9, 15, 11):  # grows, and is cut back
            lm.decoder.seek(ids[:length])
            lm.decoder.seek(ids[: length - 1])
            lm.decoder.forward()
            lm.decoder.seek(ids[:length])
            guess = drafter.propose(lm.decoder.ids, 3, Sampling(), None)
            features, _ = whole(lm, head, ids[:length])
            hidden = head.fc(features[:-1])
            following = ids[1:length]
            expected = []
            with torch.no_grad():
                for _ in range(3):
                    n = len(following)
                    mask = torch.ones(n, n, dtype=torch.bool).tril()[None, None]
                    embeddings = lm.model.get_input_embeddings()(torch.tensor(following))
                    out, _ = head(hidden[None], embeddings[None], torch.arange(n)[None], mask)
                    token = int(head.logits(out[0, -1]).argmax())
                    expected.append(token + int(head.d2t[token]))
                    ahead = head.fc(head.mask_hidden) if parallel else out[0, -1:]
                    hidden, following = torch.cat([hidden, ahead]), [*following, 7 if parallel else expected[-1]]
            assert list(guess.tokens) == expected, (parallel, length)


@pytest.mark.parametrize("seed", range(4))
def test_a_tree_holds_what_the_head_says_along_each_path(lm, random_ids, seed):
    """EAGLE-2's tree, built anew with a plain forward of the head for every path."""
    head, ids, top_k, depth = make_head(lm), random_ids(12, seed), 4, 5
    features, _ = whole(lm, head, ids)
    embed = lm.model.get_input_embeddings()

    def children(path: list[int]) -> list[tuple[int, float]]:
        """The likeliest tokens behind a path of drafted tokens, with their log-probabilities."""
        with torch.no_grad():
            hidden = head.fc(features[:-1])
            for n in range(len(path) + 1):
                following = torch.tensor([*ids[1:], *path[:n]])
                mask = torch.ones(len(following), len(following), dtype=torch.bool).tril()[None, None]
                out, _ = head(hidden[None], embed(following)[None], torch.arange(len(following))[None], mask)
                hidden = torch.cat([hidden, out[0, -1:]])
            best = head.logits(out[0, -1]).log_softmax(-1).topk(top_k)
        return list(zip(head.token_ids[best.indices].tolist(), best.values.tolist(), strict=True))

    level: dict[tuple[int, ...], float] = {(): 0.0}
    scores: dict[tuple[int, ...], float] = {}
    for _ in range(depth):
        below = {(*p, token): s + gain for p, s in level.items() for token, gain in children(list(p))}
        scores |= below
        level = dict(sorted(below.items(), key=lambda item: -item[1])[:top_k])
    drafter = EagleDrafter(head, lm, tokens=depth, top_k=top_k, tree_tokens=24)
    lm.decoder.seek(ids[:-1])
    lm.decoder.forward()
    lm.decoder.seek(ids)
    guess = drafter.propose(lm.decoder.ids, depth, Sampling(), None)
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(guess.tokens, guess.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert set(paths) == {p for p, _ in sorted(scores.items(), key=lambda item: -item[1])[:24]}


@pytest.mark.parametrize(("parallel", "top_k"), [(False, 1), (False, 3), (True, 1)])
def test_greedy_decoding_is_the_models_own(lm, random_ids, parallel, top_k):
    drafter = EagleDrafter(make_head(lm, parallel), lm, tokens=4, top_k=top_k, tree_tokens=9)
    for seed in range(4):
        prompt = random_ids(11, seed)
        lm.decoder.seek(prompt)
        expected = list(lm.decoder.decode(24))
        lm.decoder.seek([])
        lm.decoder.seek(prompt)
        assert list(speculative_decode(lm.decoder, drafter, 24)) == expected
    assert drafter.forwards > 0


@pytest.mark.parametrize("top_k", [1, 3])
def test_a_head_that_knows_the_answer_saves_forwards(lm, random_ids, top_k, monkeypatch):
    """Guards against guesses that never reach the model: a head rigged to say what comes next is believed."""
    drafter = EagleDrafter(make_head(lm, vocabulary=260), lm, tokens=4, top_k=top_k)
    prompt = random_ids(11)
    lm.decoder.seek(prompt)
    truth = prompt + list(lm.decoder.decode(24))
    step = [0]

    def rigged(output: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(len(output), 260)
        at = len(lm.decoder.ids) + step[0]
        logits[:, truth[min(at, len(truth) - 1)]] = 9.0
        step[0] += 1
        return logits

    monkeypatch.setattr(drafter.head, "logits", rigged)
    guess = drafter.propose
    monkeypatch.setattr(drafter, "propose", lambda *a: (step.__setitem__(0, 0), guess(*a))[1])
    lm.decoder.seek([])
    lm.decoder.seek(prompt)
    before = lm.decoder.forwards
    assert list(speculative_decode(lm.decoder, drafter, 24)) == truth[11:]
    assert lm.decoder.forwards - before <= 1 + 24 // 5 + 1


def test_sampling_through_a_head_draws_the_models_tokens(lm, random_ids):
    drafter = EagleDrafter(make_head(lm), lm, tokens=3, top_k=1)
    sampling, generator = Sampling(0.8, top_k=5), torch.Generator().manual_seed(0)
    prompt = random_ids(6)
    lm.decoder.seek(prompt)
    tokens = list(speculative_decode(lm.decoder, drafter, 30, sampling, generator))
    for i in range(len(tokens)):  # each is among the five that the settings allow there
        lm.decoder.seek(prompt + tokens[:i])
        assert tokens[i] in lm.decoder.next_logits().topk(5).indices.tolist(), i


def test_the_checkpoint_has_the_layout_that_vllm_loads(lm, tmp_path: Path):
    head = make_head(lm, parallel=True)
    head.save_pretrained(tmp_path)
    h, own = lm.model.config.hidden_size, lm.model.config
    layer = "midlayer."
    expected = {
        "fc.weight": (h, 3 * h),
        "norm.weight": (h,),
        "lm_head.weight": (200, h),
        "d2t": (200,),
        "t2d": (own.vocab_size,),
        "mask_hidden": (1, 3 * h),
        layer + "hidden_norm.weight": (h,),
        layer + "input_layernorm.weight": (h,),
        layer + "post_attention_layernorm.weight": (h,),
        layer + "self_attn.q_proj.weight": (32, 2 * h),
        layer + "self_attn.k_proj.weight": (16, 2 * h),
        layer + "self_attn.v_proj.weight": (16, 2 * h),
        layer + "self_attn.o_proj.weight": (h, 32),
        layer + "mlp.gate_proj.weight": (48, h),
        layer + "mlp.up_proj.weight": (48, h),
        layer + "mlp.down_proj.weight": (h, 48),
    }
    assert {k: tuple(v.shape) for k, v in load_file(tmp_path / "model.safetensors").items()} == expected
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["draft_vocab_size"], config["vocab_size"], config["num_hidden_layers"]) == (200, own.vocab_size, 1)
    assert config["eagle_aux_hidden_state_layer_ids"] == list(LAYERS) and config["parallel_drafting"] is True
    loaded = EagleHead.from_pretrained(tmp_path, lm)
    for name, tensor in head.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    chosen = torch.arange(200) + loaded.d2t
    assert torch.equal(loaded.t2d.nonzero()[:, 0], chosen)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"hidden_size": 64, "target_hidden_size": 64, "head_dim": 8},
            "trained for a model with hidden_size 64; 'target' has 32",
        ),
        ({"vocab_size": 300}, "vocab_size 300; 'target' has 260"),
        ({"target_num_hidden_layers": 9}, "trained for a model with num_hidden_layers 9; 'target' has"),
        ({"eagle_aux_hidden_state_layer_ids": [-1, 1, 2]}, "reads layer -1, but 'target' has"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}, "reads layer 9, but 'target' has"),
        ({"intermediate_size": 50}, "do not fit its config.json"),
        ({"ptd_token_id": None, "parallel_drafting": True}, "needs ptd_token_id"),
    ],
)
def test_a_head_for_another_model_is_refused(lm, tmp_path: Path, change, message):
    make_head(lm).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=re.escape(message)):
        EagleHead.from_pretrained(tmp_path, lm)


def test_a_missing_map_or_file_is_named(lm, tmp_path: Path):
    make_head(lm).save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    save_file({k: v for k, v in state.items() if k not in ("d2t", "t2d")}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="no d2t map"):
        EagleHead.from_pretrained(tmp_path, lm)
    save_file(state | {"d2t": state["d2t"] + 100}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="its token map is damaged"):
        EagleHead.from_pretrained(tmp_path, lm)
    (tmp_path / "model.safetensors").write_bytes(b"half a file")
    with pytest.raises(ValueError, match="damaged"):
        EagleHead.from_pretrained(tmp_path, lm)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors is missing"):
        EagleHead.from_pretrained(tmp_path, lm)


def test_a_resume_proposes_at_once(make_model, tokenizer, random_adapter, tmp_path: Path):
    """The verification pass leaves the features of the accepted prefix: the head alone costs no forward."""
    model = printable(make_model("llama_gqa"), tokenizer)
    target = language_model(model, tokenizer, "target")
    draft = language_model(printable(resembling(make_model, model, 0.1, "llama_gqa"), tokenizer), tokenizer, "draft")
    make_head(target).save_pretrained(tmp_path)
    adapter = random_adapter(model)
    plain = ParseEngine.from_models(target, draft, adapter).generate(
        "Tom has 5 apples.", max_new_tokens=30, threshold=1.01, block_tokens="whole"
    )
    drafter = load_token_drafter(str(tmp_path), target, draft)
    engine = ParseEngine.from_models(target, draft, adapter, target_drafter=drafter)
    ours = engine.generate("Tom has 5 apples.", max_new_tokens=30, threshold=1.01, block_tokens="whole")
    assert ours.token_ids == plain.token_ids
    # At worst every guess is wrong: then each token costs the one forward that it costs without a head.
    assert ours.stats.target_forwards <= plain.stats.target_forwards
    assert ours.stats.drafter_forwards > 0
    first = drafter.forwards
    engine.target.decoder.seek([])
    events = engine.stream("Tom has 5 apples.", max_new_tokens=30, threshold=1.01, block_tokens="whole")
    for event in events:
        if isinstance(event, Resumed):
            break
    before = engine.target.decoder.forwards
    next(events)  # the second token of the resume
    assert engine.target.decoder.forwards == before + 1 and drafter.forwards > first


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "sets rope_scaling to"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0}}, "sets rope_parameters to"),
        ({"norm_before_residual": True}, "sets norm_before_residual to True, which is not supported"),
        ({"num_hidden_layers": 2}, "sets num_hidden_layers to 2, which is not supported; only 1 is"),
        ({"hidden_act": "gelu"}, "only 'silu' is"),
        ({"attention_bias": True}, "sets attention_bias to True"),
    ],
)
def test_every_configuration_is_supported_or_rejected(lm, tmp_path: Path, change, message):
    make_head(lm).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    harmless = {"torch_dtype": "bfloat16", "use_cache": True, "rope_scaling": None, "attention_bias": False}
    harmless |= {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    del config["rope_theta"]
    harmless |= {"head_dim": None}  # hidden_size / num_attention_heads
    (tmp_path / "config.json").write_text(json.dumps(config | harmless))
    assert EagleHead.from_pretrained(tmp_path, lm).config.rope_theta == 5e5
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=re.escape(message)):
        EagleHead.from_pretrained(tmp_path, lm)


def test_a_tree_has_no_more_children_than_the_head_has_tokens(lm, random_ids):
    drafter = EagleDrafter(make_head(lm, vocabulary=3), lm, tokens=2, top_k=4)
    lm.decoder.seek(random_ids(9))
    lm.decoder.forward()
    lm.decoder.seek(random_ids(10))
    assert len(drafter.propose(lm.decoder.ids, 2, Sampling(), None).tokens) == 3 + 3 * 3


def test_a_long_context_is_read_without_a_mask_of_its_square(lm, random_ids, monkeypatch):
    ids, head = random_ids(600), make_head(lm)
    drafter, rows = EagleDrafter(head, lm, tokens=3, top_k=1), []
    forward = head.forward

    def note(hidden, embeddings, positions, mask, past=None):
        rows.append(0 if mask is None else mask.shape[-2])
        return forward(hidden, embeddings, positions, mask, past)

    monkeypatch.setattr(head, "forward", note)
    lm.decoder.seek(ids[:-1])
    lm.decoder.forward()
    lm.decoder.seek(ids)
    found = drafter.propose(ids, 3, Sampling(), None).tokens
    assert max(rows) <= CHUNK_ROWS < len(ids)
    _, output = whole(lm, head, ids)
    assert found[0] == int(head.token_ids[head.logits(output[-1]).argmax()])


def test_only_the_layers_that_a_head_reads_are_kept(lm, random_ids):
    """No forward of the model is asked for the states behind every layer."""
    asked = []
    handle = lm.model.model.register_forward_pre_hook(
        lambda module, args, kwargs: asked.append(kwargs.get("output_hidden_states")), with_kwargs=True
    )
    capture = lm.decoder.capture_hidden((0, 2))
    lm.decoder.seek(random_ids(9))
    lm.decoder.forward()
    _, kept = capture.pop_hidden()
    handle.remove()
    assert kept.shape == (9, 2 * lm.model.config.hidden_size) and not any(asked)
    assert not any(layer._forward_pre_hooks for layer in lm.model.model.layers)  # nor is anything left behind
