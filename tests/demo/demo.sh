#!/usr/bin/env bash
# The main job, with the commands it is made of shown as they run: a repository with a failing test, an agent in a VM
# that mends it, the commits back in refs/sandbox/demo. Usage: demo.sh DIRECTORY-FOR-THE-REPOSITORY
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
bin=$(cd "$here/../../.venv/bin" && pwd)
PATH="$bin:$PATH"
repo=$1

if [ -t 1 ]; then bold=$'\033[1m' plain=$'\033[0m'; else bold='' plain=''; fi
say() { printf '\n%s%s%s\n' "$bold" "$*" "$plain"; }
show() { printf '$ %s\n' "$*"; "$@"; }
state_of() {   # everything of the user's that a run must not touch
    git -C "$repo" for-each-ref --format='%(refname) %(objectname)' refs/heads
    git -C "$repo" status --porcelain
    cat "$repo/.git/HEAD"
    sha256sum "$repo/.git/index" "$repo"/*.py "$repo/.git/config"
}

say "A repository with a failing test"
rm -rf "$repo"
git init -q -b main "$repo"
cat > "$repo/fare.py" <<'PY'
def fare(age):
    return 5 if age > 65 else 10
PY
cat > "$repo/test_fare.py" <<'PY'
import unittest

from fare import fare


class Fare(unittest.TestCase):
    def test_seniors_pay_half(self):
        self.assertEqual(fare(65), 5)
PY
printf '__pycache__/\n' > "$repo/.gitignore"
cd "$repo"
git add .
git -c user.name=You -c user.email=you@localhost commit -qm "Fares"
before=$(state_of)

if ! sandbox-cli list >/dev/null 2>&1; then
    say "No sandboxd answers: starting one as $(id -un), for this demo"
    log="$repo.sandboxd.log"
    sandboxd ${SANDBOX_TEST_ASSETS:+--assets-dir "$SANDBOX_TEST_ASSETS"} >"$log" 2>&1 &
    daemon=$!
    trap 'kill "$daemon" 2>/dev/null || true; wait "$daemon" 2>/dev/null || true' EXIT
    for _ in $(seq 100); do
        sandbox-cli list >/dev/null 2>&1 && break
        kill -0 "$daemon" 2>/dev/null || { cat "$log" >&2; exit 1; }
        sleep 0.1
    done
    cat "$log"
fi

say "An agent works on it in a virtual machine"
printf '$ sandbox-cli run --name demo -- python3 - < agent.py\n'
sandbox-cli run --name demo -- python3 - < "$here/agent.py"

say "What came back"
show git for-each-ref refs/sandbox
show git --no-pager log --oneline main..refs/sandbox/demo
show git --no-pager diff --no-ext-diff --no-textconv main refs/sandbox/demo

say "What did not change: branch, index, working tree"
if [ "$before" = "$(state_of)" ]; then
    echo "branches, HEAD, index, files and .git/config are byte for byte as before"
    show git status --short --branch
else
    echo "SOMETHING OF YOURS CHANGED:" >&2
    diff <(printf '%s\n' "$before") <(state_of) >&2 || true
    exit 1
fi
