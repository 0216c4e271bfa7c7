"""Put a source tree on hosts that have only sh, tar and sha256sum: only files that differ, none that .gitignore excludes.

Files that the tree no longer has are deleted if an earlier push sent them, or if they are code of ours that git tracks there,
unchanged: a module that was left behind makes a host's code another one. What else is in our packages is named; nothing else is touched.
"""

import base64
import hashlib
import io
import secrets
import shlex
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path

from llama405b.contract.code_version import SUFFIXES
from llama405b.contract.errors import UserError
from llama405b.contract.phrases import counted, given, last_of
from llama405b_tools.hosts.login_shell import shell_path
from llama405b_tools.hosts.transport import Connection, HostError, Result

MANIFEST = ".llama405b-code"  # on the host: the files of the last push, in sha256sum's format
PACKAGES = "./llama405b ./tools/llama405b_tools"
TIMEOUT_S = 300.0
MAX_BYTES = 200 << 20
SKIPPED = (".git", ".venv", "runs", "models", "__pycache__", "node_modules")  # without git


def tree_files(root: Path) -> list[str] | None:
    """List the files of a source tree, as git sees it; None if ``root`` is in no repository, or ignored."""
    git = ["git", "-C", str(root)]
    listing = [*git, "ls-files", "-z", "-c", "-o", "--exclude-standard", "."]
    try:
        ignored = subprocess.run([*git, "check-ignore", "-q", "."], capture_output=True, check=False)
        if ignored.returncode != 1:
            return None
        listed = subprocess.run(listing, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return sorted({name for name in listed.stdout.split("\0") if name and (root / name).is_file()})


def walk(root: Path) -> list[str]:
    """List the files of a source tree outside git, without caches and runs."""
    found = (path.relative_to(root) for path in sorted(root.rglob("*")) if path.is_file() and not path.is_symlink())
    return [str(name) for name in found if not any(part in SKIPPED or part.startswith(".") for part in name.parts)]


def manifest(root: Path, names: Sequence[str]) -> str:
    """Return ``sha256sum`` lines for the files.

    Raises:
        UserError: The files are too large for code, or a name has a line break.
    """
    total = sum((root / name).stat().st_size for name in names)
    if total > MAX_BYTES:
        much = f"{root}: {total / 1e6:,.0f} MB are too much for code"
        raise UserError(f"{much}; list data in .gitignore, and push it separately")
    if bad := [name for name in names if "\n" in name or "\\" in name]:
        raise UserError(f"{root / bad[0]!s}: its name contains a line break or backslash; rename it")
    return "".join(f"{hashlib.sha256((root / name).read_bytes()).hexdigest()}  ./{name}\n" for name in names)


def push(connection: Connection, root: Path, lines: str, to: str) -> str:
    """Make a host's directory equal to the tree; says how many files were sent and deleted, and what deletes others of our packages.

    Hosts may share the directory and be pushed to at the same time.

    Raises:
        HostError: The directory cannot be created or written.
    """
    directory, new = shell_path(to), f"{MANIFEST}.{secrets.token_hex(4)}"
    enter = f"cd {directory} && trap '[ $? = 0 ] || rm -rf {new} {new}.d' 0 && "
    compare = (
        f"cat >{new} && {{ sha256sum -c {new} 2>/dev/null | sed -n 's/: FAILED.*$//p'; }} && echo === "
        f"&& {{ [ ! -f {MANIFEST} ] || cut -c67- {MANIFEST}; }} && {{ echo ===; find {PACKAGES} -type f; echo ===; "
        f"{{ git ls-files -- {PACKAGES}; git ls-files -m -- {PACKAGES}; }} | sort | uniq -u | sed 's,^,./,'; }} 2>/dev/null"
    )
    there = connection.run(f"mkdir -p {directory} && {enter}{compare}", lines, TIMEOUT_S)
    if there.code:
        raise HostError(f"{to} cannot be created or written ({_last(there.err)}); set workdir= to one of your own")
    differ, before, found, tracked = (part.splitlines() for part in there.out.split("===\n"))
    wanted = {line[66:] for line in lines.splitlines()}
    send = [name for name in differ if name in wanted]
    code = {name for name in found if name.endswith(SUFFIXES) and "/." not in name} - wanted
    odd = code if "./tools/llama405b_tools/__init__.py" in wanted else set()
    gone = {name for name in before if name.startswith("./") and "/../" not in name} - wanted
    gone |= odd.intersection(tracked)
    if gone:
        _checked(connection.run(f"{enter}xargs -0 rm -f --", "\0".join(sorted(gone)), TIMEOUT_S))
    unpack, archive = (_unpack(new), _archive(root, send)) if send else ("", "")
    _checked(connection.run(f"{enter}{unpack}mv {new} {MANIFEST}", archive, TIMEOUT_S))
    left = shlex.join(sorted(odd - gone))
    unknown = given("; its code differs until you run there: {}", left and f"cd {directory} && rm {left}")
    return f"{counted(len(send), 'file')} sent, {len(gone)} deleted{unknown}"


def _unpack(manifest: str) -> str:
    """Begin a shell line: unpack an archive, moving each file atomically, as others may do the same; then verify all.

    Where a file is to be, what is left of a directory goes, unless it holds a file: then mv says so.
    """
    part = f"{manifest}.d"
    clear = '[ ! -d "../$f" ] || find "../$f" -type d -empty -delete'
    make = """find . -type d -exec sh -c 'cd .. && mkdir -p "$@"' sh {} +"""
    move = f"""find . ! -type d -exec sh -c 'for f; do {clear}; mv -fT "$f" "../$f" || exit; done' sh {{}} +"""
    return (
        f"mkdir {part} && (cd {part} && base64 -d | tar -xzf - && {make} && {move}) && rm -r {part} "
        f"&& sha256sum -c {manifest} >/dev/null && "
    )


def _archive(root: Path, names: Sequence[str]) -> str:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=6) as archive:
        for name in names:
            info = archive.gettarinfo(str(root / name), arcname=name)
            info.uid = info.gid = 0
            info.uname = info.gname = ""
            with (root / name).open("rb") as file:
                archive.addfile(info, file)
    return base64.encodebytes(buffer.getvalue()).decode()


def _checked(result: Result) -> None:
    if result.code:
        raise HostError(f"the files could not be written ({_last(result.err)}); fix that, or choose another directory")


def _last(text: str) -> str:
    return last_of(text.strip().splitlines(), "no reason given")
