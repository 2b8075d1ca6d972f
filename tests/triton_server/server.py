"""A real Triton Inference Server, as a process on free ports of the loopback interface."""

import http.client
import os
import signal
import socket
import subprocess
import sysconfig
import time
from pathlib import Path

from triton_server.environment import ENVIRONMENT, SERVER

READY_SECONDS = 120
EXIT_SECONDS = 60


class ServerError(RuntimeError):
    """The server cannot be started here. The message says what is missing."""


class Server:
    """A server on free ports of the loopback interface, from ``start`` to ``stop``, or within a ``with`` block."""

    def __init__(self, repository: Path, log: Path):
        self.repository, self.log = repository, log
        self.http_port, self.grpc_port = free_port(), free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self._backend: int | None = None

    @property
    def http(self) -> str:
        return f"127.0.0.1:{self.http_port}"

    @property
    def grpc(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    def __enter__(self) -> "Server":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server and wait until its models are ready."""
        check_installation()
        command = [
            str(SERVER / "bin" / "tritonserver"),
            f"--model-repository={self.repository}",
            f"--backend-directory={SERVER / 'backends'}",
            "--disable-auto-complete-config",  # or a process is started only to ask the model for its configuration
            "--http-address=127.0.0.1",
            f"--http-port={self.http_port}",
            "--grpc-address=127.0.0.1",
            f"--grpc-port={self.grpc_port}",
            "--allow-metrics=false",
            f"--exit-timeout-secs={EXIT_SECONDS}",
        ]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment())
        deadline = time.monotonic() + READY_SECONDS
        while not self.ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise ServerError(f"the server is not ready after {READY_SECONDS} s or has ended:\n{self.tail()}")
            time.sleep(0.05)
        self._backend = self.backend_pid()

    def ready(self) -> bool:
        connection = http.client.HTTPConnection(self.http, timeout=5)
        try:
            connection.request("GET", "/v2/health/ready")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def terminate(self) -> None:
        """Ask the server to end, as an orchestrator does."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)

    def stop(self) -> int:
        """End the server, and return its exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.terminate()
        try:
            return self.process.wait(EXIT_SECONDS + 10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()
        finally:
            self._remove_orphan()

    def backend_pid(self) -> int:
        """The process in which the model runs."""
        assert self.process is not None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        stubs = [int(pid) for pid in children if "python_backend" in Path(f"/proc/{pid}/cmdline").read_text()]
        (pid,) = stubs
        return pid

    def _remove_orphan(self) -> None:
        """A server that crashed or was killed leaves its backend's process and their shared memory behind."""
        command = Path(f"/proc/{self._backend}/cmdline")
        if self._backend is None or not command.exists():
            return
        arguments = command.read_text().split("\0")
        if str(self.repository / "tensorrt_llm" / "1" / "model.py") in arguments:
            os.kill(self._backend, signal.SIGKILL)
            for argument in arguments:
                if argument.startswith("triton_python_backend_shm_region_"):
                    Path("/dev/shm", argument).unlink(missing_ok=True)

    def tail(self, lines: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def check_installation() -> None:
    """Raise ServerError if the server is not installed, or does not run on this machine."""
    binary, stub = SERVER / "bin" / "tritonserver", SERVER / "backends" / "python" / "triton_python_backend_stub"
    if not stub.exists():
        raise ServerError(
            f"there is no Triton server in {ENVIRONMENT} (run `python tests/triton_server/environment.py`; "
            "needs Linux on x86-64 with glibc 2.35)"
        )
    # A stub that cannot be loaded leaves the server waiting for it without a word.
    for program in (binary, stub):
        result = subprocess.run(["ldd", str(program)], capture_output=True, text=True, env=environment(), check=False)
        missing = [line.strip() for line in (result.stdout + result.stderr).splitlines() if "not found" in line]
        if missing or result.returncode != 0:
            raise ServerError(f"{program.name} does not run here: {'; '.join(missing) or result.stderr.strip()}")


def environment() -> dict[str, str]:
    """The server's environment variables: its backend takes the first python3 on the path, and needs libpython."""
    libraries = [sysconfig.get_config_var("LIBDIR"), os.environ.get("LD_LIBRARY_PATH")]
    return os.environ | {
        "PATH": f"{ENVIRONMENT / 'bin'}:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": ":".join(folder for folder in libraries if folder),
    }


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
