#!/usr/bin/env bash
# Slurm: one run on one node. It saves its state before the time limit and is queued again, as often as it needs.
#   sbatch examples/slurm.sh            # in the project's folder, with .venv set up; see docs/how-to/gpu.md
#SBATCH --job-name=leash
#SBATCH --nodes=1 --ntasks=1 --cpus-per-task=8 --mem=32G
#SBATCH --gres=gpu:1
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue --open-mode=append --output=slurm-%j.log
cd "${SLURM_SUBMIT_DIR:-.}" || exit 2
export PATH="$PWD/.venv/bin:$PATH"
srun --kill-on-bad-exit=0 leash run "$@"
code=$?
# 143 and 130: stopped by a signal. The same command continues from the last step; every other end is final.
if [ "$code" -eq 143 ] || [ "$code" -eq 130 ]; then
    exec scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
