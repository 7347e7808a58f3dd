"""PARSE over servers: a thin process between a client and the vLLM servers of a target and a draft model."""
