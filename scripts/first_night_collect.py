"""Bring what two hosts have of a first night into OUT/HOST, but for weights: ``HOSTS STAMP OUT`` (see scripts/first_night.sh)."""

import base64
import io
import sys
import tarfile
from pathlib import Path

from llama405b_tools.hosts.fleet import Fleet, read_hosts
from llama405b_tools.hosts.transport import shell_path

MACHINE = "uname -a; nproc; free -g; df -h .; nvidia-smi; nvidia-smi topo -m; {} -m pip freeze"
SMALL = "-name '*.json' -o -name '*.jsonl' -o -name '*.toml' -o -name '*.log' -o -path '*/flight/*'"
FIND = f"find runs/*{{}}* -type f -size -8M ! -name '.*' ! -path '*/model/*' \\( {SMALL} \\) -print0"
FILES = f"exec 2>/dev/null; {FIND} | tar -cz --null -T - | base64"
LIMIT_S = 50.0


def main(hosts: str, stamp: str, out: str) -> int:
    """Return 1 if a host did not answer."""
    with Fleet(read_hosts(Path(hosts))) as fleet:

        def bring(name: str) -> None:
            def ask(command: str) -> str:
                line = f"cd {shell_path(fleet.workdir(name))} && {{ {command}; }} 2>&1"
                return fleet.connection(name).run(line, "", LIMIT_S).out

            place = Path(out, name)
            place.mkdir(parents=True)
            (place / "machine.txt").write_text(ask(MACHINE.format(shell_path(fleet.python(name)))))
            packed = base64.b64decode(ask(FILES.format(stamp)))
            with tarfile.open(fileobj=io.BytesIO(packed)) as files:
                files.extractall(place, filter="data")

        failed = {name: error for name, error in fleet.call_each(bring).items() if error}
    print("\n".join(f"{name}: {error}" for name, error in failed.items()))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
