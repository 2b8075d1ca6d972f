// verify_tree: walks from the root of a draft tree along the tokens that the target writes, and adds the bonus token.
// reference.py and sampling.py say what it computes; one block serves one request, grid [batch].
//
// A row is read once if nothing but temperature and token_bitmask shapes the draw: one pass finds the log-softmax's
// denominator, the largest allowed logit and the winner of the coupled draw. Filters need the largest logit first, and
// then read the row again, from L2: no vocabulary is sorted, a cut is found by counting what lies above some values.
//
// Masses, sums of exp((logit - largest) / temperature), are integers in units of 2^-40: exact in any order.
#include "common.cuh"
#include "selection.cuh"

namespace ddtree {

constexpr int THREADS = 512;
constexpr int WARPS = THREADS / WARP;
constexpr float GREEDY_TEMPERATURE = 1e-5f;  // below it, a request is decoded greedily

enum Method { COUPLED = 0, GREEDY = 1, TARGET_ONLY = 2 };

using Mass = unsigned long long;

// ---------------------------------------------------------------------------------------------------------------------
// The row of one node
// ---------------------------------------------------------------------------------------------------------------------

// Which tokens token_bitmask allows after a node.
struct Allowed {
    const int* words;  // null: all

    __device__ __forceinline__ bool has(int token) const { return !words || (words[token / 32] >> token % 32 & 1); }

    __device__ __forceinline__ void apply(float (&logits)[CHUNK], int first) const {
        if (!words) return;
        const int bits = __ldg(words + first / 32) >> first % 32;
#pragma unroll
        for (int i = 0; i < CHUNK; ++i)
            if (!(bits >> i & 1)) logits[i] = -infinity();
    }
};

struct Scan {
    SumExp raw;    // of all tokens, allowed or not
    Best best;     // of the allowed ones
    Drawn drawn;   // likewise
    int no_logit;  // not 0: NaN or +inf is among them
};

template <class T>
__device__ Scan scan_row(const Row<T>& row, const Allowed& allowed, const Draw& draw, bool drawing) {
    __shared__ Scan partial[WARPS];
    Scan scan = {{-infinity(), 0.0f}, {-infinity(), 0}, none_drawn(), 0};
    for_each_chunk<THREADS>(row, [&](int first, float(&logits)[CHUNK]) {
        float largest = -infinity();
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) {
            largest = fmaxf(largest, logits[i]);
            scan.no_logit |= !(logits[i] < infinity());
        }
        scan.raw = extended(scan.raw, logits, largest);
        allowed.apply(logits, first);
#pragma unroll
        for (int i = 0; i < CHUNK; ++i)
            if (logits[i] > scan.best.value) scan.best = {logits[i], first + i};
        if (drawing) scan.drawn = drawn_from(scan.drawn, logits, first, draw);
    });
    return block_reduce<THREADS>(scan, partial, [&](const Scan& a, const Scan& b) {
        return Scan{merged(a.raw, b.raw), better(a.best, b.best), winner(a.drawn, b.drawn, draw),
                    a.no_logit | b.no_logit};
    });
}

// ---------------------------------------------------------------------------------------------------------------------
// Filters
// ---------------------------------------------------------------------------------------------------------------------

// An integer for a logit that orders as the logits do, without the bits that the dtype does not have.
template <class T>
__device__ __forceinline__ unsigned order_of(float logit) {
    return ordered_bits(logit);
}
template <>
__device__ __forceinline__ unsigned order_of<__half>(float logit) {
    return ordered_bits(logit) >> 13;
}
template <>
__device__ __forceinline__ unsigned order_of<__nv_bfloat16>(float logit) {
    return ordered_bits(logit) >> 16;
}

// The tokens that the filters keep: those above the cut, those at the cut up to an id, and of these what min_p leaves.
template <class T>
struct Kept {
    float largest;  // of the allowed logits
    float temperature;
    float min_p;
    unsigned cut;     // as order_of gives it
    int last_at_cut;  // token

