"""One folder for each embedded model; `parse_infer.models.names` resolves "zoo:NAME" to it."""
