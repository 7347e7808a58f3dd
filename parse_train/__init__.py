"""Training of judges, with and without the LoRA of a second stream, and of heads for token-level speculation."""