    __device__ __forceinline__ float weight(float logit) const { return expf((logit - largest) / temperature); }

    // The weight, or 0 for a token that is not kept.
    __device__ __forceinline__ float kept_weight(float logit, int token) const {
        const unsigned order = order_of<T>(logit);
        if (order < cut || (order == cut && token > last_at_cut)) return 0.0f;
        const float share = weight(logit);
        return min_p > 0.0f && share < min_p ? 0.0f : share;
    }
};

__device__ __forceinline__ Mass mass_of(float weight) { return static_cast<Mass>(weight * 0x1p40f); }

// Calls body(token, logit) for every token of the row, with -inf for those that are not allowed.
template <class T, class Body>
__device__ __forceinline__ void for_each_token(const Row<T>& row, const Allowed& allowed, Body body) {
    for_each_chunk<THREADS>(row, [&](int first, float(&logits)[CHUNK]) {
        allowed.apply(logits, first);
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) body(first + i, logits[i]);
    });
}

// The sum of mass(token, logit) over the row.
template <class T, class MassOf>
__device__ Mass row_mass(const Row<T>& row, const Allowed& allowed, MassOf mass) {
    __shared__ Mass partial[WARPS];
    Mass sum = 0;
    for_each_token(row, allowed, [&](int token, float logit) { sum += mass(token, logit); });
    return block_reduce<THREADS>(sum, partial, [](Mass a, Mass b) { return a + b; });
}

// The first token, in the order of ids, at which the running sum of mass(token, logit) exceeds `threshold`, which has
// to be below the sum over the row. Stops reading there.
template <class T, class MassOf>
__device__ int token_past(const Row<T>& row, const Allowed& allowed, Mass threshold, MassOf mass) {
    __shared__ Mass warp_mass[WARPS];
    __shared__ int found;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    Mass before_step = 0;
    for (int start = 0; before_step <= threshold && start < row.chunks(); start += THREADS) {
        const int at = start + threadIdx.x;
        float logits[CHUNK];
        Mass own = 0;
        if (at < row.chunks()) {
            row.read(at, logits);
            allowed.apply(logits, at * CHUNK);
#pragma unroll
            for (int i = 0; i < CHUNK; ++i) own += mass(at * CHUNK + i, logits[i]);
        }
        Mass up_to = own;  // of this warp's lanes up to this one
#pragma unroll
        for (int lanes = 1; lanes < WARP; lanes *= 2) {
            const Mass lower = __shfl_up_sync(ALL_LANES, up_to, lanes);
            if (lane >= lanes) up_to += lower;
        }
        if (lane == WARP - 1) warp_mass[warp] = up_to;
        __syncthreads();
        Mass running = before_step + up_to - own;
        for (int lower = 0; lower < WARPS; ++lower) {
            if (lower < warp) running += warp_mass[lower];
            before_step += warp_mass[lower];
        }
        if (running <= threshold && threshold < running + own) {
            bool past = false;
#pragma unroll
            for (int i = 0; i < CHUNK; ++i) {
                running += mass(at * CHUNK + i, logits[i]);
                if (!past && running > threshold) found = at * CHUNK + i;
                past = running > threshold;
            }
        }
        __syncthreads();
    }
    return found;
}

struct Tokens {
    Mass mass;
    unsigned count;
};

__device__ __forceinline__ Tokens operator+(Tokens a, Tokens b) { return {a.mass + b.mass, a.count + b.count}; }

constexpr int PIVOTS_LOG2 = 3;
constexpr int PIVOTS = 1 << PIVOTS_LOG2;

// The tokens at or above each pivot.
struct Tally {
    Mass mass[PIVOTS];
    unsigned count[PIVOTS];

    __device__ __forceinline__ Tokens from(int pivot) const { return {mass[pivot], count[pivot]}; }
};

// A value that logits have, the tokens of at least this value, and those of more.
struct Level {
    unsigned order;
    Tokens from;
    Tokens above;

