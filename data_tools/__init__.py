"""Data for PARSE: problems and checkers, drafts, target rollouts, labels, and data sets built from them."""
