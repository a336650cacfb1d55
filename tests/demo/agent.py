"""A small scripted agent. It runs inside the VM, in /workspace: test, mend the code, test again, commit."""

import pathlib
import platform
import subprocess
import sys


def tests_pass() -> bool:
    outcome = subprocess.run(["python3", "-m", "unittest", "-q"], capture_output=True, text=True)
    print((outcome.stderr.strip().splitlines() or ["no output"])[-1], flush=True)
    return outcome.returncode == 0


print(f"agent: kernel {platform.release()}, uid {__import__('os').getuid()}, in {pathlib.Path.cwd()}", flush=True)
if tests_pass():
    sys.exit("agent: nothing to mend")
source = pathlib.Path("fare.py")
code = source.read_text()
source.write_text(code.replace("age > 65", "age >= 65"))
print("agent: fare.py: seniors start at 65, not at 66", flush=True)
if not tests_pass():
    sys.exit("agent: still failing")
subprocess.run(["git", "commit", "-qam", "Seniors start at 65"], check=True)
pathlib.Path("NOTES.md").write_text("The boundary was off by one; see test_fare.py.\n")
print("agent: committed, and left NOTES.md uncommitted", flush=True)
