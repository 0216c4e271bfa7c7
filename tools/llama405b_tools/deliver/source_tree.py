"""Copy a source tree to a host: only what differs is sent.

The host needs only sh, coreutils, findutils and tar. The tree is described here, and on the host before and after the copy, in the
same form: files with their SHA-256 and execute bit, links with their target. Names are bytes. No message of a host's program is parsed.

What the tree no longer has is deleted if an earlier push sent it, or if it is our own code that git tracks there, unchanged:
a stale module would change a host's code. Other files in our packages are reported; nothing else is touched.
"""

import base64
import contextlib
import dataclasses
import hashlib
import io
import os
import re
import secrets
import shlex
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from llama405b.contract.errors import UserError, and_more, fmt_if, last_or, pluralize, printable_name, reason_of
from llama405b.contract.software import CODE_SUFFIXES
from llama405b_tools.hosts.transport import CommandResult, Connection, HostError, shell_path

MANIFEST = ".llama405b-code"  # on the host: what the last push sent, a line each: SHA-256, two spaces, ./name
PACKAGES = "./llama405b ./tools/llama405b_tools"
TIMEOUT_S = 300.0
RECHECK_DELAYS_S = (0.5, 2.0)
MAX_BYTES = 200 << 20
SKIPPED = (".git", ".venv", "runs", "models", "__pycache__", "node_modules")  # without git
FILE, PROGRAM, LINK = "f", "x", "l"  # kinds of entries; a program is a file that may be executed


@dataclasses.dataclass(frozen=True, slots=True)
class TreeEntry:
    """An entry of a tree: its kind, and the SHA-256 of a file (in hex) or the target of a link."""

    kind: str
    content: str


@dataclasses.dataclass(frozen=True, slots=True)
class SourceTree:
    """A tree of code: its entries by name, notes for the user on other names, and what git ignores."""

    root: Path
    entries: dict[str, TreeEntry]
    notes: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()


def git_tree(root: Path) -> SourceTree | None:
    """Return a source tree as git sees it, with its submodules; None if ``root`` is in no repository, or ignored.

    Raises:
        UserError: git does not read the repository, or the tree cannot be pushed (``describe_tree``).
    """
    try:
        is_ignored = _git(root, "check-ignore", "-q", ".")
    except OSError:
        return None
    if is_ignored.returncode > 1 and any((place / ".git").exists() for place in (root, *root.resolve().parents)):
        raise _git_error(root, is_ignored)
    if is_ignored.returncode != 1:
        return None
    listed = list(_list_work_tree(root, ""))
    tree = describe_tree(root, (name for name in listed if not name.endswith("/")))
    missing = "a submodule that is not checked out; run `git submodule update --init --recursive`"
    notes = [f"left out: {printable_name(name)} ({missing})" for name in listed if name.endswith("/")]
    ignored = _git_ls_files(root, "-zoi", "--exclude-standard", "--directory", ".")
    return dataclasses.replace(tree, notes=(*notes, *tree.notes), ignored=tuple(ignored))


def _git(root: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, check=False)


def _git_ls_files(root: Path, *arguments: str) -> list[str]:
    """Return what git lists; raise if git fails, so that an error does not look like an empty tree."""
    result = _git(root, "ls-files", *arguments)
    if result.returncode:
        raise _git_error(root, result)
    return _split_names(result.stdout)


def _git_error(root: Path, result: subprocess.CompletedProcess[bytes]) -> UserError:
    reason = last_or(os.fsdecode(result.stderr).strip().splitlines(), "no reason given")
    return UserError(f"{root}: git cannot read this work tree ({reason}); fix that, or push a copy without .git")


def _split_names(text: bytes) -> list[str]:
    """Return the names that a program printed with NUL after each."""
    return [os.fsdecode(name) for name in text.split(b"\0") if name]


