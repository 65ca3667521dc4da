"""The host environments that the end-to-end tests start servers in.

On a machine with hosts packed by `pack.py`:

    python tests/e2e/hosts.py HOSTS.tar.xz OUR.whl FOLDER     # then E2E_HOSTS=FOLDER pytest ...

makes one environment per host: a venv with our wheel installed by pip, so that its start-up hook is
what activates it, and a `.pth` that adds the host's folder and this Python's own packages.
Elsewhere the tests take the environment they run in, if a real sglang is installed in it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from importlib import util
from pathlib import Path

#: Host -> the folders of the archive that make it.
FOLDERS = {
    "kt-0.5.2.post1": ("kt-0.5.2.post1", "transformers-4", "common"),
    "kt-0.6.1": ("kt-0.6.1", "transformers-4", "common"),
    "kt-0.7.2": ("kt-0.7.2", "common"),
    "sglang-0.5.17": ("sglang-0.5.17", "common"),
}


def pythons() -> dict[str, str]:
    """Return host name -> interpreter."""
    made, records = os.environ.get("E2E_HOSTS"), os.environ.get("E2E_RECORDS")
    if records:  # of an earlier run: nothing is started
        return {host: "" for host in FOLDERS if list(Path(records).glob(f"{host}-*.record"))}
    if made:
        return {host: f"{made}/{host}/bin/python" for host in FOLDERS if Path(made, host).is_dir()}
    return {"installed": sys.executable} if util.find_spec("sglang") else {}


def make(archive: Path, wheel: Path, folder: Path) -> None:
    """Unpack the hosts and make one environment for each."""
    sites = folder / "sites"
    sites.mkdir(parents=True)
    subprocess.run(["sh", "-c", f"xz -dc -T0 {archive} | tar -x -C {sites}"], check=True)
    for host, parts in FOLDERS.items():
        if not (sites / host).is_dir():
            continue
        path = folder / host
        venv.create(path, system_site_packages=True, symlinks=True)
        python = path / "bin/python"
        site = path / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
        own = sysconfig.get_paths()["purelib"]  # this Python may itself be a venv's
        lines = [str(sites / part) for part in parts]
        lines.append(f"import site; site.addsitedir({own!r})")
        (site / "e2e_host.pth").write_text("\n".join(lines) + "\n")
        install = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q"]
        install += ["--no-deps", "--no-index", "--no-compile", str(wheel)]
        subprocess.run(install, check=True)


if __name__ == "__main__":
    make(*(Path(argument).resolve() for argument in sys.argv[1:4]))