    __device__ __forceinline__ unsigned count() const { return from.count - above.count; }
    __device__ __forceinline__ Mass token_mass() const { return (from.mass - above.mass) / count(); }  // equal: exact
};

// The highest level at which reached(tokens from it, tokens from `lowest`) holds; if it holds nowhere, `lowest` with
// nothing above it. Each pass over the row tells how much lies at or above eight pivots.
template <class T, class Reached>
__device__ Level find_level(const Row<T>& row, const Allowed& allowed, const Kept<T>& kept, unsigned lowest,
                            Reached reached) {
    __shared__ Tally partial[WARPS];
    unsigned start = lowest;                          // reached
    unsigned end = order_of<T>(kept.largest) + 1;     // not reached, and what is from here on is `above`
    Tokens from = {0, 0}, above = {0, 0}, all = {0, 0};
    do {
        const int bits = end - start > 1 ? 32 - __clz(static_cast<int>(end - start - 1)) : 0;
        const int shift = bits > PIVOTS_LOG2 ? bits - PIVOTS_LOG2 : 0;  // pivots are start + (i << shift)
        Tally tally;
#pragma unroll
        for (int i = 0; i < PIVOTS; ++i) tally.mass[i] = tally.count[i] = 0;
        for_each_token(row, allowed, [&](int, float logit) {
            const unsigned order = order_of<T>(logit);
            if (order < start || order >= end) return;
            const Mass mass = mass_of(kept.weight(logit));
            const unsigned highest = (order - start) >> shift;
#pragma unroll
            for (unsigned i = 0; i < PIVOTS; ++i)
                if (i <= highest) {
                    tally.mass[i] += mass;
                    ++tally.count[i];
                }
        });
        tally = block_reduce<THREADS>(tally, partial, [](const Tally& a, const Tally& b) {
            Tally sum;
#pragma unroll
            for (int i = 0; i < PIVOTS; ++i) {
                sum.mass[i] = a.mass[i] + b.mass[i];
                sum.count[i] = a.count[i] + b.count[i];
            }
            return sum;
        });
        const Tokens beyond = above;
        from = tally.from(0) + beyond;
        if (start == lowest && beyond.count == 0) {
            all = from;
            if (!reached(all, all)) return {lowest, all, {0, 0}};
        }
        const unsigned base = start;
#pragma unroll
        for (int i = 1; i < PIVOTS; ++i) {
            const unsigned offset = static_cast<unsigned>(i) << shift;
            if (offset >= end - base) continue;  // also what follows the first pivot that is not reached
            const Tokens here = tally.from(i) + beyond;
            if (reached(here, all)) {
                start = base + offset;
                from = here;
            } else {
                end = base + offset;
                above = here;
            }
        }
    } while (end - start > 1);
    return {start, from, above};
}

// Sets the cut: top_k, then top_p of the mass that this leaves.
template <class T>
__device__ void find_cut(const Row<T>& row, const Allowed& allowed, int top_k, float top_p, Kept<T>& kept) {
    constexpr float NO_WEIGHT = 105.0f;  // exp(-105) is 0 in float32
    constexpr float LOWEST_FINITE = -0x1.fffffep127f;
    constexpr double ROUNDING = 1e-6;  // a mass that equals top_p but for rounding has reached it
    const bool by_count = 0 < top_k && top_k < row.vocab(), by_mass = top_p < 1.0f;
    if (!by_count && !by_mass) return;

    unsigned lowest = order_of<T>(fmaxf(kept.largest - NO_WEIGHT * kept.temperature, LOWEST_FINITE));
    Level level;
    unsigned wanted = 0;  // of the tokens at the level
    Mass mass = 0;    // that is kept
    if (by_count) {
        const unsigned count = top_k;
        level = find_level(row, allowed, kept, lowest, [&](Tokens from, Tokens) { return from.count >= count; });
        wanted = min(count - level.above.count, level.count());
        mass = wanted == level.count() ? level.from.mass : level.above.mass + wanted * level.token_mass();
        lowest = level.order;
    }
    if (by_mass) {
        double target = 0;
        const Level crossing = find_level(row, allowed, kept, lowest, [&](Tokens from, Tokens all) {
            target = top_p * static_cast<double>(by_count ? mass : all.mass) * (1 - ROUNDING);
            return static_cast<double>(from.mass) >= target;
        });
        const unsigned most = by_count && crossing.order == level.order ? wanted : crossing.count();
        const double missing = target - static_cast<double>(crossing.above.mass);
        const double tokens = ceil(missing / static_cast<double>(crossing.token_mass()));
        wanted = tokens < 1 ? 1 : tokens < static_cast<double>(most) ? static_cast<unsigned>(tokens) : most;
        level = crossing;
    }
    kept.cut = level.order;
    if (wanted < level.count())
        kept.last_at_cut = token_past(row, allowed, wanted - 1, [&](int, float logit) -> Mass {
            return order_of<T>(logit) == level.order;
        });
}

