"""Which host keys are accepted for a host: in plain text, hashed by ssh-keygen, by alias, on a port, revoked."""

import shutil
import subprocess

import paramiko
import pytest

from llama405b_tools.hosts.ssh import load_known_hosts
from llama405b_tools.hosts.ssh_config import SshOptions

pytestmark = pytest.mark.skipif(not shutil.which("ssh-keygen"), reason="NOT RUN: needs ssh-keygen")


@pytest.fixture
def key(tmp_path):
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key"], check=True)
    return " ".join((tmp_path / "key.pub").read_text().split()[:2])


@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize(
    ("line", "host", "port", "alias", "known"),
    [
        ("gpu-1 KEY", "gpu-1", 22, "", True),
        ("other,gpu-1 KEY", "gpu-1", 22, "", True),
        ("gpu-1 KEY", "gpu-2", 22, "", False),
        ("[gpu-1]:2222 KEY", "gpu-1", 2222, "", True),
        ("gpu-1 KEY", "gpu-1", 2222, "", False),
        ("the-cluster KEY", "10.0.0.7", 22, "the-cluster", True),
        ("gpu-1 KEY\n@revoked * KEY", "gpu-1", 22, "", False),
        ("@cert-authority * KEY\nnonsense\ngpu-1 ssh-ed25519 AAAAbroken\ngpu-1 KEY", "gpu-1", 22, "", True),
    ],
)
def test_which_keys_are_known(tmp_path, key, line, host, port, alias, known, hashed):
    path = tmp_path / "known_hosts"
    path.write_text(line.replace("KEY", key) + "\n")
    if hashed:
        subprocess.run(["ssh-keygen", "-q", "-H", "-f", path], check=False, capture_output=True)
        assert "|1|" in path.read_text() or "broken" in line  # a file with a broken key it leaves as it is
    client = paramiko.SSHClient()
    load_known_hosts(client, SshOptions(host, "me", port, alias=alias, known_hosts=(path,)))
    name = host if port == 22 else f"[{host}]:{port}"
    assert (client.get_host_keys().lookup(name) is not None) == known
