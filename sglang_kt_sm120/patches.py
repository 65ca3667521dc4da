"""What `sglang-kt-sm120 patch` does: local patches, on a checkout or an installed copy of sglang.

Which patch fits is read from the tree: git's hash of a file says whether it is as released, or as
the patch leaves it. A version is never asked (sglang-kt reports 0.0.0.dev0). Standard library only;
`git apply` does the work, or `patch` where git is missing.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
#: In the wheel, and in a checkout of this project.
FOLDERS = (HERE / "patches_local", HERE.parent / "patches" / "local")
BACKUP = ".before-sglang-kt-sm120"
#: Names SM120 in every release that chooses for it, and in none before (all 49 were looked at).
DISPATCH, KNOWS = "python/sglang/srt/layers/quantization/fp8_utils.py", re.compile("(?i)sm_?120")
NOT_NEEDED = (
    "It needs none: its own choice of FP8 kernels knows SM120, as in sglang-kt from 0.6.2 and "
    "sglang from 0.5.10 on."
)
NO_PATCH = (
    "No local patch fits, and it needs one: it is a release that has none, or was changed. Update "
    "it (sglang-kt from 0.6.2 and sglang from 0.5.10 on need none), reinstall it if it was "
    "changed, or leave it as it is: the plugin serves without a patch."
)
FIELDS = ("Target", "Base", "Files", "Why", "Verified", "Upstream", "Drop when")


class PatchError(RuntimeError):
    """Nothing was changed; the message says why and what to do."""


@dataclass(frozen=True)
class Patch:
    """One patch file: its header and, per file, git's hash before and after."""

    path: Path
    header: dict[str, str]
    files: dict[str, tuple[str, str]]

    @property
    def name(self) -> str:
        return f"{self.path.parent.name}/{self.path.name}"

    @property
    def diff(self) -> str:
        text = self.path.read_text()
        return text[text.index("diff --git ") :]


@dataclass(frozen=True)
class Tree:
    """A place that holds sglang: patches' `python/sglang` is `root/prefix/sglang`."""

    root: Path
    prefix: str  # "python" in a checkout, "" in site-packages

    @property
    def strip(self) -> int:
        return 1 if self.prefix else 2

    def file(self, name: str) -> Path:
        """Return where a file of a patch lies, for example `python/sglang/version.py`."""
        return self.root / (name if self.prefix else name.removeprefix("python/"))


@dataclass(frozen=True)
class Server:
    """A running process that uses a tree."""

    pid: int
    command: str


@dataclass(frozen=True)
class Plan:
    """What is the case in a tree.

    `state` is "fits", "fits roughly", "applied", "not needed" (this sglang's own choice knows
    SM120), or "none" (it does not, and no patch fits).
    """

    tree: Tree
    state: str
    patch: Patch | None
    record: str | None  # the dist-info folder whose RECORD lists the patched file
    servers: tuple[Server, ...]

    def lines(self) -> list[str]:
        """Return what a person should read, before the diff."""
        lines = [f"sglang in {self.tree.file('python/sglang').resolve()}"]
        if self.patch is None:
            return [*lines, NOT_NEEDED if self.state == "not needed" else NO_PATCH]
        what = {
            "fits": "fits: the file is as released",
            "fits roughly": "applies, although the file is not as released",
            "applied": "is applied",
        }
        lines += [f"{self.patch.name} {what[self.state]}", self.patch.header["Why"]]
        if self.record:
            done = "no longer matches" if self.state == "applied" else "will no longer match"
            lines.append(f"pip's RECORD in {self.record} {done}; reinstalling undoes the patch.")
        lines += [f"in use by {server.pid}: {server.command}" for server in self.servers]
        return lines


# ---------------------------------------------------------------- reading


def available() -> list[Patch]:
    """Return the local patches that this copy of the package brings.

    Raises:
        PatchError: This copy brings none, which no wheel and no checkout does.
    """
    folder = next((folder for folder in FOLDERS if folder.is_dir()), None)
    if folder is None:
        raise PatchError("this installation brings no patches: reinstall sglang-kt-sm120")
    return [read(path) for path in sorted(folder.glob("*/*.patch"))]


