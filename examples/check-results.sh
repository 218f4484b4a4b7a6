#!/usr/bin/env bash
# Exit 1 where dvc.lock was not made from this commit's code, parameters and data, or where DVC's remote lacks a result.
# Computes nothing, and downloads only imported raw data: DVC cannot compare a folder that has a part of its files. For
# CI: see docs/how-to/remote.md.
set -uo pipefail
if compgen -G "data/raw/*.dvc" >/dev/null && ! dvc pull --quiet data/raw/*.dvc; then
    echo "the raw data cannot be fetched from DVC's remote: see \`dvc remote list\`" >&2
    exit 1
fi
if ! plan=$(dvc repro --pull --allow-missing --dry 2>&1) || grep --quiet "^Running stage" <<<"$plan"; then
    grep --extended-regexp "^Running stage|^ERROR" <<<"$plan" >&2
    echo "dvc.lock does not belong to this commit: run \`dvc repro\` and \`dvc push\`, then \`git commit -a\`" >&2
    exit 1
fi
if ! status=$(dvc data status --not-in-remote --json); then
    echo "DVC's remote does not answer, or there is none: see \`dvc remote list\`" >&2
    exit 1
fi
python - "$status" <<'PYTHON' || exit 1
import json, sys

missing = json.loads(sys.argv[1]).get("not_in_remote", [])
if missing:
    sys.exit(f"not in DVC's remote: {', '.join(missing)}; `dvc push` where they were made")
PYTHON
echo "results belong to this commit, and the remote has them"
