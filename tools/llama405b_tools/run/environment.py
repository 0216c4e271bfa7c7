"""The variables and secrets of the ranks, from ``--env``, ``--env-file`` and ``--secret``."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from llama405b.contract.errors import UserError
from llama405b.contract.phrases import reason_of
from llama405b.contract.trust import refuse_others_writing

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SECRET = re.compile(r"TOKEN(?!IZ)|SECRET|PASSWORD|PASSWD|CREDENTIAL|(API|ACCESS|PRIVATE)_?KEY", re.IGNORECASE)
OURS = ("PYTHONUNBUFFERED", "CUDA_VISIBLE_DEVICES")  # set by the run itself, which relies on them


def read_env(
    pairs: Sequence[str], files: Sequence[Path], names: Sequence[str], here: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the ranks' variables and secrets, from ``--env``, ``--env-file`` and ``--secret`` (looked up in ``here``)."""
    of_files = {_checked(name, where): value for path in files for where, name, value in _env_lines(path)}
    secrets = {name: value for name, value in of_files.items() if SECRET.search(name)}
    env = {name: value for name, value in of_files.items() if name not in secrets}
    env |= dict(map(_env_pair, pairs))
    secrets |= dict(_secret(name, here) for name in names)
    for name, value in env.items():
        if "\0" in value or "\n" in value:
            raise UserError(f"--env: the value of {name} contains a line break; remove it")
    return env, secrets


def _secret(name: str, here: Mapping[str, str]) -> tuple[str, str]:
    if _checked(name.partition("=")[0], "--secret") not in here or "=" in name:
        raise UserError(f"--secret: {name.partition('=')[0]} is not set here; export it, and write --secret NAME")
    return name, here[name]


def _env_pair(pair: str) -> tuple[str, str]:
    name, equals, value = pair.partition("=")
    if SECRET.search(name):
        raise UserError(
            f"--env: {name} looks like a secret, which `ps` would show to everyone; export it, and write --secret {name}"
        )
    if not equals:
        raise UserError(f"--env: {pair!r} has no value; write --env NAME=VALUE")
    return _checked(name, "--env"), value


def _env_lines(path: Path) -> list[tuple[str, str, str]]:
    try:
        refuse_others_writing(path)
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--env-file: {path} cannot be read ({reason_of(error)}); name a file of NAME=VALUE lines"
        ) from None
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, equals, value = line.strip().removeprefix("export ").partition("=")
        if not equals:
            raise UserError(f"{path}:{number}: there is no '='; write NAME=VALUE")
        if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        found.append((f"{path}:{number}", name.strip(), value))
    return found


def _checked(name: str, where: str) -> str:
    if not VARIABLE.fullmatch(name):
        raise UserError(f"{where}: {name!r} is not a valid variable name; use letters, digits and '_'")
    if name in OURS or name.startswith(("LLAMA405B_", "TORCHELASTIC_")):
        raise UserError(f"{where}: {name} is set by the run itself; use another name")
    return name