def _list_work_tree(root: Path, prefix: str) -> Iterator[str]:
    """Yield what git lists in a work tree and in those within it; a submodule without content ends in a slash."""
    for name in dict.fromkeys(_git_ls_files(root, "-zco", "--exclude-standard", ".")):
        path = root / name
        if path.is_symlink() or not path.is_dir():
            yield prefix + name
        elif (path / ".git").exists():
            yield from _list_work_tree(path, f"{prefix}{name.rstrip('/')}/")
        else:
            yield f"{prefix}{name.rstrip('/')}/"


def plain_tree(root: Path) -> SourceTree:
    """Return a source tree outside git, without hidden files, caches and runs."""
    names = (path.relative_to(root) for path in root.rglob("*") if path.is_symlink() or not path.is_dir())
    return describe_tree(root, (str(name) for name in names if not any(map(_is_skipped, name.parts))))


def _is_skipped(part: str) -> bool:
    return part in SKIPPED or part.startswith(".")


def describe_tree(root: Path, names: Iterable[str]) -> SourceTree:
    """Describe the named files and links of a directory; names that no longer exist are left out.

    A link to something that is sent stays a link. Of another link to a file, the content is sent. Any other link is sent as it is,
    with a note.

    Raises:
        UserError: A file cannot be read, or they are too large for code.
    """
    existing = {name for name in names if os.path.lexists(root / name)}  # git still lists what was deleted
    selected = sorted(existing - {MANIFEST})
    sent_paths = {str(place) for name in selected for place in (Path(name), *Path(name).parents)}
    entries, notes, total = dict[str, TreeEntry](), list[str](), 0
    for name in selected:
        path = root / name
        try:
            target = _link_target(root.resolve(), name, sent_paths) if path.is_symlink() else ""
            if path.is_file() and not target:
                mode, size = path.stat().st_mode, path.stat().st_size
                total += size
                entries[name] = TreeEntry(
                    PROGRAM if mode & 0o111 else FILE, _sha256(path) if total <= MAX_BYTES else ""
                )
            elif path.is_symlink():
                entries[name] = TreeEntry(LINK, target or str(path.readlink()))
                if not target:
                    target_name = printable_name(str(path.readlink()))
                    notes.append(f"note: {printable_name(name)} is sent as a link to {target_name}, which is not sent")
            elif path.exists():
                notes.append(f"left out: {printable_name(name)} (neither a file nor a link)")
        except OSError as error:
            why = f"cannot be read ({reason_of(error)}); fix that, or list it in .gitignore"
            raise UserError(f"{root}: {printable_name(name)} {why}") from None
    if total > MAX_BYTES:
        size_problem = f"{root}: {total / 1e6:,.0f} MB are too much for code"
        raise UserError(f"{size_problem}; list data in .gitignore, and push it separately")
    return SourceTree(root, entries, tuple(notes))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _link_target(root: Path, name: str, sent_paths: set[str]) -> str:
    """Return a link's target, relative to the link, if the target is sent; '' otherwise."""
    folder, target = (root / name).parent, str((root / name).readlink())
    if target.startswith("/"):
        target = os.path.relpath(target, folder)
    return target if os.path.relpath(os.path.normpath(folder / target), root) in sent_paths else ""


