#!/usr/bin/env bash
# Write constraints.txt: the newest version of every package that pyproject.toml's bounds allow, for each Python that it allows.
#     PATH=$PATH:.venv/bin bash scripts/constraints.sh      needs uv (pip install uv)
# What torch's builds for CUDA bring (nvidia-*, triton) is left out, as it differs from build to build. flash-attn, which is compiled, too.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
extras=(--extra train --extra fp8 --extra wandb --extra tensorboard --extra web --extra dev)
apart="accelerate gguf peft psutil" # of tests/run.sh
versions=$(tr ' ' '\n' <<<"$apart" | uv pip compile --quiet --universal --python-version 3.11 --no-header --no-annotate "${extras[@]}" pyproject.toml -)
{
    echo "# The newest versions within the bounds of pyproject.toml, by scripts/constraints.sh. Install with: pip install -c constraints.txt"
    grep -vE '^(nvidia-|cuda-|triton==|#)' <<<"$versions"
} >constraints.new
mv constraints.new constraints.txt
