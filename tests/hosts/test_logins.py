"""Login shells as users have them: other shells than sh's kin, and start-up files that print or read."""

import os
import shutil
import subprocess

import pytest

from ops_rig import FAKE_TRAINER

N_HOSTS = 2
BASHRC = "/home/alice/.bashrc"


@pytest.fixture
def login(hosts):
    """Give the user of node-2 a shell and a .bashrc."""

    def give(shell, bashrc):
        if not shutil.which(shell):
            if os.environ.get("LLAMA405B_NOTHING_SKIPPED"):
                pytest.fail(f"NOT RUN: needs {shell}")
            pytest.skip(f"NOT RUN: needs {shell}")
        hosts.exec(2, "usermod", "-s", shutil.which(shell), "alice")
        hosts.exec(2, "sh", "-c", f"cat >{BASHRC} <<'EOF'\n{bashrc}\nEOF\nchown alice {BASHRC}")

    yield give
    hosts.exec(2, "usermod", "-s", "/bin/bash", "alice")
    hosts.exec(2, "rm", "-f", BASHRC)


@pytest.mark.parametrize(
    ("shell", "bashrc"),
    [
        ("tcsh", ""),
        pytest.param("csh", "", marks=pytest.mark.soak),
        ("bash", "printf 'welcome to node-2'"),
        ("bash", "echo '{\"a\": 1}'; echo '{\"a\": 1}' >&2"),
    ],
    ids=["tcsh", "csh", "no newline", "JSON"],
)
def test_every_verb_works_whatever_the_login_shell_does(hosts, operator, login, tmp_path, shell, bashrc):
    for i in (1, 2):
        where = f"{hosts.workdir(i)}/p.py"
        hosts.exec(i, "sh", "-c", f"echo 'print(\"it\\047s here!\", flush=True)' >{where}; chmod 644 {where}")
    login(shell, bashrc)
    done = operator("launch", "--run", "shells", "--resume", "auto", "--follow", *FAKE_TRAINER, "--", "p.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert operator("logs", "--run", "shells").stdout.count("it's here!") >= 2
    said = operator("doctor", "--json").stdout
    assert '"lost": {}' in said
    assert "behind" not in said  # its clock
    assert "node-2 OK" in operator("top", "--once").stdout
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "it's new!.txt").write_text("x")
    pushed = operator("push", tmp_path / "code", "--to", "~/pushed")
    assert pushed.returncode == 0, pushed.stdout + pushed.stderr
    assert hosts.exec(2, "cat", "/home/alice/pushed/it's new!.txt").stdout == "x"


@pytest.mark.parametrize("language", ["de_DE", "fr_FR", "zh_CN", ""])
def test_a_host_may_speak_any_language(hosts, operator, login, tmp_path, language):
    said = (
        subprocess.run(["localedef", "-i", language, "-f", "UTF-8", tmp_path / f"{language}.UTF-8"], check=False)
        if language
        else None
    )
    environment = {"LOCPATH": str(tmp_path), "LANG": f"{language}.UTF-8", "PATH": os.environ["PATH"]}
    refused = [
        subprocess.run(["sha256sum", "--odd"], env=env, capture_output=True, check=False).stderr
        for env in (environment, {})
    ]
    if language and (said.returncode > 1 or refused[0] == refused[1]):
        pytest.skip(f"NOT RUN: needs the locale {language} and coreutils in it (apt-get install locales)")
    subprocess.run(["chmod", "-R", "a+rX", tmp_path.parent], check=True)
    login(
        "bash", f"export LOCPATH={tmp_path} LANG={language}.UTF-8 LC_ALL=" if language else "unset LANG LC_ALL LANGUAGE"
    )
    code = tmp_path / "code"
    code.mkdir()
    subprocess.run(["git", "init", "-q", code], check=True)
    for text in (f"print('{language} first')", f"print('{language} second')"):
        (code / "p.py").write_text(text)
        (code / "é.txt").write_text(text)
        pushed = operator("push", code)
        assert pushed.returncode == 0, pushed.stdout + pushed.stderr
        for i in (1, 2):
            assert hosts.exec(i, "cat", f"{hosts.workdir(i)}/p.py").stdout == text
            assert f"node-{i}" in pushed.stdout
        assert pushed.stdout.count("2 files sent, ") == 2
    assert operator("push", code).stdout.count("0 files sent, 0 deleted") == 2
    assert '"lost": {}' in operator("doctor", "--json").stdout
    done = operator("launch", "--run", "speaks", "--resume", "auto", "--follow", *FAKE_TRAINER, "--", "p.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert operator("logs", "--run", "speaks").stdout.count("second") >= 2
    assert operator("stop", "--run", "speaks").returncode == 0


def test_a_bashrc_that_reads_is_named(operator, login):
    login("bash", "read answer")
    done = operator("launch", "--run", "reads", "--", "p.py")
    assert done.returncode == 1
    assert "node-2: its login shell's start-up files (such as ~/.bashrc) read input or take more than" in done.stderr
    assert "Nothing was started" in done.stderr


def test_a_login_that_runs_no_command_is_named(operator, login):
    login("bash", "echo maintenance; exit")
    done = operator("launch", "--run", "ends", "--", "p.py")
    assert done.returncode == 1
    assert "start-up files (such as ~/.bashrc) end it before it runs a command (maintenance)" in done.stderr


@pytest.mark.parametrize(
    ("bashrc", "words"),
    [
        ("yes", "print without end; let them do that only in interactive shells"),
        ("exec bash", "start another shell, which runs no command; let them do that only in interactive shells"),
    ],
)
def test_start_up_files_that_let_no_command_run_end_a_verb_before_their_time_limit(operator, login, bashrc, words):
    login("bash", bashrc)
    done = operator("launch", "--run", "odd", "--", "-c", "x")
    assert done.returncode == 1
    assert f"node-2: its login shell's start-up files (such as ~/.bashrc) {words}" in done.stderr