def read(path: Path) -> Patch:
    """Read a patch file: `Name: text` lines, continued by indented ones, then git's diff."""
    head, _, body = path.read_text().partition("\ndiff --git ")
    header: dict[str, str] = {}
    name = ""
    for line in head.splitlines():
        if line.startswith(" ") and name:
            header[name] += f" {line.strip()}"
        elif ": " in line:
            name, _, value = line.partition(": ")
            header[name] = value
    files = {}
    for part in f"diff --git {body}".split("\ndiff --git "):
        target = re.search(r"^\+\+\+ b/(.+)$", part, re.MULTILINE)
        hashes = re.search(r"^index ([0-9a-f]{40})\.\.([0-9a-f]{40})", part, re.MULTILINE)
        if target and hashes:
            files[target[1]] = (hashes[1], hashes[2])
    return Patch(path, header, files)


def find(path: Path) -> Tree:
    """Return the tree in `path`: a checkout, a site-packages folder or the `sglang` folder itself.

    Raises:
        PatchError: No sglang there.
    """
    path = path.resolve()
    for root in (path, *path.parents[:2]):
        for prefix in ("python", ""):
            package = root / prefix / "sglang"
            if (package / "srt").is_dir() and path in (root, root / prefix, package):
                # The `python` folder of a checkout is not an installation.
                checkout = not prefix and root.name == "python"
                return Tree(root.parent, "python") if checkout else Tree(root, prefix)
    raise PatchError(f"no sglang in {path}: name a checkout, site-packages or its sglang folder")


def installed() -> Path:
    """Return the folder of the sglang that this environment would import."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise PatchError("sglang is not installed here; name the place with PATH")
    return Path(next(iter(spec.submodule_search_locations)))


def plan(path: Path) -> Plan:
    """Look at a tree without changing anything."""
    tree = find(path)
    state, fitting = _match(tree, available())
    if not fitting:
        state = "not needed" if _knows_sm120(tree) else state
        return Plan(tree, state, None, None, tuple(servers(tree)))
    record = _record(tree, fitting[0])
    # Releases that share a file share the patch; the one that is installed is the one to name.
    installed = (record or "").removesuffix(".dist-info").replace("_", "-")
    patch = next((p for p in fitting if p.path.parent.name == installed), fitting[0])
    return Plan(tree, state, patch, record, tuple(servers(tree)))


def _match(tree: Tree, patches: list[Patch]) -> tuple[str, list[Patch]]:
    """Return the tree's state and the patches that it is in that state for."""
    for state, which in (("fits", 0), ("applied", 1)):
        fitting = [
            patch
            for patch in patches
            if patch.files
            and all(_hash(tree.file(name)) == hashes[which] for name, hashes in patch.files.items())
        ]
        if fitting:
            return state, fitting
    for state, reverse in (("applied", True), ("fits roughly", False)):
        fitting = [p for p in patches if _tool(tree, p, reverse=reverse, dry=True) is None]
        if fitting:
            return state, fitting
    return "none", []


def _knows_sm120(tree: Tree) -> bool:
    try:
        return KNOWS.search(tree.file(DISPATCH).read_text(errors="replace")) is not None
    except OSError:
        return False


def _hash(path: Path) -> str | None:
    """Return git's name for a file's content."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _record(tree: Tree, patch: Patch) -> str | None:
    if tree.prefix:
        return None
    names = {name.removeprefix("python/") for name in patch.files}
    for record in tree.root.glob("*.dist-info/RECORD"):
        if any(line.partition(",")[0] in names for line in record.read_text().splitlines()):
            return record.parent.name
    return None


# ---------------------------------------------------------------- running servers


def servers(tree: Tree, proc: Path = Path("/proc")) -> list[Server]:
    """Return running sglang processes that use `tree`, or may: what cannot be read counts."""
    found = []
    for folder in proc.glob("[0-9]*"):
        try:
            command = (
                (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            )
        except OSError:
            continue  # it has ended
        program = command.partition(" ")[0].rpartition("/")[2]
        if int(folder.name) == os.getpid() or not program.startswith(("python", "sglang")):
            continue
        if "sglang" in command.replace("sglang-kt-sm120", "") and _uses(folder, command, tree):
            found.append(Server(int(folder.name), command.strip()))
    return sorted(found, key=lambda server: server.pid)


def _uses(folder: Path, command: str, tree: Tree) -> bool:
    """True where a process's memory, folder, command or environment points into `tree`."""
    root = str(tree.root)
    try:
        maps = (folder / "maps").read_text(errors="replace")
        environment = (folder / "environ").read_bytes().decode(errors="replace")
        here = os.readlink(folder / "cwd")
    except OSError:
        return folder.exists()
    if any(f"{root}/" in f"{text}/" for text in (maps, command, here)) or root in environment:
        return True
    # An editable install: the environment that the process maps libraries from names the checkout.
    for site in {found[0] for found in re.finditer(r"/\S*?/site-packages(?=/)", maps)}:
        for pth in Path(site).glob("*.pth"):
            if root in pth.read_text(errors="replace"):
                return True
        if any(root in file.read_text() for file in Path(site).glob("__editable__*sglang*.py")):
            return True
    return False


