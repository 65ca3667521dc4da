"""Pack real sglang-kt hosts, to be carried to a machine with a GPU.

    python tests/e2e/pack.py OUT.tar.xz [HOST ...]     # then tests/e2e/hosts.py unpacks it there

The GPU machine has torch 2.11, Triton and nvcc for Python 3.12; `requirements/` pins the rest.
sglang-kt asks for sgl-kernel 0.3.21, which was built for torch 2.9 (kt-kernel 0.7.2 carries its
SM100 build alone, spread over five wheels); sglang-kernel 0.4.2 is the same library for torch 2.11
and lacks only FP4 and Marlin names, which a stand-in refuses by name. What these tests never reach
(other GPUs' kernels, diffusion models, xgrammar) stays out, so that three hosts fit in 50 MiB.

Without HOST the three sglang-kt are packed. An upstream sglang brings kernels of its own and goes
into an archive of its own.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.e2e.hosts import FOLDERS

LISTS = Path(__file__).resolve().parent / "requirements"
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (35, 34, 31, 28, 27, 26, 24, 17, 12, 5)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]
LEFT_OUT = (
    "flash_ops", "sm100/", "flashmla_ops", "infllm_ops", "/tests/", "/test/", "payload.part",
    "_mscclpp", "/multimodal_gen/", "hadamards.safetensors", "_kt_kernel_ext_avx",
)  # fmt: skip
#: kt-kernel 0.7.2 owns these folders as well; sglang-kernel's are the ones that load here.
NOT_FROM_KT_KERNEL = ("sgl_kernel", "deep_gemm/", "triton_kernels/", "flash_attn_origin/")
STAND_IN = """

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} is not in this build")

    return missing
"""


def distribution(requirement: str) -> str:
    return requirement.partition("==")[0]


def listed(name: str) -> list[str]:
    return (LISTS / f"{name}.txt").read_text().split()


def download(requirements: list[str], wheels: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "-qqq", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    subprocess.run([*command, "-d", str(wheels), *requirements], check=True)


def unpack(wheels: Path, site: Path) -> None:
    for wheel in sorted(wheels.glob("*.whl")):
        drop = ("lib/", "include/")
        if wheel.name.startswith("kt_kernel"):
            drop += NOT_FROM_KT_KERNEL
        with zipfile.ZipFile(wheel) as archive:
            keep = [
                name
                for name in archive.namelist()
                if not name.startswith(drop)
                and ("flashinfer/data" in name or not any(part in name for part in LEFT_OUT))
            ]
            archive.extractall(site, keep)


def stand_in(site: Path) -> None:
    """Add the names that sglang-kernel lacks, and the distribution that old hosts ask for."""
    with open(site / "sgl_kernel" / "__init__.py", "a") as init:
        init.write(STAND_IN)
    info = site / "sgl_kernel-0.3.21.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sgl-kernel\nVersion: 0.3.21\n")
    (info / "RECORD").touch()


def main() -> None:
    out = Path(sys.argv[1]).resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    wanted = sys.argv[2:] or [host for host in FOLDERS if host.startswith("kt-")]
    with tempfile.TemporaryDirectory() as folder:
        names = sorted({name for host in wanted for name in FOLDERS[host]})
        # What each of the hosts brings itself need not lie in a folder that they share.
        own = set.intersection(*({distribution(line) for line in listed(host)} for host in wanted))
        for name in names:
            wheels = Path(folder, "wheels", name)
            wheels.mkdir(parents=True)
            download(
                [line for line in listed(name) if name in wanted or distribution(line) not in own],
                wheels,
            )
            unpack(wheels, Path(folder, name))
        if Path(folder, "common", "sgl_kernel").is_dir():
            stand_in(Path(folder, "common"))
        for name in names:
            if name.startswith("sglang-"):  # upstream imports it whatever is asked of it
                package = Path(folder, name, "xgrammar")
                package.mkdir()
                shutil.copy(LISTS.parent / "stand_in_xgrammar.py", package / "__init__.py")
        shutil.rmtree(Path(folder, "wheels"))
        # -9: a dictionary wide enough to find what two versions of one package share.
        pack = f"tar -C {folder} -cf - {' '.join(names)} | xz -9 > {out}"
        subprocess.run(["sh", "-c", pack], check=True)
    print(f"{out}: {out.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
