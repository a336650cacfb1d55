"""Check that nothing was changed in, put into or taken out of the audit log.

Usage:
  sandbox-cli audit verify [options] [FILE...]

Each line of the log holds a hash of the line before. Without FILE, sandboxd
checks its own log. With one FILE it is read here, with the older ones beside
it (FILE.1 to FILE.5); with several, those, wherever they were kept. Exit code
1 says that the chain does not hold, and the first place where it does not is
named.

Whoever may write the files can write a chain anew. Keep the last hash that
this prints where they cannot: the line that follows it says it as "prev" for
as long as it is kept.

Options:
  --context=C    which sandboxd: the name of a context (see `context`), or an
                 address
  --json         print an object
  -h, --help     show this
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from cli import context, show
from sandboxd import chain
from sandboxd.chain import Report
from sandboxd.client import AuditCheck
from sandboxd.errors import SandboxError
from sandboxd.generations import Generations, lines, open_file
from sandboxd.termsafe import clean

PART = re.compile(r"\.[1-9]\Z")


def main(args: dict[str, Any]) -> int:
    files = [Path(name) for name in args["FILE"]]
    found = check(files) if files else context.choose(args["--context"]).client.verify_audit()
    if args["--json"]:
        show.as_json(found._asdict())
        return 0 if found.ok else 1
    for text in found.notes:
        show.note(text)
    if not found.ok:
        show.note(f"the chain does not hold: {found.fault}")
        return 1
    a_line, a_file = ("line" if found.lines == 1 else "lines"), ("file" if found.files == 1 else "files")
    show.line(f"{found.lines} {a_line} in {found.files} {a_file}, each follows from the one before")
    show.line(f"last hash: {found.last}")
    return 0


def check(paths: list[Path]) -> AuditCheck:
    """Of files that are read here. Raises `SandboxError` for one that cannot be."""
    try:
        report = _part(paths) if len(paths) > 1 or PART.search(paths[0].name) else _whole(paths[0])
    except OSError as fault:
        name = fault.filename or paths[0]
        raise SandboxError(f"{clean(str(name))} cannot be read: {fault.strerror or fault}") from None
    return AuditCheck(not report.fault, report.lines, report.files, report.fault, report.last, report.notes)


def _whole(path: Path) -> Report:
    log = Generations(path)
    head = log.kept_head()      # before the files: it may be behind them and not before
    with log.opened() as opened:
        if not opened.files and head is None:
            raise FileNotFoundError(2, "No such file or directory", str(path))
        report = chain.verify([(name, lines(file)) for name, file in opened.files], head, opened.kept)
    if head is not None:
        return report
    return Report(
        report.lines, report.files, report.fault, report.last,
        (*report.notes, f"{log.head.name} is missing: whether lines are missing at the end cannot be told"),
    )  # fmt: skip


def _part(paths: list[Path]) -> Report:
    """Files in the order in which they were written."""
    with ExitStack() as opened:
        files = [(path.name, opened.enter_context(open_file(path))) for path in paths]
        begins = []
        for name, file in files:
            first = chain.read(next(lines(file), b""))
            if first is None:
                raise SandboxError(f"{clean(name)} does not begin as an audit log")
            file.seek(0)
            begins.append((first.seq, name, file))
        begins.sort(key=lambda one: one[0])
        return chain.verify([(name, lines(file)) for _, name, file in begins], None, 0)
