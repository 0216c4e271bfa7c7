#!/usr/bin/env bash
# The first night on two GPU hosts: in an hour at most, what docs/proof.md says "never run" of and two hosts can show.
#   bash scripts/first_night.sh HOSTS [--model DIR] [--data FILE] [--out DIR] [--tiny] [-- WORDS…]
# HOSTS        a hosts file with two hosts that `llama405b setup HOSTS` has set up, a line each; 300 GB free in their workdir= (8B)
# --model DIR  an 8B Llama, on both hosts [its shape, with random weights and the demo's tokenizer]
# --data FILE  text to train on, here [modules of Python's standard library]
# --out DIR    where everything is kept [first-night]; the same command, or one with other WORDS, goes on there: what has passed is not repeated
# --tiny       the demo's model on CPUs: a dry run, which proves this script and not the GPU path
# WORDS        of every launch, such as --env NCCL_DEBUG=INFO or --checkpoint.dir /nvme/night
# Exit code: 0 all has passed, 1 a step failed, 2 bad input and nothing was changed.
# DIR.tar.gz is the file to send: it has the names of the hosts, but no weights and no secrets.
set -uo pipefail
umask 077
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$root/.venv/bin/python
hosts='' model='' data='' out=first-night tiny='' child='' made='' ran='' live=() steps=()
refuse() { echo "first_night.sh: $1" >&2 && exit 2; }

while [ $# -gt 0 ]; do
    case $1 in
        --model | --data | --out) [ -n "${2:-}" ] || refuse "$1 needs a value"; declare "${1#--}=$2"; shift 2 ;;
        --tiny) tiny=yes; shift ;;
        --) shift; break ;;
        -*) refuse "$1 is no option; the head of the script has them" ;;
        *) [ -z "$hosts" ] || refuse "$1 is one hosts file too many"; hosts=$1; shift ;;
    esac
done
more=("$@")
[ -n "$hosts" ] || refuse "name a hosts file"
[ -x "$python" ] || refuse "$root has no .venv; 'bash launch.sh --help' there makes it"
[ -z "$data" ] || [ -f "$data" ] || refuse "--data: $data is no file here"
[ ! -e "$out" ] || [ "$(cat "$out/night" 2>/dev/null)" = "$hosts $model $tiny" ] || refuse "$out is of other hosts or another model; name another --out"
stamp=$(cat "$out/stamp" 2>/dev/null || date +%m%d-%H%M%S)
night=night-$stamp hang=hang-$stamp files=/var/tmp/night-$stamp
same=(--data.paths "$files/text" --model.path "${model:-$files/model}" --optimizer.decay constant --checkpoint.storage local --checkpoint.every 20)
if [ -n "$tiny" ]; then
    what="dry run on CPUs: proves the script, not the GPU path" hang_after=20s
    same+=(--preset demo --data.seq_len 64 --training.global_batch_size 4 --training.micro_batch_size 2 --evaluation.every 0)
else
    what="8B on GPUs" hang_after=2m
    same+=(--preset llama3.1-8b --training.global_batch_size 16)
    [ -n "$model" ] || same+=(--model.weights random)
