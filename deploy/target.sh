#!/bin/sh
# Starts the target's server: vLLM with the plugin, and with the options of vLLM that are given here. Its command holds
# what the local engine says about a reference draft, so it is made where the models are.
set -eu
command=$(python -m parse_infer.vllm_plugin.options "$TARGET" "$ADAPTER")
eval "exec $command \"\$@\""
