#!/bin/sh
# install_triton.sh DIRECTORY: the server and the Python backend of PyPI's nvidia-pytriton, put there with pip. What it
# needs of the image is the python3 and the pip that are first on the path, and that Python's shared library.
set -eu
directory=$1
server=$directory/pytriton/tritonserver

python3 -m pip install --no-deps --target "$directory" nvidia-pytriton==0.7.0

# The wheel keeps a stub for each Python; the server looks for the one beside its backend.
version=$(python3 -c 'import sys; print(f"{sys.version_info.major}.{sys.version_info.minor}")')
cp "$server/python_backend_stubs/$version/triton_python_backend_stub" "$server/backends/python/"
chmod 755 "$server/bin/tritonserver" "$server/backends/python/triton_python_backend_stub"

# A stub that cannot be loaded would leave the server waiting for it without a word.
for program in bin/tritonserver backends/python/triton_python_backend_stub; do
    libraries=$(ldd "$server/$program")
    case $libraries in
        *"not found"*)
            echo "install_triton.sh: $program lacks libraries (install them in the image):" >&2
            echo "$libraries" | grep "not found" >&2
            exit 1
            ;;
    esac
done
