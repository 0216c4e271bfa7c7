#!/usr/bin/env bash
# Print the size and density of the code next to their targets: bash tests/measure.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec .venv/bin/python scripts/measure.py
