// The K likeliest tokens of each depth of the drafter, best first, and their log-probabilities over all the vocabulary.
//
// A block has one row. It finds the largest logit, then adds up the exponentials and, on the same read, collects the
// tokens that can be among the K best. The bound for that is the K-th best of the threads' own best tokens: K distinct
// tokens reach it. It is near the true one unless K comes close to the number of threads, or a few threads hold many
// likely tokens; then more is collected than the buffer holds, and a histogram of the tokens up to the bound, on one
// more read, gives a nearer bound, and so on. The vocabulary is never sorted.
#include "common.cuh"
#include "selection.cuh"

namespace {

using namespace ddtree;

constexpr int THREADS = 1024;
constexpr int BUFFER = 2 * THREADS;   // tokens collected, as many as block_sort takes
constexpr int MERGED_AT_ONCE = 2048;  // target ids whose draft ids are added up at a time
// An exponential of at most 1 as an integer: sums of integers do not depend on the order of the atomics.
constexpr float FIXED_POINT = 1 << 30;

// A token's place in the ranking, lower is better: the logit's bits, descending, above the id's. So keys are distinct.
using Key = unsigned long long;
constexpr Key NO_TOKEN = ~0ull;

__device__ Key key_of(float logit, int token) {
    return static_cast<Key>(~ordered_bits(logit)) << 32 | static_cast<unsigned>(token);
}

__device__ float from_ordered_bits(unsigned bits) {
    return __uint_as_float(bits & 0x80000000u ? bits & 0x7fffffffu : ~bits);
}

__device__ float logit_of(Key key) { return from_ordered_bits(~static_cast<unsigned>(key >> 32)); }

__device__ int token_of(Key key) { return static_cast<int>(key & 0xffffffffu); }

// The marginal of one depth.
template <class T>
struct Marginal {
    Row<T> row;
    const int* draft_to_target;  // [vocab], null where draft ids are target ids
    bool merged;                 // the table is not ascending: two draft ids may be one target id
};

struct MergeSpace {
    unsigned largest[MERGED_AT_ONCE];  // ordered bits of the largest logit of a target id, 0 where it has none
    unsigned long long sum[MERGED_AT_ONCE];
    int partial[THREADS / WARP];
};

constexpr unsigned NOT_A_NUMBER = 0xffffffffu;  // above the ordered bits of infinity

__device__ int block_min(int value, MergeSpace& space) {
    return block_reduce<THREADS>(value, space.partial, [](int a, int b) { return min(a, b); });
}

// Calls visit(logit, id) for the target ids of a draft vocabulary that are above -inf. Draft ids of one target id are
// merged: their probabilities are added. A window moves over the target ids in use, and for each window every draft id
// is looked at.
template <class T, class Visit>
__device__ void visit_target_ids(const Marginal<T>& marginal, MergeSpace& space, Visit visit) {
    constexpr int NONE = 0x7fffffff;
    const int vocab = marginal.row.vocab();
    int first = NONE;
    for (int draft = threadIdx.x; draft < vocab; draft += THREADS) first = min(first, marginal.draft_to_target[draft]);
    first = block_min(first, space);
    while (first != NONE) {
        for (int i = threadIdx.x; i < MERGED_AT_ONCE; i += THREADS) {
            space.largest[i] = 0;
            space.sum[i] = 0;
        }
        __syncthreads();
        int next = NONE;  // first of the next window
        for (int draft = threadIdx.x; draft < vocab; draft += THREADS) {
            const int target = marginal.draft_to_target[draft];
            if (target < first) continue;
            if (target - first < MERGED_AT_ONCE) {
                const float logit = marginal.row.logit(draft);
                atomicMax(&space.largest[target - first], logit == logit ? ordered_bits(logit) : NOT_A_NUMBER);
            } else {
                next = min(next, target);
            }
        }
        __syncthreads();
        for (int draft = threadIdx.x; draft < vocab; draft += THREADS) {
            const int target = marginal.draft_to_target[draft];
            if (target < first || target - first >= MERGED_AT_ONCE) continue;
            const float share = expf(marginal.row.logit(draft) - from_ordered_bits(space.largest[target - first]));
            // Not so where the largest is infinite, or no number: then it says all there is to say.
            if (share <= 1) {
                atomicAdd(&space.sum[target - first], static_cast<unsigned long long>(share * FIXED_POINT));
            }
        }
        __syncthreads();
        for (int i = threadIdx.x; i < MERGED_AT_ONCE; i += THREADS) {
            const float largest = from_ordered_bits(space.largest[i]);
            if (space.largest[i] == 0 || largest == -infinity()) continue;
            visit(largest + logf(static_cast<float>(space.sum[i]) / FIXED_POINT), first + i);
        }
        first = block_min(next, space);
    }
}

// Calls visit(logit, id) for the tokens that are above -inf. A thread's ids ascend.
template <class T, class Visit>
__device__ void visit_tokens(const Marginal<T>& marginal, MergeSpace& space, Visit visit) {
    if (marginal.merged) {
        visit_target_ids(marginal, space, visit);
        return;
    }
    const int* table = marginal.draft_to_target;
    for_each_chunk<THREADS>(marginal.row, [&](int first, const float(&logits)[CHUNK]) {
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) {
            if (!(logits[i] == -infinity())) visit(logits[i], table != nullptr ? table[first + i] : first + i);
        }
    });
}

