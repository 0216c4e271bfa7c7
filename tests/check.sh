#!/usr/bin/env bash
# Format, lint, types, import rules, and that the site builds: no link leads nowhere.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PATH="$PWD/.venv/bin:$PATH"
ruff format --check --quiet . || { echo "run: .venv/bin/ruff format ." >&2; exit 1; }
ruff check --quiet .
mypy --no-error-summary
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
PYTHONPATH=.:tools lint-imports --no-cache >"$scratch/imports" || { cat "$scratch/imports"; exit 1; }
# Not --quiet: that would hide warnings from --strict, too.
NO_MKDOCS_2_WARNING=1 mkdocs build --strict --site-dir "$scratch/site" >"$scratch/site.log" 2>&1 || { cat "$scratch/site.log"; exit 1; }
echo "format, lint, types, import rules and site: good"
