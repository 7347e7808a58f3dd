"""The embedded models: token drafters save the target's forwards and change neither answer nor span."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from data_tools.tasks.registry import load_task
from parse_infer.calibration.calibration_file import find_calibrations
from parse_infer.cli.model_options import ModelOptions
from parse_infer.engine import ParseEngine
from parse_infer.evaluation.modes import make_modes, timed
from parse_infer.judge.adapter import ValidityConfig
from parse_infer.judge.adapter_files import judge_fingerprint, model_card, read_adapter
from parse_infer.judge.rules.min_p import MinP
from parse_infer.models.names import PUBLIC_MODEL, collection_folder, resolve
from parse_infer.settings.generation import GenerationSettings
from tests.parse_infer.token_drafters.trained_heads import save_head

HEADS = ("eagle3", "parallel", "medusa")
DRAFTERS = ("lookup", "draft", *HEADS)
CHAINS = ("eagle3:top_k=1", "parallel:tokens=4:top_k=1", "medusa:top_k=1")


@pytest.fixture(scope="module")
def engine() -> ParseEngine:
    return ParseEngine.from_pretrained("zoo:target", "zoo:draft", "zoo:adapter", device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    return [problem.prompt for problem in load_task("gsm_symbolic").problems("test", seed=7, limit=6)]


@pytest.fixture(scope="module")
def alone(engine, prompts):
    return engine.generate_target(prompts, max_new_tokens=200)


@pytest.fixture(scope="module")
def heads(engine, prompts, alone, tmp_path_factory) -> Path:
    """A folder with a head of each kind, which learnt the target's answers to these prompts."""
    folder = tmp_path_factory.mktemp("heads")
    answers = [(engine.target.render(prompt), answer.token_ids) for prompt, answer in zip(prompts, alone, strict=True)]
    for kind in HEADS:
        save_head(engine.target, kind, answers, folder / kind)
    return folder


def drafter(name: str, heads: Path) -> str:
    return f"{heads}/{name}" if name.startswith(HEADS) else name


@pytest.mark.parametrize("name", [*DRAFTERS, *CHAINS])
@pytest.mark.slow
def test_the_targets_answers_come_with_fewer_forwards(engine, prompts, alone, heads, name):
    (mode,) = make_modes(engine, [f"target+{drafter(name, heads)}"], GenerationSettings(200))
    guided = [timed(engine, mode, prompt)[0] for prompt in prompts]
    assert [g.token_ids for g in guided] == [a.token_ids for a in alone]
    tokens, forwards = sum(len(a.token_ids) for a in alone), sum(g.stats.target_forwards for g in guided)
    least = 1.0 if name == "lookup" else 2.5 if name == "draft" else 1.6
    assert tokens / forwards >= least, f"{tokens} tokens in {forwards} forwards"
    if name == "parallel":  # a block in one forward
        assert sum(g.stats.drafter_forwards for g in guided) <= forwards


@pytest.mark.slow
def test_parse_writes_the_same_spans_with_and_without_drafters(engine, prompts, heads):
    names = ["parse+none", *(f"parse+{drafter(name, heads)}" for name in DRAFTERS)]
    modes = make_modes(engine, names, GenerationSettings(200, block_tokens=32))
    for prompt in prompts:
        plain, *others = (timed(engine, mode, prompt)[0] for mode in modes)
        for mode, other in zip(modes[1:], others, strict=True):
            spans = [[(s.text, s.source, s.n_tokens) for s in g.spans] for g in (plain, other)]
            assert spans[0] == spans[1], (mode.name, prompt)


@pytest.mark.parametrize("name", ["zoo:adapter", "zoo:smollm2-adapter"])
def test_an_adapter_has_the_name_by_which_its_calibration_knows_it(name):
    """Also as loaded: a new field of the configuration must not change it."""
    files = read_adapter(resolve(name))
    calibration, *_ = find_calibrations(None, files.folder, "local")
    loaded = ValidityConfig.from_dict(files.validity_config).to_dict()
    head = {key: value.float() if value.is_floating_point() else value for key, value in files.head.items()}
    found = {files.fingerprint, judge_fingerprint((files.peft_config, loaded), (files.tensors, head))}
    assert found == {calibration.models["adapter"]}


