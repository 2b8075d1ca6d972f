// The draft tree: of all prefixes of the product of the depths' marginals the `budget` most probable, as a linked tree.
//
// A block has one request. It goes depth by depth and keeps, in shared memory, the exact answer for the depths so far:
// a prefix never beats its parent, so no descendant of a prefix that is not kept can be in the tree. Probabilities are
// handled as costs, -log p: not negative, so that their bits ascend with them; a child costs what its parent does and
// its token on top.
//
// - The kept nodes stand in pre-order, children in the order of their ranks. That is the order of their rank tuples, by
//   which equal costs are settled. New nodes are leaves, so adding them keeps it, whatever they cost.
// - The tokens of a depth ascend in cost. So those that a parent keeps are its first ones, and a binary search counts
//   those below a given cost.
// - With the parents i of a depth in ascending cost, the pair of parent i and rank r has (i + 1)(r + 1) - 1 others that
//   cost no more. So among the pairs with (i + 1)(r + 1) <= budget are the budget lowest costs. There are 7,251 of them
//   for budget 1,023, whatever the costs are: each thread finds its own once. They give the budget-th lowest cost, not
//   the nodes: a pair that costs the same, but has the lower tuple, need not be one of them.
//
// Per depth: the budget-th lowest cost of the kept nodes and those pairs, by a radix search over its bits; with it, and
// among all that equals it in pre-order, how many children each node keeps; then nodes and children in pre-order again.
#include "common.cuh"
#include "selection.cuh"

namespace {

using namespace ddtree;

constexpr int THREADS = 512;
constexpr int NODES_EACH = MAX_NODES / THREADS;  // a thread
constexpr int PAIRS_EACH = (7251 + THREADS - 1) / THREADS;
constexpr int COSTS_EACH = PAIRS_EACH + NODES_EACH;
constexpr int MAX_DEPTHS = WARP;                 // D: a lane of a warp for each
constexpr int CHAIN = 1;                         // a value of `mode`; 0 is a tree
constexpr unsigned NO_COST = 0x7f800000;         // the bits of infinity: probability 0, or nothing there

// Where a node came from: its depth, the rank of its token at that depth, and its parent's place in pre-order.
struct Origin {
    unsigned packed;

