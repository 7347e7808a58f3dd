"""PARSE inside vLLM: the target's server answers plain requests as ever, and requests that ask for validities.

`options.engine_options` says how to start such a server, `questions` what to ask it; neither imports vLLM. The other
modules run in the server, where `plugin` registers them.
"""
