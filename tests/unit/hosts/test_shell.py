import shutil
import subprocess

import pytest

from llama405b_tools.hosts.transport import wrap_in_sh

SHELLS = [shell for shell in ("sh", "dash", "bash", "zsh", "tcsh", "csh", "fish") if shutil.which(shell)]


@pytest.mark.parametrize("shell", SHELLS)
def test_every_login_shell_hands_the_same_line_to_sh(shell, tmp_path):
    line = (
        r"""printf '%s|' "it's" '!important' \\ 'a\nb' "$0" $((1 + 1)) *.none =ls ~- 2>&1 && A=1 env | grep -c '^A=1'"""
    )
    plain = subprocess.run(["sh", "-c", line], capture_output=True, text=True, cwd=tmp_path, check=True)
    done = subprocess.run([shell, "-c", wrap_in_sh(line)], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, plain.stdout, "")
    assert plain.stdout.endswith("|1\n")