// ---------------------------------------------------------------------------------------------------------------------
// Draws from a filtered row
// ---------------------------------------------------------------------------------------------------------------------

template <class T>
__device__ Drawn filtered_draw(const Row<T>& row, const Allowed& allowed, const Kept<T>& kept, const Draw& draw) {
    __shared__ Drawn partial[WARPS];
    Drawn drawn = none_drawn();
    for_each_chunk<THREADS>(row, [&](int first, float(&logits)[CHUNK]) {
        allowed.apply(logits, first);
#pragma unroll
        for (int i = 0; i < CHUNK; ++i)
            if (!(kept.kept_weight(logits[i], first + i) > 0.0f)) logits[i] = -infinity();
        drawn = drawn_from(drawn, logits, first, draw);
    });
    return block_reduce<THREADS>(drawn, partial, [&](const Drawn& a, const Drawn& b) { return winner(a, b, draw); });
}

// One slot's tree, as verify_tree walks it. Nodes from `count` on are padding, whatever they hold.
struct Nodes {
    const int* token_ids;     // [N]
    const int* next_token;    // [N]
    const int* next_sibling;  // [N]
    int count;

    __device__ __forceinline__ bool has(int node) const { return 0 <= node && node < count; }

    // Calls body(child, token) in sibling order until it returns true.
    template <class Body>
    __device__ __forceinline__ void for_each_child(int node, Body body) const {
        int child = next_token[node];
        for (int most = count; most > 0 && has(child); --most) {  // links that form a ring end too
            if (body(child, token_ids[child])) return;
            child = next_sibling[child];
        }
    }

    __device__ __forceinline__ int child_with(int node, int token) const {
        int found = -1;
        for_each_child(node, [&](int child, int its_token) {
            if (its_token == token) found = child;
            return found >= 0;
        });
        return found;
    }
};

struct Step {
    int token;
    int child;  // -1: none, the walk ends
};

