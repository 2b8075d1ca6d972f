// Runs unmodified CUDA C++ kernels on a CPU: each CUDA thread is a fiber of one OS thread, blocks run one by one.
//
// A fiber runs until it meets a barrier or a warp collective, or ends; then the scheduler resumes another. So a result
// that needs a missing barrier is wrong in some order of fibers, and `schedule` chooses the order: 0 is ascending
// thread index, any other value seeds a shuffle of each sweep in which fibers are also passed over now and then, so
// that warps drift apart.
//
// Reported as errors: deadlock; a barrier or collective that threads reach at different source lines; a mask that names
// a lane that has exited or is absent, or that does not name its caller; static and dynamic shared memory over 48 KB; a
// write past the dynamic shared memory; an access to unmapped memory; in a traced build, data races (trace.cpp). Not
// seen: memory model effects. Shared memory holds garbage when a block starts.
//
// Arithmetic is IEEE: built with -ffp-contract=off, and fmaf is the correctly rounded one, as on a device. expf, logf
// and log1pf are the C library's, which differ from CUDA's in the last bits.
//
// Not provided: cooperative groups, clusters, mma, asynchronous copies, inline PTX.
//
// This header is the language: qualifiers, and CUDA's built-in variables and functions. cuda_cpu.cpp runs the threads.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <vector_functions.h>
#include <vector_types.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <source_location>
#include <type_traits>

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __forceinline__
#undef __noinline__
#undef __launch_bounds__
#undef __grid_constant__
#define __global__
#define __device__
#define __host__
// In a function thread_local implies static, and `extern thread_local T s[];` is legal: both forms of __shared__
// compile. Nothing else in a kernel's library is thread_local, so the size of its TLS segment is that of its static
// shared memory.
#define __shared__ thread_local
#define __constant__ static const
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __restrict__ __restrict

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
constexpr int warpSize = 32;

namespace cuda_cpu {

using Where = std::source_location;

// Waits for all threads that have not exited; says how many these are, and how many of them with a true predicate.
struct Arrived {
    int threads;
    int holding;
};
Arrived barrier(bool predicate, const Where& where);

// Every lane of the mask gives up to 16 bytes and a predicate, and gets all of them when the last one has arrived.
struct Exchanged {
    const unsigned char (*value)[16];  // [lane]
    unsigned predicate;                // by lane
};
Exchanged exchange(unsigned mask, const void* value, size_t bytes, bool predicate, const Where& where);

int lane();
unsigned lanes_alive();
void let_others_run();
[[noreturn]] void fail_shuffle(unsigned mask, int source, const Where& where);

template <class T>
T shuffle(unsigned mask, T value, int source, const Where& where) {
    static_assert(sizeof(T) <= 16);
    const Exchanged all = exchange(mask, &value, sizeof value, false, where);
    if (!(mask >> source & 1)) fail_shuffle(mask, source, where);
    T result;
    memcpy(&result, all.value[source], sizeof result);
    return result;
}

template <class T, class Combine>
T reduce(unsigned mask, T value, Combine combine, const Where& where) {
    const Exchanged all = exchange(mask, &value, sizeof value, false, where);
    bool first = true;
    T result{};
    for (int lane = 0; lane < 32; ++lane) {
        if (!(mask >> lane & 1)) continue;
        T one;
        memcpy(&one, all.value[lane], sizeof one);
        result = first ? one : combine(result, one);
        first = false;
    }
    return result;
}

}  // namespace cuda_cpu

// ---------------------------------------------------------------------------------------------------------------------
// CUDA's built-in functions
// ---------------------------------------------------------------------------------------------------------------------

#define CUDA_CPU_WHERE cuda_cpu::Where where = cuda_cpu::Where::current()

inline void __syncthreads(CUDA_CPU_WHERE) { cuda_cpu::barrier(false, where); }
inline int __syncthreads_count(int predicate, CUDA_CPU_WHERE) { return cuda_cpu::barrier(predicate, where).holding; }
inline int __syncthreads_or(int predicate, CUDA_CPU_WHERE) { return cuda_cpu::barrier(predicate, where).holding > 0; }
inline int __syncthreads_and(int predicate, CUDA_CPU_WHERE) {
    const auto [threads, holding] = cuda_cpu::barrier(predicate, where);
    return threads == holding;
}

