// What the kernels share: dtypes, the reader of a row of logits, reductions over a block, Philox and the Gumbel noise.
//
// Results do not depend on the order in which threads run, nor on where a row lies in memory: which thread reads which
// token is fixed, and sums are taken in a fixed order.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace ddtree {

constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xFFFFFFFFu;
constexpr int MAX_NODES = 1024;  // of a tree: the root and a budget of up to 1023

// Of one request, as reference.py sets them.
constexpr int STATUS_OK = 0;
constexpr int STATUS_NO_DISTRIBUTION = 1;  // a visited row holds NaN, +inf or nothing finite
constexpr int STATUS_NOTHING_LEFT = 2;     // no token is left after token_bitmask and filters

__device__ __forceinline__ float infinity() { return __int_as_float(0x7F800000); }

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

// ---------------------------------------------------------------------------------------------------------------------
// dtypes
// ---------------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) { return x; }
template <>
__device__ __forceinline__ __half from_float<__half>(float x) { return __float2half_rn(x); }
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

// A float's bits, mapped so that unsigned integers compare as the floats do; both zeros map to one value. Not for NaN.
__device__ __forceinline__ unsigned ordered_bits(float x) {
    const unsigned bits = __float_as_uint(x + 0.0f);  // -0 + 0 is +0
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// ---------------------------------------------------------------------------------------------------------------------
// Rows of logits
// ---------------------------------------------------------------------------------------------------------------------

constexpr int CHUNK = 8;  // tokens that a thread reads at once: 16 bytes of a 16-bit type, twice 16 of float32

template <class T>
struct alignas(16) Chunk {
    T value[CHUNK];
};

// Reads a row chunk by chunk, each element once, in words of up to 16 bytes. Where the row is not aligned to 16 bytes,
// because the vocabulary is odd, say, the words are narrower, but a chunk holds the same tokens.
template <class T>
class Row {
  public:
    __device__ __forceinline__ Row(const T* logits, int vocab)
        : logits_(logits), vocab_(vocab), misalignment_(reinterpret_cast<unsigned long long>(logits) % 16) {}

    __device__ __forceinline__ int vocab() const { return vocab_; }
    __device__ __forceinline__ int chunks() const { return ceil_div(vocab_, CHUNK); }
    __device__ __forceinline__ float logit(int token) const { return to_float(logits_[token]); }

    // Tokens chunk * CHUNK and following; -inf past the vocabulary.
    __device__ __forceinline__ Chunk<T> chunk(int at) const {
        const T* from = logits_ + static_cast<long long>(at) * CHUNK;
        const int left = vocab_ - at * CHUNK;
        Chunk<T> chunk;
        if (left < CHUNK) {
#pragma unroll
            for (int i = 0; i < CHUNK; ++i) chunk.value[i] = i < left ? from[i] : from_float<T>(-infinity());
        } else if (misalignment_ == 0) {
            read_words<uint4>(from, chunk);
        } else if (misalignment_ % 8 == 0) {
            read_words<uint2>(from, chunk);
        } else if (misalignment_ % 4 == 0) {
            read_words<unsigned>(from, chunk);
        } else {
            read_words<unsigned short>(from, chunk);
        }
        return chunk;
    }

    // The same as float32.
    __device__ __forceinline__ void read(int at, float (&logits)[CHUNK]) const { convert(chunk(at), logits); }
    static __device__ __forceinline__ void convert(const Chunk<T>& chunk, float (&logits)[CHUNK]) {
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) logits[i] = to_float(chunk.value[i]);
    }

  private:
    template <class Word>
    static __device__ __forceinline__ void read_words(const T* from, Chunk<T>& chunk) {
#pragma unroll
        for (int i = 0; i < int(sizeof chunk / sizeof(Word)); ++i)
            reinterpret_cast<Word*>(&chunk)[i] = __ldg(reinterpret_cast<const Word*>(from) + i);
    }

    const T* logits_;
    int vocab_;
    unsigned misalignment_;  // of the row's first byte, from 16
};