@pytest.mark.parametrize("name", ["zoo:adapter", "zoo:smollm2-adapter"])
def test_an_adapters_default_threshold_keeps_a_promise(name):
    files = read_adapter(resolve(name))
    default = files.validity_config["threshold"]
    greedy, *sampled = find_calibrations(None, files.folder, "local")
    assert greedy.sampling.greedy and default == greedy.setting(0.05).setting.threshold
    for each in sampled:
        assert each.setting(0.05).setting.threshold <= default, f"the default loses more than 5 % at {each.sampling}"


@pytest.mark.slow
def test_a_judge_without_training_takes_the_place_of_the_embedded_adapter():
    models = ModelOptions(judge="min_p:ratio=0.3")
    engine = models.load()
    assert engine.describe()["adapter"] == "min-p" and engine.threshold == 0.3
    assert not models.train_problems and ModelOptions().train_problems
    assert models.describe_servers()["judge"] == "min_p:ratio=0.3" and models.describe_servers()["adapter"] is None
    (mode,) = make_modes(engine, ["parse-min-p"], GenerationSettings(8, threshold=0.9))
    assert mode.engine.threshold == MinP().ratio, "the threshold is the adapter's"
    with pytest.raises(ValueError, match="were both given: choose one"):
        ModelOptions(judge="zero_shot", adapter="zoo:adapter").load()


@pytest.mark.slow
def test_the_embedded_adapter_may_have_a_floor():
    """Its calibration was made without one."""
    plain = ModelOptions().load()
    models = ModelOptions(judge="min_p:ratio=0.01", adapter="zoo:adapter")
    floored = models.load()
    assert floored.describe()["adapter"] == f"{plain.describe()['adapter']}, min-p at 0.01"
    assert floored.threshold == plain.threshold and floored.train_problems == plain.train_problems
    assert plain.calibrations and not floored.calibrations
    with pytest.raises(ValueError, match="this engine has no calibration"):
        models.with_promise(GenerationSettings(), 0.05)


def test_the_zoo_stays_small_and_safe():
    folder = collection_folder()
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")]
    assert sum(path.stat().st_size for path in files) <= 56 * 2**20
    assert {path.suffix for path in files} <= {".safetensors", ".json", ".jinja", ".md", ".png", ".txt"}
    parts = [path for path in folder.iterdir() if path.is_dir() and path.name != "__pycache__"]
    assert len(parts) == 8
    for part in parts:
        assert (part / "README.md").is_file(), part


CARDS = sorted(path for path in collection_folder().glob("*/README.md") if not (path.parent / PUBLIC_MODEL).exists())


@pytest.mark.parametrize("path", CARDS, ids=lambda path: path.parent.name)
def test_a_card_is_ready_for_the_hub(path: Path):
    """Its front matter has what the Hub shows and filters by; its figures exist."""
    card = ModelCard.load(path)
    data = card.data
    assert data.license == "apache-2.0" and data.pipeline_tag == "text-generation" and data.language == "en"
    peft = (path.parent / "adapter_config.json").is_file()
    head = (path.parent / "validity_config.json").is_file()
    assert data.library_name == ("peft" if peft else "parse-engine" if head else "transformers")
    assert "parse-engine" in data.tags and (data.base_model is not None) == peft
    assert all((path.parent / figure).is_file() for figure in re.findall(r"!\[\w+\]\(([^)]+)\)", card.content))
    assert re.search(r"commit (of the weights: )?[0-9a-f]{7}\b", card.content, re.IGNORECASE)


@pytest.mark.parametrize("path", [p for p in CARDS if "adapter" in p.parent.name], ids=lambda p: p.parent.name)
def test_the_card_of_an_adapter_says_what_an_export_would_write(path: Path):
    """Besides its licence and how it was made."""
    config = json.loads((path.parent / "validity_config.json").read_text(encoding="utf-8"))
    card, own = (ModelCard(text) for text in (path.read_text("utf-8"), model_card(config)))
    assert own.data.to_dict().items() <= card.data.to_dict().items()
    assert set(own.text.splitlines()) <= set(card.text.splitlines())


def test_only_drafts_of_problems_of_their_own_count_as_independent():
    """The held-out drafts of zoo:adapter are three per problem, those of zoo:smollm2-adapter one."""
    scopes = {path.parent.name: "counted as independent" in path.read_text("utf-8") for path in CARDS}
    assert [name for name, several in scopes.items() if several] == ["adapter"]