// SGLang's tree_speculative_sampling_target_only at one node, but a token of probability 0 is never accepted. Where no
// child is accepted, the token is drawn from what the children leave. `node` is -1 where children are not looked for.
template <class T>
__device__ Step target_only_draw(const Row<T>& row, const Allowed& allowed, const Kept<T>& kept, const Nodes& nodes,
                                 int node, float coin, float final_coin, const float* thresholds) {
    __shared__ int rejected[MAX_NODES];
    constexpr float LOWEST_COIN = 0x1p-33f, HIGHEST_COIN = 1.0f - 0x1p-24f;
    coin = fminf(fmaxf(coin, LOWEST_COIN), HIGHEST_COIN);
    final_coin = fminf(fmaxf(final_coin, LOWEST_COIN), HIGHEST_COIN);
    const double threshold_single = thresholds[0];
    const double threshold_acc = fmax(static_cast<double>(thresholds[1]), 1e-9);

    const auto mass = [&](int token, float logit) { return mass_of(kept.kept_weight(logit, token)); };
    const double total = static_cast<double>(row_mass(row, allowed, mass));
    Step step = {-1, -1};
    Mass cumulative = 0;
    int rejected_count = 0;
    if (node >= 0)
        nodes.for_each_child(node, [&](int child, int token) {  // all threads do the same
            if (token < 0 || token >= row.vocab()) return false;
            const float weight = allowed.has(token) ? kept.kept_weight(row.logit(token), token) : 0.0f;
            cumulative += mass_of(weight);
            const bool reached = coin <= static_cast<double>(cumulative) / total / threshold_acc ||
                                 static_cast<double>(mass_of(weight)) / total >= threshold_single;
            if (weight > 0.0f && reached) {
                step = {token, child};
                return true;
            }
            if (rejected_count == MAX_NODES) return true;  // a tree wider than there may be
            if (threadIdx.x == 0) rejected[rejected_count] = token;
            ++rejected_count;
            return false;
        });
    if (step.child >= 0) return step;

    block_sort<THREADS>(rejected, rejected_count, 0x7fffffff);
    const auto mass_left = [&](int token, float logit) -> Mass {
        int low = 0, high = rejected_count;  // the first that is not below the token is in here
        while (low < high) {
            const int middle = (low + high) / 2;
            if (rejected[middle] < token) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        return low < rejected_count && rejected[low] == token ? 0 : mass(token, logit);
    };
    // Not 0: children that hold all the mass reach the largest coin.
    const Mass left = row_mass(row, allowed, mass_left);
    step.token = token_past(row, allowed, static_cast<Mass>(final_coin * static_cast<double>(left)), mass_left);
    return step;
}

// ---------------------------------------------------------------------------------------------------------------------
// The walk
// ---------------------------------------------------------------------------------------------------------------------

template <class T>
__device__ void verify_tree(const T* logits, const int* token_ids, const int* next_token, const int* next_sibling,
                            const int* node_count, const long long* root_positions, const float* temperature,
                            const int* top_k, const float* top_p, const float* min_p, const long long* seed,
                            const int* token_bitmask, const float* coins, const float* final_coin,
                            const float* thresholds, int N, int V, int D, int M, int C, int F, int method,
                            int* accepted_nodes, int* accepted_count, int* output_ids, float* logprobs, int* status) {
    const int slot = blockIdx.x;
    const long long first_node = static_cast<long long>(slot) * N;
    const int outputs = D + 1, first_output = slot * outputs;
    const Nodes nodes = {token_ids + first_node, next_token + first_node, next_sibling + first_node,
                         min(node_count[slot], N)};
    const float heat = temperature[slot];
    const bool greedy = method == GREEDY || !(heat >= GREEDY_TEMPERATURE);
    const float share = min_p[slot];
    const bool filtered = (0 < top_k[slot] && top_k[slot] < V) || top_p[slot] < 1.0f || share > 0.0f;
    Draw draw = {1.0f / heat, static_cast<unsigned>(seed[slot]), static_cast<unsigned>(seed[slot] >> 32), 0};

    int node = 0, emitted = 0, failure = STATUS_OK;
    while (node >= 0 && emitted < outputs) {
        const Row<T> row(logits + (first_node + node) * V, V);
        const Allowed allowed = {M > 0 ? token_bitmask + (first_node + node) * M : nullptr};
        draw.position = static_cast<unsigned>(root_positions[slot] + emitted + 1);
        const bool last = emitted == D;

        const Scan scan = scan_row(row, allowed, draw, !greedy && method == COUPLED && !filtered);
        if (scan.no_logit || scan.raw.largest == -infinity()) {
            failure = STATUS_NO_DISTRIBUTION;
            break;
        }
        if (scan.best.value == -infinity() || (!greedy && share > 1.0f)) {
            failure = STATUS_NOTHING_LEFT;
            break;
        }

        Step step = {-1, -1};
        float logit;
        if (greedy) {
            step.token = scan.best.token;
            logit = scan.best.value;
        } else if (method == COUPLED && !filtered) {
            step.token = scan.drawn.token;
            logit = scan.drawn.logit;
        } else {
            Kept<T> kept = {scan.best.value, heat, share, 0, V};
            find_cut(row, allowed, top_k[slot], top_p[slot], kept);
            if (method == COUPLED) {
                const Drawn drawn = filtered_draw(row, allowed, kept, draw);
                step.token = drawn.token;
                logit = drawn.logit;
            } else {
                const Words4 words = philox4x32_10({{0, draw.position, 1, 0}}, draw.key_low, draw.key_high);
                const float coin = C > 0 ? coins[static_cast<long long>(slot) * C + node] : uniform(words.word[0]);
                const float final = F ? final_coin[slot] : uniform(words.word[1]);
                step = target_only_draw(row, allowed, kept, nodes, last ? -1 : node, coin, final, thresholds);
                logit = row.logit(step.token);
            }
        }
        if ((greedy || method == COUPLED) && !last) step.child = nodes.child_with(node, step.token);

        if (threadIdx.x == 0) {
            accepted_nodes[first_output + emitted] = node;
            output_ids[first_output + emitted] = step.token;
            logprobs[first_output + emitted] = logit - scan.raw.largest - logf(scan.raw.sum);
        }
        ++emitted;
        node = step.child;
    }

    if (emitted > 0) failure = STATUS_OK;  // the round ends before a row that fails: the next one begins there
    for (int at = emitted + threadIdx.x; at < outputs; at += THREADS) {
        accepted_nodes[first_output + at] = -1;
        output_ids[first_output + at] = -1;
        logprobs[first_output + at] = 0.0f;
    }
    if (threadIdx.x == 0) {
        accepted_count[slot] = emitted > 0 ? emitted - 1 : 0;
        status[slot] = failure;
    }
}

}  // namespace ddtree

