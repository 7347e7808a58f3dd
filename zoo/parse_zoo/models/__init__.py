"""One folder per embedded model; `parse_infer.models.names` resolves "zoo:NAME" to the folder NAME."""