    __device__ static Origin of(int depth, int rank, int parent) {
        return {static_cast<unsigned>(depth << 20 | rank << 10 | parent)};
    }
    __device__ int depth() const { return packed >> 20; }
    __device__ int rank() const { return packed >> 10 & 1023; }
    __device__ int parent() const { return packed & 1023; }
};

// The nodes kept so far in pre-order, the root first.
struct Nodes {
    float cost[MAX_NODES];
    Origin origin[MAX_NODES];
};

// What adding a depth takes.
struct Growth {
    float token_cost[MAX_NODES];     // by rank, ascending
    unsigned level_cost[MAX_NODES];  // bits of the costs of the parents, ascending
    int first[MAX_NODES];            // where a node goes, with its new children behind it
    int histogram[THREADS];
    unsigned largest;
    int level_count;
};

// What numbering and linking the finished tree takes.
struct Links {
    unsigned long long order[MAX_NODES];  // bits of the cost, then the place in pre-order
    int number[MAX_NODES];                // by place in pre-order
    int parent[MAX_NODES];                // by number, as the rest
    int children[MAX_NODES];              // how many
    int first_child[MAX_NODES];           // where they stand in `child`
    int child[MAX_NODES];                 // in the order of their ranks
    float chain_cost[MAX_DEPTHS];         // of the likeliest token of each depth, from the root
};

// The costs below that of `bits` are kept, and of those that equal it the first `ties` in pre-order.
struct Threshold {
    unsigned bits;
    int ties;
};

// The first nodes of the tree, those that stay, and the part of the chain behind them.
struct Chain {
    int kept;    // nodes that stay, root excluded
    int added;   // nodes of the chain behind them
    int depth;   // of the deepest node of the chain that stays
    int number;  // and its number
};

// What a log-probability costs; nothing can be of one that is no number or above 0.
__device__ float cost_of(float log_prob) { return log_prob <= 0 ? 0.0f - log_prob : infinity(); }

// The last i < count of the ascending `first` with first[i] <= value.
__device__ int last_not_above(const int* first, int count, int value) {
    int low = 0, high = count;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (first[middle] <= value) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

// How many of the tokens cost, on top of `parent_cost`, less than `limit`.
__device__ int tokens_below(const float* token_cost, int tokens, float parent_cost, unsigned limit) {
    int low = 0, high = tokens;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (__float_as_uint(parent_cost + token_cost[middle]) < limit) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

// This thread's share of the pairs (parent, rank) with (parent + 1)(rank + 1) <= budget, parent << 16 | rank; their
// number over all threads is returned. Pairs of one parent are spread over neighbouring threads.
__device__ int own_pairs(int budget, int* first, unsigned (&pairs)[PAIRS_EACH]) {
    int of_parent[NODES_EACH], sum = 0, total;
    for (int i = 0; i < NODES_EACH; ++i) {
        of_parent[i] = budget / static_cast<int>(threadIdx.x * NODES_EACH + i + 1);
        sum += of_parent[i];
    }
    int before = block_exclusive_scan<THREADS>(sum, total);
    for (int i = 0; i < NODES_EACH; ++i) {
        first[threadIdx.x * NODES_EACH + i] = before;
        before += of_parent[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < PAIRS_EACH; ++i) {
        const int at = threadIdx.x + i * THREADS;
        if (at >= total) break;
        const int parent = last_not_above(first, budget, at);
        pairs[i] = parent << 16 | (at - first[parent]);
    }
    return total;
}

// The threshold that keeps the `budget` lowest costs of all threads. None is below `lowest`; NO_COST is none.
__device__ Threshold threshold_of(const unsigned (&costs)[COSTS_EACH], unsigned lowest, int budget, Growth& growth) {
    constexpr int DIGIT_BITS = 9;
    static_assert(THREADS == 1 << DIGIT_BITS, "a bin a thread");
    unsigned largest = 0;
#pragma unroll
    for (int i = 0; i < COSTS_EACH; ++i) {
        if (costs[i] < NO_COST) largest = max(largest, costs[i]);
    }
    if (threadIdx.x == 0) growth.largest = 0;
    __syncthreads();
    largest = __reduce_max_sync(ALL_LANES, largest);
    if (threadIdx.x % WARP == 0) atomicMax(&growth.largest, largest);
    __syncthreads();
    unsigned low = lowest, high = growth.largest;
    int wanted = budget;
    while (true) {
        const int shift = max(32 - __clz(high - low) - DIGIT_BITS, 0);
        growth.histogram[threadIdx.x] = 0;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < COSTS_EACH; ++i) {
            if (costs[i] >= low && costs[i] <= high) atomicAdd(&growth.histogram[(costs[i] - low) >> shift], 1);
        }
        const Bin bin = bin_of<THREADS>(growth.histogram, wanted);
        if (bin.size == 0) return {NO_COST, 0};  // there are fewer
        wanted -= bin.before;
        low += static_cast<unsigned>(bin.index) << shift;
        if (shift == 0) return {low, wanted};
        high = min(high, low + ((1u << shift) - 1));
        if (bin.size == wanted) return {high + 1, 0};
    }
}

// Adds the nodes of a depth that belong to the tree, and drops those that they push out. Returns how many nodes there
// are then. The new ones' costs are in growth.level_cost, ascending.
__device__ int add_depth(Nodes& nodes, int count, int depth, int tokens, Threshold threshold, int budget,
                         Growth& growth) {
    bool stays[NODES_EACH], ties[NODES_EACH];
    int below[NODES_EACH], tied[NODES_EACH], sum = 0, total;
#pragma unroll
    for (int i = 0; i < NODES_EACH; ++i) {
        const int place = threadIdx.x * NODES_EACH + i;
        stays[i] = ties[i] = false;
        below[i] = tied[i] = 0;
        if (place >= count) continue;
        const float cost = nodes.cost[place];
        const bool root = place == 0;
        stays[i] = root || __float_as_uint(cost) < threshold.bits;
        ties[i] = !root && __float_as_uint(cost) == threshold.bits;
        if (nodes.origin[place].depth() == depth - 1) {
            below[i] = tokens_below(growth.token_cost, tokens, cost, threshold.bits);
            if (threshold.ties > 0) {
                tied[i] = tokens_below(growth.token_cost, tokens, cost, threshold.bits + 1) - below[i];
            }
        }
        sum += ties[i] + tied[i];
    }
    int ties_left = threshold.ties - block_exclusive_scan<THREADS>(sum, total);
    int with_children[NODES_EACH];
    sum = 0;
#pragma unroll
    for (int i = 0; i < NODES_EACH; ++i) {
        if (ties[i]) stays[i] = ties_left > 0;
        ties_left -= ties[i];
        with_children[i] = stays[i] + below[i] + max(min(ties_left, tied[i]), 0);
        ties_left -= tied[i];
        sum += with_children[i];
    }
    int before = block_exclusive_scan<THREADS>(sum, total);
#pragma unroll
    for (int i = 0; i < NODES_EACH; ++i) {
        growth.first[threadIdx.x * NODES_EACH + i] = before;
        before += with_children[i];
    }
    if (threadIdx.x == 0) growth.level_count = 0;
    __syncthreads();

    total = min(total, budget + 1);  // it is more only for tokens that do not ascend
    float cost[NODES_EACH];
    Origin origin[NODES_EACH];
#pragma unroll
    for (int i = 0; i < NODES_EACH; ++i) {
        const int place = threadIdx.x + i * THREADS;
        bool is_new = false;
        if (place < total) {
            const int from = last_not_above(growth.first, count, place);
            const int rank = place - growth.first[from] - 1;  // -1 is the node itself
            is_new = rank >= 0;
            cost[i] = nodes.cost[from];
            if (is_new) {
                cost[i] += growth.token_cost[rank];
                origin[i] = Origin::of(depth, rank, growth.first[from]);
            } else {
                const Origin old = nodes.origin[from];
                origin[i] = Origin::of(old.depth(), old.rank(), growth.first[old.parent()]);
            }
        }
        const unsigned new_lanes = __ballot_sync(ALL_LANES, is_new);
        int at = 0;
        if (threadIdx.x % WARP == 0 && new_lanes != 0) at = atomicAdd(&growth.level_count, __popc(new_lanes));
        at = __shfl_sync(ALL_LANES, at, 0) + __popc(new_lanes & ((1u << threadIdx.x % WARP) - 1));
        if (is_new) growth.level_cost[at] = __float_as_uint(cost[i]);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < NODES_EACH; ++i) {
        const int place = threadIdx.x + i * THREADS;
        if (place < total) {
            nodes.cost[place] = cost[i];
            nodes.origin[place] = origin[i];
        }
    }
    block_sort<THREADS>(growth.level_cost, growth.level_count, NO_COST);
    return total;
}

// Grows the tree in `nodes` from the first `ranks` candidates of each depth; returns how many nodes it has.
__device__ int grow(Nodes& nodes, const float* log_probs, int depths, int candidates, int ranks, int budget,
                    Growth& growth) {
    unsigned pairs[PAIRS_EACH];
    const int pair_count = own_pairs(budget, growth.first, pairs);
    if (threadIdx.x == 0) {
        nodes.cost[0] = 0;
        nodes.origin[0] = Origin::of(0, 0, 0);
        growth.level_cost[0] = 0;
        growth.level_count = 1;
    }
    float ahead[NODES_EACH];  // log-probabilities of the next depth, read while the one before it is worked on
#pragma unroll
    for (int i = 0; i < NODES_EACH; ++i) {
        const int rank = threadIdx.x + i * THREADS;
        ahead[i] = rank < ranks ? log_probs[rank] : -infinity();
    }
    int count = 1;
    unsigned lowest = 0;
    for (int depth = 1; depth <= depths; ++depth) {
        int tokens = 0;
#pragma unroll
        for (int i = 0; i < NODES_EACH; ++i) {
            const int rank = threadIdx.x + i * THREADS;
            const float cost = cost_of(ahead[i]);
            growth.token_cost[rank] = cost;
            tokens += __syncthreads_count(cost < infinity());
            ahead[i] = depth < depths && rank < ranks ? log_probs[depth * candidates + rank] : -infinity();
        }
        if (tokens == 0) break;
        if (depth == 1) lowest = __float_as_uint(growth.token_cost[0]);

        unsigned costs[COSTS_EACH];
#pragma unroll
        for (int i = 0; i < NODES_EACH; ++i) {
            const int place = threadIdx.x + i * THREADS;
            costs[i] = place > 0 && place < count ? __float_as_uint(nodes.cost[place]) : NO_COST;
        }
#pragma unroll
        for (int i = 0; i < PAIRS_EACH; ++i) {
            costs[NODES_EACH + i] = NO_COST;
            if (static_cast<int>(threadIdx.x) + i * THREADS >= pair_count) continue;
            const int parent = pairs[i] >> 16, rank = pairs[i] & 0xffff;
            if (parent < growth.level_count && rank < tokens) {
                const float parent_cost = __uint_as_float(growth.level_cost[parent]);
                costs[NODES_EACH + i] = __float_as_uint(parent_cost + growth.token_cost[rank]);
            }
        }
        const Threshold threshold = threshold_of(costs, lowest, budget, growth);
        count = add_depth(nodes, count, depth, tokens, threshold, budget, growth);
        if (growth.level_count == 0) break;
    }
    __syncthreads();  // the memory of `growth` is free
    return count;
}

// Makes room behind the best nodes for the chain of likeliest tokens, whole: it takes the place of the last nodes. In
// pre-order the chain's node of depth d, if it is in the tree, is at place d.
__device__ Chain kept_chain(const Nodes& nodes, int count, const float* log_probs, int depths, int candidates,
                            int budget, Links& links) {
    __shared__ Chain chain;
    if (threadIdx.x < WARP) {
        const int lane = threadIdx.x, depth = lane + 1;
        const float step = lane < depths ? cost_of(log_probs[lane * candidates]) : infinity();
        float cost = 0;
        for (int i = 0; i < MAX_DEPTHS; ++i) {
            const float next = __shfl_sync(ALL_LANES, step, i);
            if (i <= lane) cost += next;
        }
        links.chain_cost[lane] = cost;
        const int length = __popc(__ballot_sync(ALL_LANES, cost < infinity()));
        const bool in_tree = depth < count && nodes.origin[depth].depth() == depth;
        const int number = in_tree ? links.number[depth] : count;
        const int have = __popc(__ballot_sync(ALL_LANES, in_tree));
        // The last node that may stay, if it is behind the chain's node of depth `lane`, or that, and before its next.
        const int from = __shfl_up_sync(ALL_LANES, number, 1);
        const int most = have < length ? min(number - 1, budget - length + lane) : count - 1;
        const bool possible = lane <= have && most >= (lane == 0 ? 0 : from);
        const int kept = __reduce_max_sync(ALL_LANES, possible ? most : 0);
        const unsigned stays = __ballot_sync(ALL_LANES, in_tree && number <= kept);
        const int deepest = __popc(stays);
        const int deepest_number = __shfl_sync(ALL_LANES, number, max(deepest - 1, 0));
        if (lane == 0) chain = {kept, length - deepest, deepest, deepest == 0 ? 0 : deepest_number};
    }
    __syncthreads();
    return chain;
}

// Numbers the nodes by ascending cost, ties by pre-order, from 1 on; the root is 0.
__device__ void number_nodes(const Nodes& nodes, int count, Links& links) {
    for (int place = threadIdx.x + 1; place < count; place += THREADS) {
        links.order[place - 1] = static_cast<unsigned long long>(__float_as_uint(nodes.cost[place])) << 32 | place;
    }
    block_sort<THREADS>(links.order, count - 1, ~0ull);
    if (threadIdx.x == 0) links.number[0] = 0;
    for (int number = threadIdx.x + 1; number < count; number += THREADS) {
        links.number[links.order[number - 1] & 1023] = number;
    }
    __syncthreads();
}

}  // namespace

// One block of THREADS a request; budget = N - 1 is at most 1023, D at most 32, K at most the budget.
extern "C" __global__ void __launch_bounds__(THREADS)
    ddtree_build_tree(const int* candidate_ids,   // [B, D, K], best first
                      const float* log_probs,     // [B, D, K], descending; -inf: no candidate
                      const int* root_token_ids,  // [B]
                      int D, int K, int N, int mode, int keep_chain,
                      int* token_ids,  // [B, N], and so are the others of no other shape
                      int* parents, int* depths, float* node_logws,
                      int* node_count,  // [B]
                      int* next_token, int* next_sibling,
                      int* ancestor_mask)  // [B, N, W]
{
    __shared__ Nodes nodes;
    __shared__ union {
        Growth growth;
        Links links;
    } space;
    Links& links = space.links;
    const long long request = blockIdx.x;
    const int budget = N - 1;
    candidate_ids += request * D * K;
    log_probs += request * D * K;
    const int count = grow(nodes, log_probs, D, K, mode == CHAIN ? min(K, 1) : K, budget, space.growth);
    number_nodes(nodes, count, links);
    Chain chain{count - 1, 0, 0, 0};
    if (mode != CHAIN && keep_chain && budget >= D) {
        chain = kept_chain(nodes, count, log_probs, D, K, budget, links);
    }

    int parent[NODES_EACH], rank[NODES_EACH];
    for (int number = threadIdx.x; number < N; number += THREADS) links.children[number] = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < NODES_EACH; ++i) {
        const int number = threadIdx.x + i * THREADS;
        parent[i] = -1;
        if (number >= N) continue;
        int depth = 0, token = 0;
        float cost = infinity();
        if (number == 0) {
            token = root_token_ids[request];
            cost = 0;
        } else if (number <= chain.kept) {
            const int place = links.order[number - 1] & 1023;
            const Origin origin = nodes.origin[place];
            depth = origin.depth();
            rank[i] = origin.rank();
            parent[i] = links.number[origin.parent()];
            cost = nodes.cost[place];
        } else if (number <= chain.kept + chain.added) {
            const int behind = number - chain.kept;
            depth = chain.depth + behind;
            rank[i] = 0;
            parent[i] = behind == 1 ? chain.number : number - 1;
            cost = links.chain_cost[depth - 1];
        }
        if (parent[i] >= 0) {
            token = candidate_ids[(depth - 1) * K + rank[i]];
            atomicAdd(&links.children[parent[i]], 1);
        }
        links.parent[number] = parent[i];
        const long long at = request * N + number;
        token_ids[at] = token;
        parents[at] = parent[i];
        depths[at] = depth;
        node_logws[at] = 0.0f - cost;
    }
    if (threadIdx.x == 0) node_count[request] = 1 + chain.kept + chain.added;
    __syncthreads();

    int children[NODES_EACH], sum = 0, total;
#pragma unroll
    for (int i = 0; i < NODES_EACH; ++i) {
        const int number = threadIdx.x * NODES_EACH + i;
        children[i] = number < N ? links.children[number] : 0;
        sum += children[i];
    }
    int before = block_exclusive_scan<THREADS>(sum, total);
#pragma unroll
    for (int i = 0; i < NODES_EACH; ++i) {
        links.first_child[threadIdx.x * NODES_EACH + i] = before;
        before += children[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < NODES_EACH; ++i) {
        if (parent[i] >= 0) links.child[links.first_child[parent[i]] + rank[i]] = threadIdx.x + i * THREADS;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < NODES_EACH; ++i) {
        const int number = threadIdx.x + i * THREADS;
        if (number >= N) continue;
        const bool last = parent[i] < 0 || rank[i] + 1 == links.children[parent[i]];
        const long long at = request * N + number;
        next_token[at] = links.children[number] > 0 ? links.child[links.first_child[number]] : -1;
        next_sibling[at] = last ? -1 : links.child[links.first_child[parent[i]] + rank[i] + 1];
    }

    const int words = (N + 31) / 32;
    for (int at = threadIdx.x; at < N * words; at += THREADS) {
        const int number = at / words, word = at % words;
        unsigned bits = 0;
        int node = number;
        // The node and at most D ancestors, which descend in number: none is left for the word below its first.
        for (int steps = 0; steps <= D && node >= word * 32; ++steps) {
            if (node / 32 == word) bits |= 1u << node % 32;
            node = links.parent[node];
        }
        ancestor_mask[request * N * words + at] = bits;
    }
}