// B requests of N nodes over V tokens; M: words of token_bitmask, 0 without; C: N with coins, 0 without; F: 1 with
// final_coin. max_depth_shape [D] is there for its length, in a TensorRT engine, and is not read.
#define DDTREE_VERIFY_TREE(dtype, T)                                                                                   \
    extern "C" __global__ void __launch_bounds__(ddtree::THREADS) ddtree_verify_tree_##dtype(                          \
        const T* logits,                /* [B, N, V] */                                                                \
        const int* token_ids,           /* [B, N] */                                                                   \
        const int* next_token,          /* [B, N] */                                                                   \
        const int* next_sibling,        /* [B, N] */                                                                   \
        const int* node_count,          /* [B] */                                                                      \
        const long long* root_positions, /* [B] */                                                                     \
        const float* temperature,       /* [B] */                                                                      \
        const int* top_k,               /* [B] */                                                                      \
        const float* top_p,             /* [B] */                                                                      \
        const float* min_p,             /* [B] */                                                                      \
        const long long* seed,          /* [B] */                                                                      \
        const int* token_bitmask,       /* [B, N, M] */                                                                \
        const float* coins,             /* [B, C] */                                                                   \
        const float* final_coin,        /* [B] or nothing */                                                           \
        const float* thresholds,        /* [2] single, acc */                                                          \
        const int* max_depth_shape,     /* [D] */                                                                      \
        int N, int V, int D, int M, int C, int F, int method,                                                          \
        int* accepted_nodes,            /* [B, D+1] */                                                                 \
        int* accepted_count,            /* [B] */                                                                      \
        int* output_ids,                /* [B, D+1] */                                                                 \
        float* logprobs,                /* [B, D+1] */                                                                 \
        int* status) {                  /* [B] */                                                                      \
        ddtree::verify_tree(logits, token_ids, next_token, next_sibling, node_count, root_positions, temperature,      \
                            top_k, top_p, min_p, seed, token_bitmask, coins, final_coin, thresholds, N, V, D, M, C, F, \
                            method, accepted_nodes, accepted_count, output_ids, logprobs, status);                     \
    }

DDTREE_VERIFY_TREE(float32, float)
DDTREE_VERIFY_TREE(float16, __half)
DDTREE_VERIFY_TREE(bfloat16, __nv_bfloat16)
