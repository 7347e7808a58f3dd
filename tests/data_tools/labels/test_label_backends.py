"""Local models of a build."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from data_tools.labels.backends import LocalWriter
from parse_infer.models.attention import SPLIT_ATTENTION
from parse_infer.models.loading import LanguageModel


@pytest.mark.parametrize("capped", [None, 30.0])
def test_a_draft_model_gets_the_attention_that_copies_no_keys_if_it_can(make_model: Any, capped: float | None) -> None:
    model = make_model("llama_gqa")
    model.config.attn_logit_softcapping = capped
    LocalWriter(cast(LanguageModel, SimpleNamespace(model=model)), 4)
    assert (model.config._attn_implementation == SPLIT_ATTENTION) == (capped is None)
