# shellcheck shell=bash
# Sourced by launch.sh and tests/run.sh in the repository root: creates .venv and installs missing programs.
# Takes milliseconds if there is nothing to do.

need_programs() {  # need_programs program:package …  install missing programs with apt, or print the command that does
    local missing=() entry
    for entry in "$@"; do
        command -v "${entry%%:*}" >/dev/null || [ -x "/usr/sbin/${entry%%:*}" ] || missing+=("${entry##*:}")
    done
    python3 -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
    [ ${#missing[@]} -gt 0 ] || return 0
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "installing ${missing[*]} with apt-get"
        { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}"; } >/dev/null 2>&1 && return 0
        echo "apt-get could not install ${missing[*]}; run 'apt-get install ${missing[*]}' to see why" >&2
    else
        echo "missing: ${missing[*]}; run: sudo apt-get install -y ${missing[*]}" >&2
    fi
    return 2
}

need_venv() {  # need_venv EXTRAS  install the project and these extras into .venv, at the versions in constraints.txt
    local stamp
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "python3 is $(python3 -V 2>&1), but Python >= 3.11 is needed; install it and put it first in PATH" >&2
        return 2
    }
    stamp="$1 $(cat pyproject.toml constraints.txt | sha256sum) $(pwd)"
    grep -qxF "$stamp" .venv/.set-up 2>/dev/null && return 0
    [ -x .venv/bin/python ] && [ -x .venv/bin/pip ] || python3 -m venv --clear .venv || return 2
    echo "installing the project and its packages into .venv (once)"
    .venv/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[$1]" || {
        echo "pip could not install the packages; see its output above" >&2
        return 2
    }
    echo "$stamp" >>.venv/.set-up
}
