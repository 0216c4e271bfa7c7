# shellcheck shell=bash
# Sourced by launch.sh and tests/run.sh in the repository root: creates .venv and installs missing programs.
# Takes milliseconds if there is nothing to do.

apt_lock=/var/lib/apt/lists/lock # `apt-get update` does not wait for it
cpu_index=https://download.pytorch.org/whl/cpu
gpu_device=/dev/nvidiactl
imports="print('compiling'); import argcomplete, libtmux, llama405b.train, paramiko, rich.live, textual.app, textual.widgets" # what is started

need_linux() {  # the hosts of a hosts file may be elsewhere, but this script prepares this machine to train
    [ "$(uname)" = Linux ] && return 0
    echo "this machine runs $(uname), and training needs Linux; for hosts elsewhere: uv tool install . (see README.md)" >&2
    return 2
}

need_programs() {  # need_programs program:package …  install missing programs with apt, or print the command that does
    local missing=() entry sudo="" as=" as root"
    for entry in "$@"; do
        command -v "${entry%%:*}" >/dev/null || [ -x "/usr/sbin/${entry%%:*}" ] || missing+=("${entry##*:}")
    done
    python3 -I -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
    [ ${#missing[@]} -gt 0 ] || return 0
    if ! command -v apt-get >/dev/null; then
        echo "missing: ${missing[*]}; install them with this system's package manager" >&2
    elif [ "$(id -u)" = 0 ]; then
        echo "installing ${missing[*]} with apt-get"
        apt_install "${missing[@]}" && return 0
        echo "apt-get could not install ${missing[*]}; see its output above" >&2
    else
        command -v sudo >/dev/null && sudo="sudo " as=""
        echo "missing: ${missing[*]}; run$as: ${sudo}apt-get update && ${sudo}apt-get install -y ${missing[*]}" >&2
    fi
    return 2
}

apt_install() {  # apt_install PACKAGE …  install them, after whatever else uses apt, such as unattended upgrades
    local waited_s=0 inode
    while inode=$(stat -c %i "$apt_lock" 2>/dev/null) && grep -qs ":$inode " /proc/locks && [ $waited_s -lt 600 ]; do
        [ $waited_s -gt 0 ] || echo "waiting for another apt to finish"
        waited_s=$((waited_s + 1))
        sleep 1
    done
    in_one_line apt-get update -qq &&
        DEBIAN_FRONTEND=noninteractive in_one_line apt-get -o DPkg::Lock::Timeout=600 install -y -qq --no-install-recommends "$@"
}

in_one_line() {  # in_one_line COMMAND …  run it; a terminal shows its last line alone, and all of its output if it fails
    local output child code=0 began=$SECONDS columns
    [ -t 1 ] || { "$@"; return; }
    output=$(mktemp) || return 2
    columns=$(tput cols 2>/dev/null) || columns=80
    (trap - INT && exec "$@") <&0 >"$output" 2>&1 & # without a trap of its own it would never hear of Ctrl-C
    child=$!
    trap 'kill -INT $child; wait $child; rm -f "$output"; interrupted' INT
    while kill -0 $child 2>/dev/null; do
        printf '\r\033[K%4d s  %s' $((SECONDS - began)) "$(tail -c 4000 "$output" | tr -d '\0\t\033' | tr '\r' '\n' | tail -n 1 | cut -c "1-$((columns - 10))")"
        sleep 0.2
    done
    wait $child || code=$?
    trap - INT
    printf '\r\033[K'
    [ $code = 0 ] || cat "$output"
    rm -f "$output"
    return $code
}

need_venv() {  # need_venv EXTRAS  install the project and these extras into .venv, at the versions in constraints.txt
    local stamp index=() comes="PyTorch for CUDA and its packages, 2.7 GB to download" size=(2.7 4.9) fault
    python3 -I -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "python3 is $(python3 -V 2>&1), but Python >= 3.11 is needed; install it and put it first in PATH" >&2
        return 2
    }
    stamp="$1 $(cat pyproject.toml constraints.txt | sha256sum) $(pwd)"
    grep -qxF "$stamp" .venv/.set-up 2>/dev/null && return 0
    [ -x .venv/bin/python ] && [ -x .venv/bin/pip ] || python3 -m venv --clear .venv || return 2
    [ -e "$gpu_device" ] || size=(0.3 1.2) # at least
    if [ ! -e "$gpu_device" ] && answers "$cpu_index/torch/"; then
        index=(--extra-index-url "$cpu_index") comes="PyTorch for CPU (there is no GPU) and its packages, 0.3 GB to download"
    elif [ ! -e "$gpu_device" ]; then
        comes="PyTorch and its packages, 0.3 GB to download (2.7 GB, and 5 GB of disk, if pip finds only PyTorch for CUDA)"
        echo "$cpu_index does not answer; if you know another index with PyTorch for CPU, set PIP_EXTRA_INDEX_URL to it (and to those in your pip.conf, which it replaces)" >&2
    fi
    fault=$(.venv/bin/python -I tools/llama405b_tools/agent/venv_room.py "${size[@]}") || {
        echo "$fault; make room there" >&2
        return 2
    }
    echo "installing into .venv, once: $comes; unpacking takes minutes"
    trap interrupted INT
    in_one_line .venv/bin/python -I -m pip install --disable-pip-version-check --no-compile "${index[@]}" -c constraints.txt -e ".[$1]" || {
        echo "pip could not install the packages; see its output above" >&2
        return 2
    }
    in_one_line .venv/bin/python -I -c "$imports" || { # compiles it; pip would compile all
        echo "what pip installed cannot be imported; see the output above" >&2
        return 2
    }
    trap - INT
    echo "$stamp" >>.venv/.set-up
}

interrupted() { # what Ctrl-C comes to
    echo "interrupted; run the same command again to go on" >&2
    exit 130
}

answers() {  # answers URL  whether it can be read from here
    python3 -I -c 'import sys, urllib.request as u; u.urlopen(sys.argv[1], timeout=5)' "$1" 2>/dev/null
}

need_newest() {  # install the project and the newest of what it trains with into .venv-newest
    local pip=.venv-newest/bin/pip index=() packages
    [ -x "$pip" ] || python3 -m venv .venv-newest || return 2
    [ -e "$gpu_device" ] || ! answers "$cpu_index/torch/" || index=(--extra-index-url "$cpu_index")
    packages=$(python3 -c 'import tomllib
for package in tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["train"]: print(package.partition(",<")[0])')
    # shellcheck disable=SC2086
    "$pip" install -q -e ".[dev]" && "$pip" install -q --upgrade "${index[@]}" $packages && "$pip" list | grep -E '^(torch|transformers) '
}
