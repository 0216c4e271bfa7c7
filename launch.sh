#!/usr/bin/env bash
# Set up everything, then train on the hosts in a hosts file.
#   bash launch.sh                                  the demo: ./hosts, followed to its end
#   bash launch.sh my-hosts --config my.toml …      `llama405b launch` with these arguments
set -uo pipefail
called_from=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")" || exit 2
# shellcheck source=tools/setup.sh
source tools/setup.sh
need_linux || exit 2
need_programs tmux:tmux ip:iproute2 || exit 2
need_venv train || exit 2
llama405b=$PWD/.venv/bin/llama405b
if [ $# -eq 0 ]; then
    exec "$llama405b" launch hosts --preset demo --follow
fi
cd "$called_from" || exit 2
exec "$llama405b" launch "$@"
