// Between cuda_cpu.cpp, which runs the threads, and trace.cpp, which a traced build adds.
#pragma once

#include <cstddef>
#include <cstdint>

// The thread that runs, and how many barriers of its block and its whole warp have been passed.
struct cuda_cpu_position {
    int thread;
    unsigned block;
    unsigned barriers;
    unsigned warp_barriers;
};

extern "C" {
cuda_cpu_position cuda_cpu_here();
[[noreturn]] void cuda_cpu_fail(const char* message);

// At the start of every block. Absent from a build that is not traced.
__attribute__((weak)) void cuda_cpu_trace_shared(const void* start, size_t bytes);
}