// Calls body(first token, logits [CHUNK]) for every chunk of a row, which the block's threads take in turn. The next
// chunk is read before this one is used, to have two reads under way.
template <int THREADS, class T, class Body>
__device__ __forceinline__ void for_each_chunk(const Row<T>& row, Body body) {
    const int chunks = row.chunks();
    int at = threadIdx.x;
    if (at >= chunks) return;
    Chunk<T> next = row.chunk(at);
    while (at < chunks) {
        const Chunk<T> chunk = next;
        if (at + THREADS < chunks) next = row.chunk(at + THREADS);
        float logits[CHUNK];
        Row<T>::convert(chunk, logits);
        body(at * CHUNK, logits);
        at += THREADS;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Reductions over a block
// ---------------------------------------------------------------------------------------------------------------------

template <class T>
__device__ __forceinline__ T shuffle_xor(T value, int lanes) {
    static_assert(sizeof(T) % 4 == 0, "shuffled in words of 4 bytes");
    union Words {
        __device__ Words() {}
        T value;
        unsigned word[sizeof(T) / 4];
    } words;
    words.value = value;
#pragma unroll
    for (int i = 0; i < int(sizeof(T) / 4); ++i) words.word[i] = __shfl_xor_sync(ALL_LANES, words.word[i], lanes);
    return words.value;
}

// combine(a, b) over the values of all threads, given to all of them. In a warp by a butterfly, so combine must be
// symmetric; then over the warps in ascending order. Every thread of the block calls it; `partial` may be used again at
// once.
template <int THREADS, class T, class Combine>
__device__ __forceinline__ T block_reduce(T value, T (&partial)[THREADS / WARP], Combine combine) {
#pragma unroll
    for (int lanes = WARP / 2; lanes > 0; lanes /= 2) value = combine(value, shuffle_xor(value, lanes));
    if (threadIdx.x % WARP == 0) partial[threadIdx.x / WARP] = value;
    __syncthreads();
    value = partial[0];
#pragma unroll 1  // unrolled, all partial values would be loaded ahead, and registers spill
    for (int warp = 1; warp < THREADS / WARP; ++warp) value = combine(value, partial[warp]);
    __syncthreads();
    return value;
}

// The token of the largest value, the lowest id among equals.
struct Best {
    float value;
    int token;
};

__device__ __forceinline__ Best better(Best a, Best b) {
    return b.value > a.value || (b.value == a.value && b.token < a.token) ? b : a;
}

// The softmax's denominator, sum of exp(logit - largest), as it grows.
struct SumExp {
    float largest;
    float sum;
};

__device__ __forceinline__ SumExp merged(SumExp a, SumExp b) {
    const float largest = fmaxf(a.largest, b.largest);
    if (largest == -infinity()) return {largest, 0.0f};
    return {largest, a.sum * expf(a.largest - largest) + b.sum * expf(b.largest - largest)};
}

// With a chunk of logits, of which the largest is given.
__device__ __forceinline__ SumExp extended(SumExp sums, const float (&logits)[CHUNK], float largest) {
    if (largest > sums.largest) {
        sums.sum *= expf(sums.largest - largest);
        sums.largest = largest;
    }
    if (sums.largest == -infinity()) return sums;
    float part[CHUNK];
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) part[i] = expf(logits[i] - sums.largest);
#pragma unroll
    for (int half = CHUNK / 2; half > 0; half /= 2) {
#pragma unroll
        for (int i = 0; i < half; ++i) part[i] += part[i + half];
    }
    sums.sum += part[0];
    return sums;
}

// ---------------------------------------------------------------------------------------------------------------------
// Random numbers, as philox.py defines them
// ---------------------------------------------------------------------------------------------------------------------

struct Words4 {
    unsigned word[4];
};

// Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
__device__ __forceinline__ Words4 philox4x32_10(Words4 counter, unsigned key_low, unsigned key_high) {
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const unsigned high_0 = __umulhi(0xD2511F53u, counter.word[0]), low_0 = 0xD2511F53u * counter.word[0];
        const unsigned high_2 = __umulhi(0xCD9E8D57u, counter.word[2]), low_2 = 0xCD9E8D57u * counter.word[2];
        counter = {{high_2 ^ counter.word[1] ^ key_low, low_2, high_0 ^ counter.word[3] ^ key_high, low_0}};
        key_low += 0x9E3779B9u;
        key_high += 0xBB67AE85u;
    }
    return counter;
}

