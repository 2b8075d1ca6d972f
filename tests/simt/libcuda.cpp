// A libcuda.so.1 with the few functions that launch.py reaches through cuda-python: for the bindings' own conversion of
// arguments, which nothing can show but a C function that receives them. A module is the text it is loaded from.
#include <cstdint>
#include <cstring>

namespace {

struct Function {
    char source[64];
    char entry[64];
};

using Launch = int (*)(const char* source, const char* entry, const unsigned* grid_block_shared, void* stream,
                       void** parameters);

Launch on_launch = nullptr;
thread_local void* current_context = nullptr;

}  // namespace

extern "C" {

void stand_in_on_launch(Launch function) { on_launch = function; }

int cuInit(unsigned) { return 0; }

int cuDriverGetVersion(int* version) {
    *version = 13000;
    return 0;
}

int cuDeviceGet(int* device, int ordinal) {
    *device = ordinal;
    return 0;
}

int cuDeviceGetAttribute(int* value, int attribute, int) {
    *value = attribute == 75 ? 9 : attribute == 76 ? 0 : -1;  // compute capability: major, minor
    return 0;
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
    *context = reinterpret_cast<void*>(0xC0 + static_cast<intptr_t>(device));
    return 0;
}

int cuCtxGetCurrent(void** context) {
    *context = current_context;
    return 0;
}

int cuCtxSetCurrent(void* context) {
    current_context = context;
    return 0;
}

int cuCtxGetDevice(int* device) {
    *device = 0;
    return current_context ? 0 : 201;  // CUDA_ERROR_INVALID_CONTEXT
}

int cuModuleLoadData(void** module, const void* image) {
    if (!current_context) return 201;
    *module = strdup(static_cast<const char*>(image));
    return 0;
}

int cuModuleGetFunction(void** function, void* module, const char* name) {
    auto* made = new Function{};
    strncpy(made->source, static_cast<const char*>(module), sizeof made->source - 1);
    strncpy(made->entry, name, sizeof made->entry - 1);
    *function = made;
    return 0;
}

int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared_bytes, void* stream, void** parameters, void** extra) {
    if (!current_context) return 201;
    if (extra) return 1;  // CUDA_ERROR_INVALID_VALUE
    const unsigned sizes[7] = {gx, gy, gz, bx, by, bz, shared_bytes};
    const auto* launched = static_cast<const Function*>(function);
    return on_launch(launched->source, launched->entry, sizes, stream, parameters);
}
}
