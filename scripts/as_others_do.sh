#!/usr/bin/env bash
# Compare with the ordinary tools, all seeds, in about five minutes: copies with rsync, logs with their bytes, logins with ssh.
#   bash scripts/as_others_do.sh [PYTEST ARGS]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OMP_NUM_THREADS=1
exec .venv/bin/python -m pytest -q tests/unit/deliver/test_as_rsync.py tests/unit/agent/test_logs_as_written.py tests/hosts/test_as_ssh.py "$@"
