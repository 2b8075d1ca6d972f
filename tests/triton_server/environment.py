"""The environment of the Triton server that the tests run, .venv/triton: `python tests/triton_server/environment.py`.

PyPI's nvidia-pytriton holds the server's binary and its Python backend. That backend wants a NumPy below 2 in its
Python, which ignores PYTHONPATH and takes the site-packages of the first python3 on the path: so the environment has
that NumPy, and what else the model needs comes from .venv behind it. Clients are put there, too.
"""

import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ENVIRONMENT = Path(sys.prefix) / "triton"
PACKAGES = Path(sysconfig.get_path("purelib", vars={"base": str(ENVIRONMENT), "platbase": str(ENVIRONMENT)}))
SERVER = PACKAGES / "pytriton" / "tritonserver"
REQUIREMENTS = ("numpy<2", "nvidia-pytriton==0.7.0", "tritonclient==2.73.0", "grpcio>=1.71", "python-rapidjson>=1.17")


def make() -> None:
    """Make the environment anew."""
    shutil.rmtree(ENVIRONMENT, ignore_errors=True)
    venv.create(ENVIRONMENT, with_pip=False, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", str(ENVIRONMENT), "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--no-deps", *REQUIREMENTS], check=True)
    (PACKAGES / "ddtree.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    # The wheel keeps a stub for each Python; the server looks for the one beside its backend.
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = shutil.copy(
        SERVER / "python_backend_stubs" / version / "triton_python_backend_stub", SERVER / "backends/python"
    )
    for program in (Path(stub), SERVER / "bin" / "tritonserver"):
        program.chmod(0o755)


if __name__ == "__main__":
    make()
