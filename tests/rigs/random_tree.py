"""Trees of files as people have them, drawn from a seed: names of any bytes, links of each kind, modes, sizes."""

import os
import random
import stat
import subprocess

PIECES = (
    b"a", b"B", b"0", b" ", b"-", b".x", b"\xc3\xa9", b"\xe9", b"\xff", b"\\", b"\n", b"\t", b"'", b'"', b"$", b"*", b"#", b"~",
    b";", b"&", b"%s", b"=",
)  # fmt: skip


class RandomTree:
    """A tree at ``root`` beside other files that it may link to; ``git``: it is a work tree, with others in it."""

    def __init__(self, seed, root, *, git):
        self.draw, self.root, self.git = random.Random(seed), os.fsencode(root), git
        self.folders, self.files = [b""], []
        os.makedirs(self.root)
        outside = os.path.join(os.path.dirname(self.root), b"outside")
        os.makedirs(os.path.join(outside, b"folder"))
        for name in (b"file", b"folder/file"):
            self._write(os.path.join(outside, name))
        for _ in range(self.draw.randint(0, 4)):
            self._folder()
        for _ in range(self.draw.randint(1, 12)):
            self._file()
        for _ in range(self.draw.randint(0, 6)):
            self._link()
        if git:
            self._init(self.root)
            with open(os.path.join(self.root, b".gitignore"), "wb") as file:
                file.write(b"ignored*\n")
            self._write(os.path.join(self.root, b"ignored file"))
            if self.draw.random() < 0.5:
                subprocess.run(["git", "-C", self.root, "add", "."], check=False, capture_output=True)

    def change(self):
        """Change some of it: content, modes, what is there."""
        for name in self.draw.sample(self.files, min(3, len(self.files))):
            path = os.path.join(self.root, name)
            what = self.draw.choice(("content", "mode", "gone"))
            if what == "content":
                self._write(path)
            elif what == "mode":
                os.chmod(path, os.stat(path).st_mode ^ 0o111)
            else:
                os.unlink(path)
                self.files.remove(name)
        self._file()

    def _init(self, path):
        subprocess.run(["git", "init", "-q", path], check=True, capture_output=True)

    def _name(self, folder):
        while True:
            name = b"".join(self.draw.choices(PIECES, k=self.draw.choice((1, 2, 3, 3, 40))))
            path = os.path.join(folder, name)
            if not name.startswith((b".", b"~")) and not os.path.lexists(os.path.join(self.root, path)):
                return path

    def _folder(self):
        name = self._name(self.draw.choice(self.folders))
        os.mkdir(os.path.join(self.root, name))
        self.folders.append(name)
        if self.git and self.draw.random() < 0.3:
            path = os.path.join(self.root, name)
            self._init(path)
            if self.draw.random() < 0.7:  # git can add it to the tree as a submodule
                who = ["-c", "user.name=a", "-c", "user.email=a@b"]
                subprocess.run(["git", "-C", path, *who, "commit", "-q", "--allow-empty", "-m", "a"], check=True)

    def _file(self):
        name = self._name(self.draw.choice(self.folders))
        self._write(os.path.join(self.root, name))
        self.files.append(name)

    def _write(self, path):
        with open(path, "wb") as file:
            size = self.draw.choice((0, 1, 100, 70_000))
            if self.draw.random() < 0.1:
                file.truncate(size + 100_000)
            file.seek(self.draw.choice((0, size)))
            file.write(self.draw.randbytes(size))
        os.chmod(path, self.draw.choice((0o644, 0o644, 0o755, 0o600, 0o444)))

    def _link(self):
        name = self._name(self.draw.choice(self.folders))
        above = b"../" * (name.count(b"/") + 1)
        inside = self.draw.choice([*self.files, *filter(None, self.folders)])
        target = self.draw.choice(
            (
                b"../" * name.count(b"/") + inside,
                os.path.join(self.root, inside),
                above + b"outside/file",
                above + b"outside/folder",
                os.path.join(os.path.dirname(self.root), b"outside/file"),
                b"missing",
            )
        )
        os.symlink(target, os.path.join(self.root, name))


def described(root):
    """What a tree is, by name: a link's target, or a file's content and whether it may be executed."""
    found = {}
    for folder, below, files in os.walk(os.fsencode(root)):
        below[:] = [name for name in below if name != b".git"]
        for name in (*below, *files):
            path = os.path.join(folder, name)
            mode = os.lstat(path).st_mode
            if stat.S_ISLNK(mode):
                found[os.path.relpath(path, os.fsencode(root))] = os.readlink(path)
            elif not stat.S_ISDIR(mode):
                with open(path, "rb") as file:
                    found[os.path.relpath(path, os.fsencode(root))] = (file.read(), bool(mode & 0o111))
    return found