def push_tree(connection: Connection, tree: SourceTree, to: str) -> str:
    """Make a host's directory equal to the tree; return what was sent and deleted, and how to delete the rest.

    Hosts may share the directory and be pushed to at the same time.

    Raises:
        HostError: The directory cannot be written, or is not equal to the tree afterwards.
    """
    directory, new = shell_path(to), f"{MANIFEST}.{secrets.token_hex(4)}"
    enter = f"cd {directory} && export LC_ALL=C && trap '[ $? = 0 ] || rm -rf {new} {new}.f {new}.d' 0 && "
    describe = f"base64 -d >{new} && {DESCRIBE_SH.format(new)}"
    list_packages = (
        f"{{ [ ! -f {MANIFEST} ] || cat {MANIFEST}; }} | base64 && echo === && {{ find {PACKAGES} -type f -print0 | base64; echo ===; "
        f"{{ git ls-files -z -- {PACKAGES}; git ls-files -zm -- {PACKAGES}; }} | sort -z | uniq -zu | base64; }} 2>/dev/null"
    )
    packed_names, canary = _pack_names(tree.entries), tree.root / f"{new}.m"
    check_own = f"{{ [ ! -e {canary.name} ] || echo own | base64; }} && echo === && "
    try:
        with contextlib.suppress(OSError):
            canary.touch()
        result = connection.run(
            f"mkdir -p {directory} && {enter}{describe} && {check_own}{list_packages}", packed_names, TIMEOUT_S
        )
    finally:
        with contextlib.suppress(OSError):
            canary.unlink(missing_ok=True)
    if result.code:
        raise HostError(
            f"{to} cannot be created or written ({_last_line(result.err)}); set workdir= to one of your own"
        )
    *remote_state, is_own, manifest, package_files, tracked = map(base64.b64decode, result.out.split("===\n"))
    if is_own:  # the host's directory is this tree itself
        return "0 files sent, 0 deleted"
    changed = _differing_names(tree, *remote_state)
    code = {name[2:] for name in _split_names(package_files) if name.endswith(CODE_SUFFIXES) and "/." not in name}
    extra = code - tree.entries.keys() if "tools/llama405b_tools/__init__.py" in tree.entries else set[str]()
    deleted = _parse_manifest(manifest) - tree.entries.keys()
    deleted |= extra.intersection(_split_names(tracked))
    if deleted:
        _check_result(connection.run(f"{enter}base64 -d | {REMOVE_SH}", _pack_names(sorted(deleted)), TIMEOUT_S))
    if (
        lines := _manifest_text(tree)
    ) != manifest:  # before the files: a push that breaks leaves none that no manifest knows
        _check_result(connection.run(f"{enter}base64 -d >{new} && mv {new} {MANIFEST}", _encode(lines), TIMEOUT_S))
    bits_note = ""
    if changed:
        _check_result(connection.run(f"{enter}{_unpack_command(f'{new}.d')}", _build_archive(tree, changed), TIMEOUT_S))
        bits_note = _verify_tree(tree, lambda: connection.run(f"{enter}{describe}", packed_names, TIMEOUT_S))
    undeleted = " ".join(shlex.quote(f"./{printable_name(name)}") for name in sorted(extra - deleted))
    extra_note = fmt_if("; its code differs, run there: {}", undeleted and f"cd {directory} && rm {undeleted}")
    return f"{pluralize(len(changed), 'file')} sent, {len(deleted)} deleted{bits_note}{extra_note}"


REMOVE_SH = """xargs -0 sh -c 'for f; do [ -d "$f" ] && [ ! -L "$f" ] || rm -f -- "$f" || exit; done' sh"""  # no directory: it is not ours
# Of the names in a file, NUL after each: what each is, a link with its target; the SHA-256 of those that are files; their modes.
KIND_SH = r'if [ -L "$f" ]; then printf l; readlink -- "$f"; elif [ -f "$f" ] && [ -r "$f" ]; then printf f; printf "%s\0" "./$f" >&3'
KINDS_SH = (
    rf"""xargs -0r sh -c 'for f; do {KIND_SH}; else printf -; fi; printf "\0"; done' sh <{{0}} 3>{{0}}.f | base64"""
)
DIGESTS_SH = r'xargs -0r sha256sum -- <{0}.f | sed "s/^\\\\//" | cut -c-64 | base64'
DESCRIBE_SH = f"{KINDS_SH} && echo === && {DIGESTS_SH} && echo === && "
DESCRIBE_SH += "xargs -0r stat -c %a -- <{0}.f | base64 && rm {0} {0}.f && echo ==="


def _verify_tree(tree: SourceTree, describe: Callable[[], CommandResult]) -> str:
    """Check that a host has the tree; return a note if its file system does not keep execute bits.

    Retry if something differs: while others push into the same directory, a file may be missing for a moment.
    """
    for delay_s in (*RECHECK_DELAYS_S, None):
        remote_state = [base64.b64decode(part) for part in _check_result(describe()).out.split("===\n")[:3]]
        wrong = _differing_names(tree, *remote_state, bits=False)
        if not wrong:
            return "; its file system does not keep execute bits" if _differing_names(tree, *remote_state) else ""
        if delay_s:
            time.sleep(delay_s)
    raise HostError(
        f"{printable_name(wrong[0])}{and_more(wrong)} differs on the host from what was read here; push again"
    )


