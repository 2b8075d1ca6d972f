// What a block does together to choose and to order: a scan, a sort, and the bin of a histogram with the k-th entry.
// All threads of the block call each of them. THREADS is the size of the block, a multiple of 32.
#pragma once

#include "common.cuh"

namespace ddtree {

// The sum of `value` over the threads before this one, and, in `total`, over all.
template <int THREADS>
__device__ int block_exclusive_scan(int value, int& total) {
    constexpr int WARPS = THREADS / WARP;
    __shared__ int warp_sums[WARPS];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int through = value;  // sum over the warp's lanes up to this one
#pragma unroll
    for (int distance = 1; distance < WARP; distance *= 2) {
        const int before = __shfl_up_sync(ALL_LANES, through, distance);
        if (lane >= distance) through += before;
    }
    if (lane == WARP - 1) warp_sums[warp] = through;
    __syncthreads();
    int warps_through = lane < WARPS ? warp_sums[lane] : 0;  // every warp adds up all of them: no second barrier
#pragma unroll
    for (int distance = 1; distance < WARPS; distance *= 2) {
        const int before = __shfl_up_sync(ALL_LANES, warps_through, distance);
        if (lane >= distance) warps_through += before;
    }
    total = __shfl_sync(ALL_LANES, warps_through, WARPS - 1);
    const int warps_before = __shfl_sync(ALL_LANES, warps_through, warp == 0 ? 0 : warp - 1);
    __syncthreads();  // warp_sums is free again
    return (warp == 0 ? 0 : warps_before) + through - value;
}

// Sorts keys[0 .. count), in shared memory, in ascending order: a bitonic network. count is at most 2 * THREADS, and
// there is room up to the next power of two, which is filled with `last`, a key not below any other.
// Begins and ends with a barrier.
template <int THREADS, class Key>
__device__ void block_sort(Key* keys, int count, Key last) {
    int size = 2;
    while (size < count) size *= 2;
    for (int i = count + threadIdx.x; i < size; i += THREADS) keys[i] = last;
    int previous_stride = 2 * WARP;
    for (int width = 2; width <= size; width *= 2) {
        for (int stride = width / 2; stride > 0; stride /= 2) {
            // With strides up to a warp's lanes, a warp works on 64 keys that are its own.
            if (stride > WARP || previous_stride > WARP) {
                __syncthreads();
            } else {
                __syncwarp();
            }
            previous_stride = stride;
            const int low = 2 * threadIdx.x - (threadIdx.x & (stride - 1));
            if (low >= size) continue;
            const bool ascending = (low & width) == 0;
            const Key first = keys[low], second = keys[low + stride];
            if ((first > second) == ascending) {
                keys[low] = second;
                keys[low + stride] = first;
            }
        }
    }
    __syncthreads();
}

struct Bin {
    int index;
    int before;  // entries in the bins before it
    int size;    // entries in it
};

// The bin that holds the wanted-th entry (from 1) of a histogram of THREADS bins; one of size 0 if there are fewer.
// Begins and ends with a barrier.
template <int THREADS>
__device__ Bin bin_of(const int* histogram, int wanted) {
    __shared__ Bin found;
    __syncthreads();
    if (threadIdx.x == 0) found.size = 0;
    const int size = histogram[threadIdx.x];
    int total;
    const int before = block_exclusive_scan<THREADS>(size, total);
    if (before < wanted && wanted <= before + size) found = {static_cast<int>(threadIdx.x), before, size};
    __syncthreads();
    return found;
}

}  // namespace ddtree
