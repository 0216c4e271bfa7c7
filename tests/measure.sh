#!/usr/bin/env bash
# Print how large and how dense the code is, beside what it should be: bash tests/measure.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec .venv/bin/python tests/measure.py