// In (0, 1): never 0, never 1.
__device__ __forceinline__ float uniform(unsigned word) {
    return fminf((static_cast<float>(word) + 0.5f) * 0x1p-32f, 1.0f - 0x1p-24f);
}

// Gumbel noise. Written so that the small uniforms, which win, keep their full precision.
__device__ __forceinline__ float gumbel(float uniform) { return -logf(-log1pf(-uniform)); }

// ---------------------------------------------------------------------------------------------------------------------
// The coupled draw
// ---------------------------------------------------------------------------------------------------------------------

// What a draw depends on besides the distribution: nothing of the tree, the batch or the budget.
struct Draw {
    float inverse_temperature;
    unsigned key_low, key_high;  // the seed
    unsigned position;           // of the token, in its sequence
};

// A token and its key, logit / temperature + noise. The parts are kept apart: of two large keys the difference would be
// lost in rounding.
struct Drawn {
    float logit;
    float noise;
    int token;  // -1: none yet, logit -inf
};

__device__ __forceinline__ Drawn none_drawn() { return {-infinity(), 0.0f, -1}; }

// How much the key of `a` with this noise is above b's: +inf if b is none, but -inf or NaN if a.logit is -inf.
__device__ __forceinline__ float lead(float logit, float noise, const Drawn& b, const Draw& draw) {
    if (b.token < 0) return logit > -infinity() ? infinity() : -infinity();  // inverse_temperature may be 0
    return fmaf(logit - b.logit, draw.inverse_temperature, noise - b.noise);
}

// The larger key, the lower id among equals.
__device__ __forceinline__ Drawn winner(Drawn a, Drawn b, const Draw& draw) {
    if (a.token < 0) return b;
    if (b.token < 0) return a;
    const float ahead = lead(a.logit, a.noise, b, draw);
    return ahead > 0.0f || (ahead == 0.0f && a.token < b.token) ? a : b;
}

// The winner of what was drawn so far and a chunk; logits of -inf take no part. The noise costs more than reading, so
// it is computed only where it can matter: the words of four tokens if one of them wins with the largest noise, and the
// logarithms if the token wins with the largest noise that its word's leading zeros leave open.
__device__ __forceinline__ Drawn drawn_from(Drawn best, const float (&logits)[CHUNK], int first, const Draw& draw) {
    constexpr float LARGEST_NOISE = 22.9f;   // 33 log 2, of word 0
    constexpr float NOISE_PER_ZERO = 0.6932f;  // a little above log 2: -log(-log1p(-u)) <= -log(u), u >= 2^-(zeros + 1)
#pragma unroll
    for (int group = 0; group < CHUNK; group += 4) {
        float largest = logits[group];
#pragma unroll
        for (int i = 1; i < 4; ++i) largest = fmaxf(largest, logits[group + i]);
        if (!(lead(largest, LARGEST_NOISE, best, draw) > 0.0f)) continue;
        const Words4 counter = {{static_cast<unsigned>(first + group) / 4, draw.position, 0, 0}};
        const Words4 words = philox4x32_10(counter, draw.key_low, draw.key_high);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float logit = logits[group + i];
            const float bound = NOISE_PER_ZERO * static_cast<float>(__clz(static_cast<int>(words.word[i])) + 1);
            if (!(lead(logit, bound, best, draw) > 0.0f)) continue;
            const float noise = gumbel(uniform(words.word[i]));
            if (lead(logit, noise, best, draw) > 0.0f) best = {logit, noise, first + group + i};
        }
    }
    return best;
}

}  // namespace ddtree
