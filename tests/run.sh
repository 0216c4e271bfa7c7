#!/usr/bin/env bash
# Set up everything, then run the tests.
#   bash tests/run.sh [PYTEST ARGS]    unit tests, and those with real ranks
#   bash tests/run.sh quick            only the unit tests that are not slow, in about a minute on two cores
#   bash tests/run.sh --all            also those on real hosts (root, sshd, namespaces, Slurm) and on the stand-in; what CI runs; writes durations.xml
#   bash tests/run.sh --standin        only those with torch's CUDA build on a stand-in for CUDA, which needs no GPU
#   bash tests/run.sh --newest         unit and step tests with the newest torch and transformers, in .venv-newest; never in CI
#   bash tests/run.sh --soak           the longest tests, such as random kills, and all 126 layers against the memory tracker; never in CI
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
# shellcheck source=../tools/setup.sh
source tools/setup.sh
export RUNLEVEL=1 # services that apt installs for the tests are not started
unset PYTHONDONTWRITEBYTECODE # thousands of processes import the same modules: each would compile them
cpu_s() { # cpu_s  seconds of CPU that this machine has used, user + sys
    awk -v hz="$(getconf CLK_TCK)" '$1 == "cpu" { print int(($2 + $3 + $4) / hz) }' /proc/stat
}
began=$SECONDS cpu_before=$(cpu_s)
need_linux || exit 2
needed=(tmux:tmux sshd:openssh-server ip:iproute2)
[ "${1:-}" != --all ] || needed+=(rsync:rsync git:git locale-gen:locales ulockmgr_server:fuse slurmctld:slurm-wlm munged:munge tcsh:tcsh g++:g++ readelf:binutils prometheus:prometheus)
[ "${1:-}" != --standin ] || needed=(g++:g++ readelf:binutils)
[ "${1:-}" != --soak ] || needed+=(rsync:rsync git:git ulockmgr_server:fuse tcsh:tcsh g++:g++ readelf:binutils slurmctld:slurm-wlm munged:munge)
need_programs "${needed[@]}" || exit 2
if [ "${1:-}" = --newest ]; then # beyond the bounds in pyproject.toml and the versions in constraints.txt
    shift
    need_newest || exit 2
    exec .venv-newest/bin/python -m pytest -q -m "not slow and not gpu and not soak" tests/unit tests/ranks/test_{step,overlap,states,masters}.py "$@"
fi
need_venv train,dev || exit 2
if [ "${1:-}" = quick ]; then
    shift
    export OMP_NUM_THREADS=1 # there is a process for each core
    exec .venv/bin/python -m pytest -q -n auto --dist worksteal -m "unit and not slow and not soak" tests/unit "$@"
fi
long="not soak"
on_standin() { # on_standin [PYTEST ARGS]
    local device=tests/standin/device
    bash $device/build.sh .venv/bin/python || return 1
    # A copy is late unless something waits for it, however long that takes.
    OMP_NUM_THREADS=1 STANDIN_CHECK=1 STANDIN_AGE_MS=5000 $device/run.sh \
        .venv/bin/python -m pytest -q -m "(standin or gpu) and $long" -n 2 --dist loadfile tests/standin tests/ranks/test_cuda.py "$@"
}
if [ "${1:-}" = --standin ]; then
    shift
    on_standin "$@"
    exit
fi
# For the tests of FP8, adapters, exports and trackers alone: transformers imports some of them wherever they are installed.
need_apart() {
    local packages apart
    for packages in torchao gguf "peft accelerate psutil"; do
        apart=.venv/${packages%% *}
        # shellcheck disable=SC2086 # several words
        [ -d "$apart" ] || .venv/bin/python -m pip install -q --no-deps --no-compile --target "$apart" -c constraints.txt $packages || return
    done
    [ -d .venv/trackers ] || .venv/bin/python -m pip install -q --no-compile --target .venv/trackers -c constraints.txt wandb tensorboard || return
    [ "$1" != --all ] || bash tests/standin/device/build.sh .venv/bin/python
}
need_apart "${1:-}" & # beside the checks
apart=$!
bash tests/check.sh || { wait; exit 1; }
.venv/bin/python -m compileall -q llama405b tools tests || exit 1 # hosts see these files through an overlay each
wait $apart || {
    [ "${1:-}" != --all ] || exit 2
    echo "tests that need them are skipped" >&2
}
# Two files at a time, as they stand: those on hosts, which often wait, come first, and the small ones last.
two=(-n 2 --dist loadfile --no-loadscope-reorder)
export OMP_NUM_THREADS=1 # threads of torch that wait for a core would keep the others busy
marks=(-m "(unit or ranks) and not gpu and not soak" "${two[@]}") more=true
if [ "${1:-}" = --all ]; then
    shift
    marks=(-m "not gpu and not soak and not standin" --durations=40 --junit-xml=durations.xml "${two[@]}")
    export LLAMA405B_NOTHING_SKIPPED=1 # a test that cannot run is a failure
    more=on_standin
elif [ "${1:-}" = --soak ]; then
    shift
    marks=(-m soak -s) long=soak more=on_standin
fi
code=0
.venv/bin/python -m pytest "${marks[@]}" "$@" || code=$?
$more || code=1
echo "took $((SECONDS - began)) s, and $(($(cpu_s) - cpu_before)) s of this machine's CPU (user + sys)"
exit $code
