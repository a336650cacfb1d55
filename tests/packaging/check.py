"""Runs as root in the machine, with the installation below /mnt: tries the units, writes a JSON line for each step.

    {"step": "...", "ok": true, ...what was seen}
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

PREFIX = "/mnt/sandbox-cli"
CLI = f"{PREFIX}/bin/sandbox-cli"
UNIT = "sandboxd.service"
PATIENCE_S = 240.0


def say(step: str, ok: bool, **seen: object) -> None:
    print(json.dumps({"step": step, "ok": ok, **seen}), flush=True)


def run(
    *argv: str, user: str = "", timeout_s: float = PATIENCE_S, env: dict[str, str] | None = None
) -> tuple[int, str]:
    words = ["runuser", "-u", user, "--", *argv] if user else list(argv)
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **(env or {})}
    if user:
        home = pwd.getpwnam(user)
        environment |= {"HOME": home.pw_dir, "XDG_RUNTIME_DIR": f"/run/user/{home.pw_uid}"}
    done = subprocess.run(
        words, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        timeout=timeout_s, check=False,
    )
    return done.returncode, done.stdout.decode(errors="replace")[-1500:]


def show(unit: str, name: str) -> str:
    return run("systemctl", "show", "-P", name, unit)[1].strip()


def until(true: Callable[[], bool], seconds: float = PATIENCE_S) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if true():
            return True
        time.sleep(0.3)
    return False


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def in_unit(unit: str) -> set[int]:
    """Every process of the unit's control group and of those below it."""
    group = show(unit, "ControlGroup")
    found: set[int] = set()
    for root in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/systemd"), Path("/sys/fs/cgroup/unified")):
        for path in (root / group.lstrip("/")).rglob("cgroup.procs") if group else ():
            found |= {int(line) for line in path.read_text().split()}
    return found


MODULES = (
    "tun", "nf_tables", "nf_conntrack", "nf_nat", "nft_chain_nat", "nft_ct", "nft_fib_inet", "nft_nat", "nft_redir",
    "nft_reject_inet", "nft_socket", "nft_tproxy", "nft_limit", "nft_log",
)  # fmt: skip


def system_unit() -> None:
    # Unpacked and loaded on demand, under emulation, they would take longer than nft is given.
    for name in MODULES:
        run("modprobe", "-q", name)
    for name in ("systemd/system/sandboxd.service", "systemd/user/sandboxd.service"):
        shutil.copy(f"/mnt/etc/{name}", f"/etc/{name}")
    shutil.copytree("/mnt/etc/sandboxd", "/etc/sandboxd")
    os.chmod("/etc/sandboxd/tokens", 0o700)
    Path("/etc/sandboxd/environment").write_text(
        "SANDBOXD_FLAGS=--assets-dir /mnt/assets --listen unix:///run/sandboxd/sandboxd.sock "
        "--listen 127.0.0.1:729 --token-dir /etc/sandboxd/tokens\n"
    )
    for name, token in (("root", "r" * 40), ("alice", "a" * 40), ("bob", "b" * 40)):
        path = Path(f"/etc/sandboxd/tokens/{name}")
        path.write_text(token + "\n")
        path.chmod(0o600)
        home = Path(pwd.getpwnam(name).pw_dir)
        own = home / "token"
        own.write_text(token + "\n")
        own.chmod(0o600)
        shutil.chown(own, name, name)
    code, text = run("systemd-analyze", "verify", "/etc/systemd/system/sandboxd.service")
    say("the unit has no fault", code == 0 and not text.strip(), text=text)
    run("systemctl", "daemon-reload")
    began = time.monotonic()
    code, text = run("systemctl", "start", UNIT)
    say("it starts", code == 0, text=text, seconds=round(time.monotonic() - began, 1),
        log=run("journalctl", "-u", UNIT, "-o", "cat")[1])
    say("it said ready", show(UNIT, "StatusText") == "ready", status=show(UNIT, "StatusText"))
    modes = {path: f"{os.stat(path).st_mode & 0o777:o}" for path in ("/run/sandboxd", "/var/lib/sandboxd")}
    say("its directories are private", set(modes.values()) == {"700"}, modes=modes)


GROUPS = {
    "version": 2, "lacking": [], "entered": True, "ended": True, "killed": -9, "forks": 15, "emptied": True, "hog": -9,
    "removed": True, "left": [],
    "files": {
        "cpu.max": "50000 100000", "memory.max": "67108864", "memory.swap.max": "0", "memory.oom.group": "1",
        "pids.max": "16",
    },
}  # fmt: skip


def control_groups() -> None:
    code, text = run(f"{PREFIX}/bin/python", "/mnt/groups.py")
    say("control groups of version 2 hold", code == 0 and json.loads(text) == GROUPS, text=text)


