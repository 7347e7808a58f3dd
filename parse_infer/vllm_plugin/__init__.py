"""vLLM plugin of PARSE: the target's server answers plain requests unchanged, and validity requests.

`options.engine_options` gives the options of such a server, `validity_requests` the request bodies; neither imports
vLLM. The other modules run in the server, where `plugin` registers them.
"""