fi
said=$("$python" -P -m llama405b_tools.cli launch "$hosts" --dry-run "${same[@]}" "${more[@]}" 2>&1 >/dev/null) || refuse "${said#llama405b: }"
mapfile -t lines < <(grep -Ev '^[[:space:]]*(#|$)' "$hosts")
[[ ${#lines[@]} = 2 && ${lines[*]} != *\[* ]] || refuse "$hosts: name two hosts, a line each"
{ mkdir -p "$out" && echo "$stamp" >"$out/stamp"; } 2>/dev/null || refuse "$out cannot be written"
echo "$hosts $model $tiny" >"$out/night"
echo "${lines[1]}" >"$out/other"
printf '%s\n' "${lines[1]}" "${lines[0]}" >"$out/swapped"
[ ! -e "$out/offload" ] || same+=(--parallel.offload optimizer)
began=$SECONDS until=$SECONDS
exec 3>&1

ll() { # llama405b WORDS…  within the time of the step
    echo "\$ llama405b$(printf ' %q' "$@")" >&2
    timeout -k 30 $((until > SECONDS ? until - SECONDS : 1)) "$python" -P -m llama405b_tools.cli "$@" </dev/null 3>&- &
    child=$! && wait "$child"
    local code=$? && child=''
    [ $code = 0 ] || echo "exit code $code$([ $code != 124 ] || echo ': its time was over')" >&2
    return $code
}

run() { # run HOSTS NAME WORDS…  launch it, and follow it to its end
    live=("$1" "$2")
    ll launch "$1" --run "$2" --resume auto --follow --plain "${same[@]}" "${@:3}" "${more[@]}" && live=()
}

end_run() { # what a step left running
    [ ${#live[@]} -gt 0 ] || return 0
    until=$((SECONDS + 90))
    ll stop "${live[0]}" --run "${live[1]}" --grace 0 >>"$out/stopped" 2>&1 || echo "${live[1]}: perhaps not all of it ended; see $out/stopped"
    live=()
}

leave() { # however this script ends
    trap '' INT TERM HUP
    exec >&3 2>&1
    [ -z "$child" ] || { echo "interrupted; the same command goes on" && kill "$child" && wait "$child"; } 2>/dev/null
    end_run
    rm -rf "$made"
    tar -czf "$out.tar.gz" -C "$(dirname "$out")" "$(basename "$out")" && echo "the file to send: $out.tar.gz"
}

passed() { [ "$(cat "$out/$1/code" 2>/dev/null)" = 0 ]; }
shows() { grep -Eqh -- "$1" "${@:2}" || { echo "nothing matches '$1' in ${*:2}" && return 1; }; }
fits() { ll plan "$1" "${same[@]}" "${@:2}" || [ $? = 1 ]; } # 1: slower than it could be
with_fault() { fault=(--extend "$files/first_night_faults.py" --env "FIRST_NIGHT=$1 $2 $(date +%s)"); }

step() { # step NAME LIMIT NEEDS EXPECTED ROWS  run the function do_NAME, unless it has passed; ROWS: of docs/proof.md, how they begin
    local name=$1 limit=$2 need from=$SECONDS left=$((began + 3400 - SECONDS)) code
    at=$out/$name steps+=("$name")
    passed "$name" && echo "$name: has passed before" && return
    for need in $3; do
        passed "$need" || { echo "$name: not run, as $need has not passed" && return; }
    done
    [ $left -gt 20 ] || { echo "$name: not run, as the hour is over; the same command goes on" && return; }
    [ -e "$at/code" ] || [ ! -d "$at" ] || for run in "$night" "$hang"; do # this step was cut off, and may have left one
        [ ! -e "runs/$run" ] || { live=("$hosts" "$run") && end_run; }
    done
    rm -rf "$at" && mkdir -p "$at" && ran=yes && echo "expected: $4${5:+; decides: $5}" >"$at/about"
    [ "$limit" -lt $left ] || limit=$left
    echo "$name: begins, $limit s at most; $(cat "$at/about")"
    until=$((SECONDS + limit)) code=0
    "do_$name" >"$at/output" 2>&1 || code=$?
    echo $((SECONDS - from)) >"$at/seconds" && echo $code >"$at/code"
    [ $code = 0 ] && echo "$name: passed, $((SECONDS - from)) s" && return
    echo "$name: FAILED, $((SECONDS - from)) s: $(grep . "$at/output" | tail -n 2 | paste -sd" "); all of it: $at/output"
    end_run
}

do_doctor() { ll doctor "$hosts" --deep || [ $? = 1 ]; } # 1: warnings
do_links() { ll bench "$hosts" --tests start,collectives,copies --time-limit 3m --out "$at/bench" --bundle "$at/bench.json" --with-host-names; }

do_files() { # the same on both hosts: text, model, and what befalls a rank
    made=$(mktemp -d) && mkdir "$made/text" && cp "$root/scripts/first_night_faults.py" "$made" || return
    local texts=("$data")
    [ -n "$data" ] || texts=("$("$python" -P -c 'import json; print(json.__path__[0])')"/../*.py)
    cp "${texts[@]}" "$made/text" || return
    [ -n "$model" ] || ll demo "$made/model" || return
    [ -n "$model$tiny" ] || { "$python" -P -c "$shape" "$made/model" && rm "$made/model/"*.safetensors*; } || return
    ll push "$made" "$hosts" --to "$files"
}
shape='import json, pathlib, sys
from llama405b.settings.config import PRESET_DIR
known = json.loads((PRESET_DIR / "architectures.json").read_text())["llama3.1-8b"]
pathlib.Path(sys.argv[1], "config.json").write_text(json.dumps(known | {"bos_token_id": 0, "eos_token_id": 1}))' # of its tokenizer

do_plan() { fits "$hosts" || { fits "$hosts" --parallel.offload optimizer && touch "$out/offload" && same+=(--parallel.offload optimizer); }; }
do_rehearse() { ll launch "$hosts" --rehearse --run "$night" "${same[@]}" "${more[@]}"; }
do_train() { run "$hosts" "$night" --training.max_steps 50 && shows '^step 50/50 ' "$at/output"; }

newest() { ll status "$hosts" --run "$night" 2>/dev/null | sed -n 's/^newest checkpoint: .*step-0*//p'; } # on whichever host

do_kill() {
    local from
    from=$(newest)
    with_fault SIGKILL $((from + 5))
    run "$hosts" "$night" --training.max_steps $((from + 10)) --restart 3 "${fault[@]}" && shows "^step $((from + 10))/" "$at/output" &&
        shows "was killed by SIGKILL.*\(restart 1, from .*step-0*$from\)" "$at/output" && [ "$(newest)" = $((from + 10)) ]
}
do_save() { ll status "$hosts" --run "$night" && shows "copied to the next host: step $(newest)$" "$at/output"; }

do_resume() { # on the other host alone, if it fits there
    local on=$out/other with=() from
    if [ -z "$tiny" ] && ! fits "$on"; then
        with=(--parallel.offload optimizer)
        fits "$on" "${with[@]}" || { on=$out/swapped && with=(); }
    fi
    from=$(newest)
    run "$on" "$night" --training.max_steps $((from + 10)) "${with[@]}" && echo "$on" >"$at/hosts" &&
        shows "resumed from .*step-0*$from$" "$at/output" && shows "^step $((from + 10))/" "$at/output"
}
do_export() { ll export "$night" "$night-exported" "$(cat "$out/resume/hosts")" --verify && shows 'read back .* as written' "$at/output"; }

do_hang() {
    with_fault SIGSTOP 5
    run "$hosts" "$hang" --training.max_steps 10 --checkpoint.every 0 --restart 1 --hang-after "$hang_after" "${fault[@]}" &&
        shows 'HANGS .*stopped by a signal' "runs/$hang/autopsy/"*/report.txt &&
        { [ -n "$tiny" ] || shows "NCCL's flight recorder wrote" "runs/$hang/autopsy/"*/report.txt; }
}

collect() {
    until=$((SECONDS + 120))
    rm -rf "$out/collected" && mkdir "$out/collected"
    ll --version
    ll doctor "$hosts" --json >"$out/collected/doctor.json"
    ll report "$night" "$hosts" --out "$out/collected/report.html"
    ll report "$night" "$out/other" --out "$out/collected/report-resumed.html"
    tar -c --exclude checkpoints --exclude '.*' --exclude '*.pipe' runs/*"$stamp"* | tar -x -C "$out/collected" # these hosts may be this machine
    timeout 60 "$python" -P "$root/scripts/first_night_collect.py" "$hosts" "$stamp" "$out/collected"
    ll stop "$hosts" --orphans
}

trap leave EXIT
trap 'exit 1' INT TERM HUP
echo "the first night on ${lines[0]%% *} and ${lines[1]%% *}, $what; everything is kept in $out"
step doctor 240 '' "both are fit" "doctor on four hosts + doctor's reading of nvidia-smi"
step links 300 '' "every collective right, on each host and on both" "flash-attn; NCCL"
step files 120 '' "text and a model on both hosts" ""
[ -n "$tiny" ] || step plan 60 files "4 to 7 s a step on two H100s" "\`plan\`: times and memory"
step rehearse 400 files "the same loss after kill -9" "Restart after a crash"
step train 900 files "50 steps, saves at 20, 40 and 50, a loss that falls" "Demo on two local nodes + MFU: the model + Saving beside training"
step kill 420 train "a rank killed 5 steps on (at 55); the guard goes on from the newest save (50)" "Restart after a crash"
step save 60 train "the newest checkpoint, and its copy on the other host" "Saving beside training"
step resume 420 train "10 steps from the newest save, on the other host" "Checkpoint and resume (FSDP2) + Checkpoints on the hosts"
step export 240 resume "a model in bf16, each file read back" "Checkpoints on the hosts"
step hang 420 files "the autopsy names the stopped rank, and has NCCL's flight record" "\`autopsy\`: + Each rank on the cores"
[ -z "$ran" ] || collect >"$out/collect" 2>&1
{
    echo "$what"
    for name in "${steps[@]}"; do
        passed "$name" && result=passed || result=FAILED
        [ -e "$out/$name/code" ] || result='not run'
        printf '%-9s %-8s %4s s  %s\n' "$name" "$result" "$(cat "$out/$name/seconds" 2>/dev/null || echo -)" "$(cat "$out/$name/about" 2>/dev/null)"
    done
    grep -h 'leftovers\|left of' "$out/collect"
    echo "still on the hosts, for you to delete: runs/*$stamp* and $night-exported in their working directories, and $files"
} | tee "$out/summary.txt"
! grep -qE '^[a-z]+ +(FAILED|not run)' "$out/summary.txt"
