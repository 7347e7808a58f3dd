"""Training: the validity head and its activated LoRA, and the small models that ship with the package."""
