"""Training of the validity head with its activated LoRA, and of heads for token-level speculation."""
