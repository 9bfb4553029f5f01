#!/usr/bin/env bash
# Measurements on a CUDA machine, in stages that stop in time and continue where they stopped.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

usage() {
    cat <<'TEXT'
Usage: benchmarks/gpu.sh STAGE[=SECONDS]... --out DIR [--seconds N] [--git SHA]
                         [--fresh] [--smoke]
       benchmarks/gpu.sh all --out DIR [the same options]

Stages, run in the order given:
  correct    every kernel and fused model in bf16 and fp16 against fp64 and
             fp32, then `pytest -m gpu`
  kernels    ceilings, launch gap, each kernel against plain torch and
             torch.compile; choices.json
  e2e        whole models: timm, timm in a graph, fused, fused in a graph,
             folded in a graph, torch.compile
  breakdown  time of each kernel of the fused models, inside their graphs
  bank       many tasks through one bank, against a model for each
  train      a training step of ViT-B/16 at 384 px: full, attention only, and
             each `--memory` mode
  all        all of these in one call of at most 540 s: what decides choices,
             every GPU test and batch 1 come first, within 420 s; the choices
             measured are used by what follows, and summary.txt sets each figure
             beside its prediction, floor and bound

  --out DIR    results: gpu_*.csv, choices.json, gpu.log; rows that are there
               are not measured again
  --seconds N  for each stage that names no time of its own (default 220), or
               for `all` (default 540); then it stops and says what is missing
  --git SHA    the commit, where this is a copy without its history
  --fresh      put the stages' old results aside first (as *.old)
  --smoke      tiny shapes and models, also on a CPU; writes smoke_*.csv, which
               no document reads

A row whose process dies or hangs is left out, and its stage started again. One
call at a time writes to DIR.

Needs torch, Triton and timm, and this project
(`pip install --no-deps --no-build-isolation -e .`). PYTHON names the
interpreter (default python3). Exit code: 0 complete, 1 something is wrong,
2 usage, 3 out of time (call it again), 130 or 143 interrupted (call it again).
TEXT
}

stages=() out= seconds= fresh= smoke=
while (($#)); do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --out | --seconds | --git)
            if (($# < 2)); then echo "gpu.sh: \`$1\` needs a value" >&2; exit 2; fi
            case $1 in
                --out) out=$2 ;;
                --seconds) seconds=$2 ;;
                --git) export VTK_GIT=$2 ;;
            esac
            shift ;;
        --fresh) fresh=yes ;;
        --smoke) smoke=--smoke ;;
        all | correct | kernels | e2e | breakdown | train | bank | correct=* | kernels=* | e2e=* | breakdown=* | train=* | bank=*) stages+=("$1") ;;
        *) echo "gpu.sh: \`$1\` is no stage and no option; stages are correct, kernels, e2e, breakdown, train, bank, or all" >&2; exit 2 ;;
    esac
    shift
done
if ((${#stages[@]} == 0)); then echo "gpu.sh: no stage is given; see --help, or give all" >&2; exit 2; fi
if [[ -z $out ]]; then echo "gpu.sh: \`--out DIR\` is missing: where the results go" >&2; exit 2; fi
for stage in "${stages[@]}"; do
    if [[ $stage == all ]] && ((${#stages[@]} > 1)); then
        echo "gpu.sh: \`all\` is every stage; give it alone" >&2; exit 2
    fi
done
if [[ -z $seconds ]]; then
    if [[ ${stages[0]} == all ]]; then seconds=540; else seconds=220; fi
fi
for stage in "${stages[@]/#*=/}" "$seconds"; do
    if [[ $stage =~ ^(all|correct|kernels|e2e|breakdown|train|bank)$ ]]; then continue; fi
    if ! [[ $stage =~ ^[1-9][0-9]{0,5}$ ]]; then echo "gpu.sh: \`$stage\` is no number of seconds (1 to 999999)" >&2; exit 2; fi
done

python=${PYTHON:-python3}
if ! command -v "$python" >/dev/null; then echo "gpu.sh: PYTHON ($python) is no program" >&2; exit 2; fi
mkdir -p "$out" || exit 1
# held by whatever writes there, also where this script was killed
exec 9<"$out" || exit 1
if command -v flock >/dev/null && ! flock -n 9; then
    echo "gpu.sh: another call writes to $out; wait until it ends, or give another folder" >&2; exit 1
fi
exec > >(tee -a "$out/gpu.log") 2>&1
tee=$! child=
finish() { exec >&- 2>&-; wait "$tee"; exit "$1"; }
# what runs would go on without this script, and hold the folder
interrupt() { trap "" INT TERM HUP; if [[ $child ]]; then kill "$child" 2>/dev/null; wait "$child"; fi; finish "$1"; }
trap "interrupt 130" INT
trap "interrupt 143" TERM HUP
run() { "$@" & child=$!; wait "$child"; code=$?; child=; }
export PYTHONUNBUFFERED=1
VTK_RUN=$(date +%s)-$$
export VTK_RUN
put_aside() { for name in "$@"; do if [[ -e $out/$name ]]; then mv "$out/$name" "$out/$name.old"; fi; done; }

if [[ ${stages[0]} == all ]]; then
    if [[ $fresh ]]; then put_aside gpu_{correct,kernels,e2e,breakdown,train,bank,ceilings}.csv choices.json died.csv progress.json; fi
    echo "== all, at most $seconds s"
    run "$python" "$here/one_run.py" --out "$out" --seconds "$seconds" $smoke
    if ((code > 3)); then echo "== all ended with $code"; code=1; fi  # it was killed
    finish "$code"
fi

result=0
for entry in "${stages[@]}"; do
    stage=${entry%%=*}
    budget=$seconds
    if [[ $entry == *=* ]]; then budget=${entry#*=}; fi
    if [[ $fresh ]]; then put_aside "gpu_$stage.csv"; fi
    echo "== $stage, at most $budget s"
    end=$((SECONDS + budget))
    for _ in 1 2 3 4; do
        left=$((end - SECONDS))
        # the stage stops by itself; the timeout is for a kernel that hangs
        run timeout --kill-after=10 $((left + 40)) \
            "$python" "$here/$stage.py" --out "$out" --seconds "$left" $smoke
        # its process died of a row, which it has noted: the others are measured without that row
        if [[ $code =~ ^(0|1|3)$ || ! -e $out/.$stage.row ]] || ((SECONDS + 15 > end)); then break; fi
        echo "== $stage: its process ended with $code; again without that row"
    done
    case $code in
        0) ;;
        3) if ((result == 0)); then result=3; fi ;;
        *) echo "== $stage ended with $code"; result=1 ;;
    esac
done
finish "$result"
