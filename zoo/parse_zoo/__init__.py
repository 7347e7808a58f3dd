"""The embedded models of PARSE, with the tasks and the recipe kinds that made them.

`parse_infer`, `data_tools` and `parse_train` find them by entry points (pyproject.toml beside this package).
"""
