#!/usr/bin/env bash
# Format, lint, types, import rules.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PATH="$PWD/.venv/bin:$PATH"
ruff format --check --quiet . || { echo "run: .venv/bin/ruff format ." >&2; exit 1; }
ruff check --quiet .
mypy --no-error-summary
PYTHONPATH=.:tools lint-imports --no-cache >/tmp/llama405b-imports.$$ || { cat /tmp/llama405b-imports.$$; rm -f /tmp/llama405b-imports.$$; exit 1; }
rm -f /tmp/llama405b-imports.$$
echo "format, lint, types and import rules: good"