# ---------------------------------------------------------------- changing


def apply(path: Path) -> list[str]:
    """Apply the patch that fits, keeping each file's original beside it; return what was done.

    Raises:
        PatchError: Nothing fits, it is applied already, or a server runs from the tree.
    """
    now = plan(path)
    if now.patch is None:
        why = "needs no patch" if now.state == "not needed" else "is fitted by no local patch"
        raise PatchError(f"{now.tree.root} {why}: there is nothing to apply")
    if now.state == "applied":
        raise PatchError(f"{now.patch.name} is applied already; --revert takes it back")
    _refuse_in_use(now)
    done = []
    for name in now.patch.files:
        file = now.tree.file(name)
        backup = file.with_name(file.name + BACKUP)
        if not backup.exists():
            shutil.copy2(file, backup)
        done.append(f"kept {backup}")
    _change(now.tree, now.patch, reverse=False)
    done.insert(0, f"applied {now.patch.name}")
    if now.record:
        done.append(f"pip's RECORD in {now.record} no longer matches; reinstalling undoes it.")
    return done


def revert(path: Path) -> list[str]:
    """Take the patch back and remove the backups that equal the result; return what was done.

    Raises:
        PatchError: None is applied, the file was changed since, or a server runs from the tree.
    """
    now = plan(path)
    if now.patch is None or now.state != "applied":
        raise PatchError(f"no patch is applied to {now.tree.root}: there is nothing to revert")
    _refuse_in_use(now)
    _change(now.tree, now.patch, reverse=True)
    done = [f"reverted {now.patch.name}"]
    for name in now.patch.files:
        file = now.tree.file(name)
        backup = file.with_name(file.name + BACKUP)
        if backup.exists() and backup.read_bytes() == file.read_bytes():
            backup.unlink()
        elif backup.exists():
            done.append(f"{backup} stays: it is not what the file is now")
    return done


def _refuse_in_use(now: Plan) -> None:
    if now.servers:
        using = "\n".join(f"  {server.pid}: {server.command}" for server in now.servers)
        raise PatchError(f"a server runs from {now.tree.root}, or may; stop it first:\n{using}")


def _change(tree: Tree, patch: Patch, reverse: bool) -> None:
    problem = _tool(tree, patch, reverse, dry=True) or _tool(tree, patch, reverse, dry=False)
    if problem is not None:
        raise PatchError(f"{patch.name}: {problem}")


def _tool(tree: Tree, patch: Patch, reverse: bool, dry: bool) -> str | None:
    """Run git or patch in `tree`; return what it complained about, or None."""
    if shutil.which("git"):
        command = ["git", "apply", f"-p{tree.strip}", *["-R"] * reverse, *["--check"] * dry]
    elif shutil.which("patch"):
        command = ["patch", "-s", "-f", "-r", "-", f"-p{tree.strip}", "--no-backup-if-mismatch",
                   *["-R"] * reverse, *["--dry-run"] * dry]  # fmt: skip
    else:
        raise PatchError("neither git nor patch is here to apply it with")
    # An enclosing repository would make git read the paths as its own.
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(tree.root.parent)}
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        environment.pop(name, None)
    result = subprocess.run(
        command, cwd=tree.root, env=environment, input=patch.diff, capture_output=True, text=True
    )
    if result.returncode:
        return (result.stderr or result.stdout).strip() or f"{command[0]} failed"
    return None
