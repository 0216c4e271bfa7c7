"""Which host keys are accepted for a host, what is said of the others, and what is recorded. As ssh does it: tests/hosts/test_as_ssh.py."""

import dataclasses
import shutil
import subprocess
from pathlib import Path

import pytest

from llama405b_tools.hosts.ssh import check_host_key, find_known_keys, fingerprint
from llama405b_tools.hosts.transport import HostError, SshOptions

pytestmark = pytest.mark.skipif(not shutil.which("ssh-keygen"), reason="NOT RUN: needs ssh-keygen")
NEW = "its host key is not in known_hosts"


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """Two keys, as kind and base64."""
    paths = [tmp_path_factory.mktemp("keys") / name for name in ("KEY", "OTHER")]
    for path in paths:
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
    return {path.name: " ".join(path.with_suffix(".pub").read_text().split()[:2]) for path in paths}


@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize(
    ("line", "host", "port", "alias", "said"),
    [
        ("gpu-1 KEY", "gpu-1", 22, "", ""),
        ("gpu-1 KEY", "GPU-1", 22, "", ""),
        ("other,gpu-1 KEY", "gpu-1", 22, "", ""),
        ("gpu-1 KEY", "gpu-2", 22, "", f"{NEW}; run `ssh a` once"),
        ("[gpu-1]:2222 KEY", "gpu-1", 2222, "", ""),
        ("gpu-1 KEY", "gpu-1", 2222, "", ""),
        ("gpu-1 KEY\n[gpu-1]:2222 OTHER", "gpu-1", 2222, "", "`ssh-keygen -f FILE -R '[gpu-1]:2222'` and `ssh a` once"),
        ("gpu-1 OTHER\ngpu-1 KEY", "gpu-1", 22, "", ""),
        ("gpu-1 OTHER", "gpu-1", 22, "", "its host key has CHANGED: known_hosts does not have SHA256:"),
        ("the-cluster KEY", "10.0.0.7", 22, "the-cluster", ""),
        ("10.0.0.7 KEY", "10.0.0.7", 22, "the-cluster", NEW),
        ("gpu-1 KEY\n@revoked * KEY", "gpu-1", 22, "", "its host key is revoked in known_hosts (@revoked)"),
        ("gpu-* KEY", "gpu-1", 22, "", ""),
        ("gpu-*,!gpu-1 KEY", "gpu-1", 22, "", NEW),
        (
            "@cert-authority * OTHER",
            "gpu-1",
            22,
            "",
            f"{NEW} and it has no valid certificate of a @cert-authority there",
        ),
        ("@cert-authority * KEY\nnonsense\ngpu-1 ssh-ed25519 AAAAbroken\ngpu-1 KEY", "gpu-1", 22, "", ""),
    ],
)
def test_which_keys_are_known(tmp_path, keys, line, host, port, alias, said, hashed):
    path = tmp_path / "known_hosts"
    for name, key in keys.items():
        line = line.replace(name, key)
    path.write_text(f"{line}\n")
    if hashed:
        subprocess.run(["ssh-keygen", "-q", "-H", "-f", path], check=False, capture_output=True)
    options = SshOptions(host, "me", port, alias=alias, known_hosts=(path,), record_path=path)
    found = _said(options, keys["KEY"])
    assert said.replace("FILE", str(path)) in found
    assert found.endswith(" AUTH") if said else not found


def _said(options, key):
    try:
        check_host_key("a", options, find_known_keys(options), key)
    except HostError as error:
        return f"{error} {error.kind}"
    return ""


@pytest.mark.parametrize("hashes", [False, True])
@pytest.mark.parametrize("strict", ["accept-new", "false"])
def test_a_new_host_is_recorded_where_the_settings_say_so_and_its_next_key_is_another(tmp_path, keys, strict, hashes):
    path = tmp_path / "new" / "known_hosts"
    options = SshOptions("h", "me", 2222, known_hosts=(path,), record_path=path, strict=strict, hash_names=hashes)
    assert _said(options, keys["KEY"]) == ""
    text = path.read_text()
    assert text.startswith("|1|" if hashes else f"[h]:2222 {keys['KEY']}\n")
    path.write_text(text.rstrip("\n"))
    assert _said(dataclasses.replace(options, hostname="i"), keys["OTHER"]) == ""
    assert [line.split()[1:] for line in path.read_text().splitlines()] == [key.split() for key in keys.values()]
    assert ("CHANGED" in _said(options, keys["OTHER"])) == (strict == "accept-new")


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ("/dev/null", "name a file in ~/.ssh/config, or set StrictHostKeyChecking accept-new there"),
        (None, "name a file in ~/.ssh/config"),
    ],
)  # fmt: skip
def test_where_no_file_keeps_the_key_of_a_new_host_that_is_said(keys, records, words):
    options = SshOptions("h", "me", record_path=records and Path(records))
    assert _said(options, keys["KEY"]) == f"{NEW}; UserKnownHostsFile {records or 'none'} stores no keys; {words} AUTH"


@pytest.mark.parametrize(("signer", "accepted"), [("KEY", True), ("OTHER", False)])
def test_a_certificate_does_not_name_its_signer_by_its_key_id(tmp_path, keys, signer, accepted):
    """ssh-keygen prints that as it is, line breaks too."""
    for name in ("host", signer):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True)
    known = (tmp_path / f"{signer}.pub").read_text() if accepted else keys["KEY"]
    ca = fingerprint(keys["KEY"].split()[1])
    forged = f'x"\n        Signing CA: ED25519 {ca} (using ssh-ed25519)\n        Key ID: "y'
    sign = ["ssh-keygen", "-q", "-s", tmp_path / signer, "-h", "-I", forged, "-n", "h", tmp_path / "host.pub"]
    subprocess.run(sign, check=True)
    (tmp_path / "known").write_text(f"@cert-authority * {known}\n")
    options = SshOptions("h", "me", known_hosts=(tmp_path / "known",))
    key, cert = (" ".join((tmp_path / name).read_text().split()[:2]) for name in ("host.pub", "host-cert.pub"))
    try:
        check_host_key("a", options, find_known_keys(options), key, cert)
    except HostError:
        assert not accepted
    else:
        assert accepted


def test_without_ssh_keygen_nothing_is_accepted(tmp_path, keys, monkeypatch):
    (tmp_path / "known").touch()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(HostError, match="with `ssh-keygen`, but it is not installed on this machine; install it"):
        find_known_keys(SshOptions("h", "me", known_hosts=(tmp_path / "known",)))
