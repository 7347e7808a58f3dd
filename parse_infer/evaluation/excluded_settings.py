"""`NOT_MEASURED`: generation settings that a benchmark refuses, with the reason. Imports nothing, for `--help`."""

_NOT_IN_TRANSFORMERS = "transformers' own decode loop, which some modes use, ignores it"
NOT_MEASURED = {
    "risk": "--risk sets threshold and block_tokens of the promise",
    "mode": "the mode target+draft is the token-exact comparison",
    "adaptive": "the mode parse:adaptive sets it",
    "draft_sampling": "--draft-temperature sets it",
    "resume_sampling": "--temperature, --top-p and --top-k set it for all modes",
    "stop": _NOT_IN_TRANSFORMERS,
    "stop_token_ids": _NOT_IN_TRANSFORMERS,
    "ignore_eos": _NOT_IN_TRANSFORMERS,
    "min_tokens": _NOT_IN_TRANSFORMERS,
}
NO_PAUSES = ("adaptive", False)
"""Except this one: answers with a promise have no pauses."""