def _differing_names(tree: SourceTree, kinds: bytes, digests: bytes, modes: bytes, *, bits: bool = True) -> list[str]:
    """Return the names that are not on a host as in the tree; kinds, digests, modes: what DESCRIBE printed there."""
    files = zip(digests.decode().split(), modes.decode().split(), strict=False)
    differ = list[str]()
    for (name, entry), kind in zip(tree.entries.items(), kinds.split(b"\0")[:-1], strict=True):
        remote = TreeEntry(LINK, os.fsdecode(kind[1:-1]))
        if not kind.startswith(b"l"):
            digest, mode = next(files, ("", "0")) if kind == b"f" else ("", "0")
            remote = TreeEntry(PROGRAM if int(mode, 8) & 0o111 else FILE, digest)
        if not bits and LINK not in (remote.kind, entry.kind):
            remote = dataclasses.replace(remote, kind=entry.kind)
        if remote != entry:
            differ.append(name)
    return differ


def _pack_names(names: Iterable[str]) -> str:
    return _encode(b"".join(os.fsencode(name) + b"\0" for name in names))


def _encode(data: bytes) -> str:
    return base64.encodebytes(data).decode()


def _manifest_text(tree: SourceTree) -> bytes:
    lines = list[str]()
    for name, entry in tree.entries.items():
        content = hashlib.sha256(os.fsencode(entry.content)).hexdigest() if entry.kind == LINK else entry.content
        lines.append(f"{content}  ./{name.replace(chr(92), chr(92) * 2).replace(chr(10), chr(92) + 'n')}\n")
    return os.fsencode("".join(lines))


def _parse_manifest(manifest: bytes) -> set[str]:
    """Return the names in a manifest; none that leads out of its directory."""
    names = [line[68:] for line in os.fsdecode(manifest).split("\n") if line[64:68] == "  ./"]
    unescaped = {re.sub(r"\\(.)", lambda match: "\n" if match[1] == "n" else match[1], name) for name in names}
    return {name for name in unescaped if name[:1] not in ("", "/") and ".." not in name.split("/")}


def _unpack_command(part: str) -> str:
    """Return a shell line that unpacks an archive and moves each file atomically, as others may do the same.

    An empty directory in the place of a file is deleted; one that holds a file makes mv fail.
    """
    clear = '[ -L "../$f" ] || [ ! -d "../$f" ] || find "../$f" -type d -empty -delete'
    make = """find . -type d -exec sh -c 'cd .. && mkdir -p "$@"' sh {} +"""
    move = f"""find . ! -type d -exec sh -c 'for f; do {clear}; mv -fT "$f" "../$f" || exit; done' sh {{}} +"""
    return f"mkdir {part} && (cd {part} && base64 -d | tar -xzf - && {make} && {move}) && rm -r {part}"


def _build_archive(tree: SourceTree, names: Sequence[str]) -> str:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=6, format=tarfile.GNU_FORMAT) as archive:
        for name in names:
            entry, path = tree.entries[name], tree.root / name
            info = tarfile.TarInfo(name)
            info.mode, info.mtime = 0o755 if entry.kind == PROGRAM else 0o644, int(time.time())
            if entry.kind == LINK:
                info.type, info.linkname = tarfile.SYMTYPE, entry.content
                archive.addfile(info)
                continue
            try:
                data = path.read_bytes()
            except OSError as error:
                raise HostError(
                    f"{printable_name(name)} cannot be read any more ({reason_of(error)}); push again"
                ) from None
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return _encode(buffer.getvalue())


def _check_result(result: CommandResult) -> CommandResult:
    if result.code:
        raise HostError(
            f"the files could not be written ({_last_line(result.err)}); fix that, or choose another directory"
        )
    return result


def _last_line(text: str) -> str:
    return last_or(text.strip().splitlines(), "no reason given")