// Whether the ids of a table do not ascend. A vocabulary cut down to some of the target's ids has them in order.
__device__ bool out_of_order(const int* table, int vocab) {
    bool found = false;
    for (int at = threadIdx.x; at < vocab - 1; at += THREADS) found |= table[at] >= table[at + 1];
    return __syncthreads_or(found);
}

// A bound from `best`, the best token's key, on, that the `wanted`-th best does not exceed, and at most BUFFER tokens.
template <class T>
__device__ Key nearer_bound(const Marginal<T>& marginal, MergeSpace& space, int* histogram, Key best, Key bound,
                            int wanted) {
    constexpr int DIGIT_BITS = 10;
    static_assert(THREADS == 1 << DIGIT_BITS, "a bin a thread");
    Key low = best;
    int below = 0;  // tokens better than `low`
    while (true) {
        const int shift = max(64 - __clzll(static_cast<long long>(bound - low)) - DIGIT_BITS, 0);
        histogram[threadIdx.x] = 0;
        __syncthreads();
        visit_tokens(marginal, space, [&](float logit, int token) {
            const Key key = key_of(logit, token);
            if (key >= low && key <= bound) atomicAdd(&histogram[(key - low) >> shift], 1);
        });
        const Bin bin = bin_of<THREADS>(histogram, wanted - below);
        low += static_cast<Key>(bin.index) << shift;
        bound = min(bound, low + ((1ull << shift) - 1));
        below += bin.before;
        if (below + bin.size <= BUFFER) return bound;
    }
}

template <class T>
__device__ void draft_topk(const Marginal<T>& marginal, int wanted, int* token_ids, float* log_probs) {
    __shared__ Key collected[BUFFER];
    __shared__ MergeSpace space;
    __shared__ int histogram[THREADS];
    __shared__ float partial_sums[THREADS / WARP];
    __shared__ int count;
    const int thread = threadIdx.x;

    float own_largest = -infinity();
    int own_token = 0;
    bool no_distribution = false;
    visit_tokens(marginal, space, [&](float logit, int token) {
        no_distribution |= !(logit < infinity());
        if (logit > own_largest) {  // of equal ones the first: a thread's ids ascend
            own_largest = logit;
            own_token = token;
        }
    });
    collected[thread] = own_largest == -infinity() ? NO_TOKEN : key_of(own_largest, own_token);
    if (thread == 0) count = 0;
    no_distribution = __syncthreads_or(no_distribution);
    block_sort<THREADS>(collected, THREADS, NO_TOKEN);
    const Key best = collected[0];
    Key bound = collected[wanted - 1];
    __syncthreads();
    if (no_distribution || best == NO_TOKEN) {
        if (thread < wanted) {
            token_ids[thread] = -1;
            log_probs[thread] = -infinity();
        }
        return;
    }

    const auto collect = [&](float logit, int token) {
        if (logit < logit_of(bound)) return;  // nearly all of them, and cheaper to tell than by the key
        const Key key = key_of(logit, token);
        if (key > bound) return;
        const int place = atomicAdd(&count, 1);
        if (place < BUFFER) collected[place] = key;
    };
    const float largest = logit_of(best);
    float sum = 0;
    visit_tokens(marginal, space, [&](float logit, int token) {
        sum += expf(logit - largest);
        collect(logit, token);
    });
    sum = block_reduce<THREADS>(sum, partial_sums, [](float a, float b) { return a + b; });
    if (count > BUFFER) {
        bound = nearer_bound(marginal, space, histogram, best, bound, wanted);
        if (thread == 0) count = 0;
        __syncthreads();
        visit_tokens(marginal, space, collect);
        __syncthreads();
    }
    const int found = count;
    block_sort<THREADS>(collected, found, NO_TOKEN);
    if (thread < wanted) {
        const Key key = thread < found ? collected[thread] : NO_TOKEN;
        const float log_prob = key == NO_TOKEN ? -infinity() : (logit_of(key) - largest) - logf(sum);
        token_ids[thread] = log_prob == -infinity() ? -1 : token_of(key);
        log_probs[thread] = log_prob;
    }
}

}  // namespace

// One block of THREADS for each of the B * D rows; K is 1 to 1023. draft_to_target is read if `mapped`.
#define DRAFT_TOPK(T, dtype)                                                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                           \
        ddtree_draft_topk_##dtype(const T* draft_logits, const int* draft_to_target, int /*D*/, int V, int K,       \
                                  int mapped, int* token_ids, float* log_probs) {                                   \
        const long long row = blockIdx.x;                                                                           \
        const int* table = mapped ? draft_to_target : nullptr;                                                      \
        const bool merged = mapped && out_of_order(table, V);                                                       \
        const Marginal<T> marginal{Row<T>(draft_logits + row * V, V), table, merged};                               \
        draft_topk(marginal, K, token_ids + row * K, log_probs + row * K);                                          \
    }

DRAFT_TOPK(float, float32)
DRAFT_TOPK(__half, float16)
DRAFT_TOPK(__nv_bfloat16, bfloat16)