ROOT = {"SANDBOX_TOKEN_FILE": "/root/token"}
TCP = "http://127.0.0.1:729"


def users() -> None:
    code, text = run(CLI, "list", env=ROOT)
    say("root uses it through the socket", code == 0, text=text)
    code, text = run(CLI, "list", user="alice")
    say("others do not", code != 0 and "root" in text, text=text)
    for name in ("alice", "bob"):
        own = {"SANDBOX_CONTEXT": TCP, "SANDBOX_TOKEN_FILE": f"{pwd.getpwnam(name).pw_dir}/token"}
        code, text = run(CLI, "list", user=name, env=own)
        say(f"{name} uses it over TCP with a token", code == 0, text=text)
    code, text = run(CLI, "list", user="bob", env={"SANDBOX_CONTEXT": TCP, "SANDBOX_TOKEN_FILE": "/home/alice/token"})
    say("bob cannot read alice's token", code != 0 and "ermission" in text, text=text)
    code, text = run(CLI, "list", user="bob", env={"SANDBOX_CONTEXT": TCP})
    say("without a token nobody is let in", code != 0 and "token" in text, text=text)
    bind = "import socket; socket.socket().bind(('127.0.0.1', 730))"
    code, text = run("python3", "-c", bind, user="bob")
    say("no user can take such a port", code != 0 and "Permission" in text, text=text)
    Path("/etc/sandboxd/tokens/bob").unlink()
    pid = show(UNIT, "MainPID")
    code, text = run("systemctl", "reload", UNIT)
    bob = {"SANDBOX_CONTEXT": TCP, "SANDBOX_TOKEN_FILE": "/home/bob/token"}
    revoked = until(lambda: run(CLI, "list", user="bob", env=bob)[0] != 0, 30)
    say("a reload takes a removed token away", code == 0 and revoked and show(UNIT, "MainPID") == pid, text=text)


def outlives(make: Callable[[], int], what: str) -> None:
    """`make` starts something the daemon looks after, and returns a pid of it."""
    pid = make()
    say(f"{what} is in the unit's control group", pid in in_unit(UNIT), pid=pid, group=sorted(in_unit(UNIT)))
    main = int(show(UNIT, "MainPID"))
    os.kill(main, signal.SIGKILL)
    back = until(lambda: show(UNIT, "ActiveState") == "active" and show(UNIT, "MainPID") not in ("0", str(main)))
    say("a killed daemon is started again", back, state=show(UNIT, "ActiveState"))
    say(f"{what} outlives the kill", alive(pid))
    code, text = run("systemctl", "stop", UNIT)
    say("it stops", code == 0 and show(UNIT, "ActiveState") == "inactive", text=text)
    say(f"{what} outlives the stop", alive(pid))


def stand_in() -> int:
    """A process of the unit's that is not the daemon, as a machine is."""
    group = show(UNIT, "ControlGroup").lstrip("/")
    child = subprocess.Popen(["sleep", "infinity"], stdin=subprocess.DEVNULL, start_new_session=True)
    for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/systemd"):
        if Path(root, group, "cgroup.procs").exists():
            Path(root, group, "cgroup.procs").write_text(str(child.pid))
    return child.pid


def user_unit() -> None:
    run("loginctl", "enable-linger", "alice")
    uid = pwd.getpwnam("alice").pw_uid
    until(lambda: Path(f"/run/user/{uid}/bus").exists())
    config = Path("/home/alice/.config/sandbox")
    config.mkdir(parents=True)
    (config / "environment").write_text("SANDBOXD_FLAGS=--assets-dir /mnt/assets\n")
    for path in (config.parent, config, config / "environment"):
        shutil.chown(path, "alice", "alice")
    user = ["systemctl", "--user", "-M", "alice@"]
    code, text = run(*user, "start", UNIT)
    log = run("journalctl", "_UID=" + str(uid), "-o", "cat")[1]
    say("a user's unit starts", code == 0, text=text, log=log)
    code, text = run(CLI, "list", user="alice")
    say("its user uses it", code == 0 and "root's" not in text, text=text)
    code, text = run(CLI, "--context", f"unix:///run/user/{uid}/sandboxd.sock", "list", user="bob")
    say("another user does not", code != 0, text=text)
    code, text = run(*user, "stop", UNIT)
    say("it stops for its user", code == 0, text=text)


def main() -> None:
    try:
        control_groups()
        system_unit()
        users()
        outlives(stand_in, "a process")
        user_unit()
        say("end", True)
    except BaseException as fault:
        say("check.py", False, fault=repr(fault), log=run("journalctl", "-u", UNIT, "-o", "cat")[1])
        raise


main()
