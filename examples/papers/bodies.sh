#!/bin/sh
# Pretrained bodies for the reward models of gao.yaml and ensembles.yaml, below data/raw/ and under DVC. Each is an SFT
# model of the demo, of another size or with another seed; all have the demo's tokenizer. Three to five minutes
# each; when stopped, the same command continues. Do not edit params.yaml meanwhile.
#   sh examples/papers/bodies.sh
#   git add data/raw/*.dvc data/raw/.gitignore && git commit --message "Bodies of the reward models"
set -e
cd "$(dirname "$0")/../.."

changed="params.yaml dvc.lock metrics"
git diff --quiet HEAD -- $changed || { echo "commit or undo your changes of $changed first" >&2; exit 2; }
trap 'git checkout --quiet HEAD -- $changed' EXIT
trap 'exit 130' HUP INT TERM

body() {
    name=$1
    shift
    [ -e "data/raw/$name.dvc" ] && return
    echo "$name"
    dvc --wait-for-lock exp run "$@" sft
    rm -rf "data/raw/$name"
    cp -r models/sft "data/raw/$name"
    dvc --wait-for-lock add "data/raw/$name"
    git checkout --quiet HEAD -- $changed
}

size() {
    body "$1" -S "base.scratch.layers=$2" -S "base.scratch.hidden=$3" -S "base.scratch.intermediate=$4"
}

size weights-0.06m 2 32 96
size weights-0.2m 3 64 192
size weights-1m 4 128 384
size weights-4m 5 256 768
for seed in 101 102 103 104; do
    body "body-$seed" -S "seed=$seed"
done