inline void __syncwarp(unsigned mask = ~0u, CUDA_CPU_WHERE) { cuda_cpu::exchange(mask, nullptr, 0, false, where); }
inline unsigned __activemask() { return cuda_cpu::lanes_alive(); }
inline unsigned __ballot_sync(unsigned mask, int predicate, CUDA_CPU_WHERE) {
    return cuda_cpu::exchange(mask, nullptr, 0, predicate, where).predicate;
}
inline int __any_sync(unsigned mask, int predicate, CUDA_CPU_WHERE) {
    return __ballot_sync(mask, predicate, where) != 0;
}
inline int __all_sync(unsigned mask, int predicate, CUDA_CPU_WHERE) {
    return __ballot_sync(mask, predicate, where) == mask;
}

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, CUDA_CPU_WHERE) {
    const int lane = cuda_cpu::lane();
    return cuda_cpu::shuffle(mask, value, (lane & ~(width - 1)) | (source & (width - 1)), where);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, CUDA_CPU_WHERE) {
    const int lane = cuda_cpu::lane(), source = lane - int(delta);
    return cuda_cpu::shuffle(mask, value, source < (lane & ~(width - 1)) ? lane : source, where);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, CUDA_CPU_WHERE) {
    const int lane = cuda_cpu::lane(), source = lane + int(delta);
    return cuda_cpu::shuffle(mask, value, source > (lane | (width - 1)) ? lane : source, where);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, CUDA_CPU_WHERE) {
    const int lane = cuda_cpu::lane(), source = lane ^ bits;
    return cuda_cpu::shuffle(mask, value, source > (lane | (width - 1)) ? lane : source, where);
}
template <class T>
unsigned __match_any_sync(unsigned mask, T value, CUDA_CPU_WHERE) {
    const auto all = cuda_cpu::exchange(mask, &value, sizeof value, false, where);
    unsigned same = 0;
    for (int lane = 0; lane < 32; ++lane)
        if ((mask >> lane & 1) && !memcmp(all.value[lane], &value, sizeof value)) same |= 1u << lane;
    return same;
}
template <class T>
T __reduce_add_sync(unsigned mask, T value, CUDA_CPU_WHERE) {
    return cuda_cpu::reduce(mask, value, [](T a, T b) { return T(a + b); }, where);
}
template <class T>
T __reduce_min_sync(unsigned mask, T value, CUDA_CPU_WHERE) {
    return cuda_cpu::reduce(mask, value, [](T a, T b) { return a < b ? a : b; }, where);
}
template <class T>
T __reduce_max_sync(unsigned mask, T value, CUDA_CPU_WHERE) {
    return cuda_cpu::reduce(mask, value, [](T a, T b) { return a > b ? a : b; }, where);
}
template <class T>
T __reduce_or_sync(unsigned mask, T value, CUDA_CPU_WHERE) {
    return cuda_cpu::reduce(mask, value, [](T a, T b) { return T(a | b); }, where);
}
template <class T>
T __reduce_and_sync(unsigned mask, T value, CUDA_CPU_WHERE) {
    return cuda_cpu::reduce(mask, value, [](T a, T b) { return T(a & b); }, where);
}

// One OS thread runs all fibers and none is interrupted, so a plain read and write is atomic.
#define CUDA_CPU_UNTRACED __attribute__((no_sanitize("thread")))
#define CUDA_CPU_ATOMIC(name, expression)                          \
    template <class T>                                             \
    CUDA_CPU_UNTRACED T name(T* address, std::type_identity_t<T> value) { \
        const T old = *address;                                    \
        *address = T(expression);                                  \
        return old;                                                \
    }
CUDA_CPU_ATOMIC(atomicAdd, old + value)
CUDA_CPU_ATOMIC(atomicSub, old - value)
CUDA_CPU_ATOMIC(atomicMin, value < old ? value : old)
CUDA_CPU_ATOMIC(atomicMax, old < value ? value : old)
CUDA_CPU_ATOMIC(atomicExch, value)
CUDA_CPU_ATOMIC(atomicAnd, old & value)
CUDA_CPU_ATOMIC(atomicOr, old | value)
CUDA_CPU_ATOMIC(atomicXor, old ^ value)
#undef CUDA_CPU_ATOMIC
template <class T>
CUDA_CPU_UNTRACED T atomicCAS(T* address, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
    const T old = *address;
    if (old == expected) *address = value;
    return old;
}

inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __nanosleep(unsigned) { cuda_cpu::let_others_run(); }

template <class T>
T __ldg(const T* address) { return *address; }
template <class T>
T __ldcs(const T* address) { return *address; }
template <class T>
T __ldcg(const T* address) { return *address; }
template <class T>
T __ldca(const T* address) { return *address; }
template <class T>
void __stcs(T* address, std::type_identity_t<T> value) { *address = value; }
template <class T>
void __stcg(T* address, std::type_identity_t<T> value) { *address = value; }

inline int __popc(unsigned x) { return std::popcount(x); }
inline int __popcll(unsigned long long x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(unsigned(x)); }
inline int __clzll(long long x) { return std::countl_zero((unsigned long long)x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
    unsigned reversed = 0;
    for (int bit = 0; bit < 32; ++bit) reversed |= (x >> bit & 1) << (31 - bit);
    return reversed;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return unsigned((uint64_t(high) << 32 | low) >> (shift & 31));
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return unsigned((uint64_t(high) << 32 | low) << (shift & 31) >> 32);
}

inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline long long __double_as_longlong(double x) { return std::bit_cast<long long>(x); }
inline double __longlong_as_double(long long x) { return std::bit_cast<double>(x); }
inline float __uint2float_rn(unsigned x) { return float(x); }
inline float __int2float_rn(int x) { return float(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1 / sqrtf(x); }

using std::max;
using std::min;
