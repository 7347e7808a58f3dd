"""The embedded models of PARSE, with their tasks and training recipes.

`parse_infer`, `data_tools` and `parse_train` find these through entry points (zoo/pyproject.toml).
"""
